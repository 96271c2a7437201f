import pytest
import torch
from torch import nn

from clearhead import VisionTransformer
from clearhead.models.config import VisionConfig
from clearhead.models.presets import bert_cifar10
from clearhead.models.vit import BERT


def build(depth, init):
    torch.manual_seed(0)
    return VisionTransformer.from_config(
        VisionConfig(
            width=64, depth=depth, num_heads=4, norm="post", image_size=16, patch_size=4, num_classes=5,
            init=init,
        )
    )  # fmt: skip


def test_bert_init_has_small_weights_and_zero_biases():
    torch.manual_seed(0)
    model = VisionTransformer.from_config(bert_cifar10())
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    assert len(layers) > 12 * 6
    for layer in layers:
        assert layer.weight.std().item() == pytest.approx(BERT, rel=0.1)
        assert not layer.bias.any()


def test_bert_init_preserves_the_residual_signal_through_twelve_post_norms():
    """Cosine similarity of the difference between two images before and after the post-norm blocks."""
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    similarity = {}
    for init in ("xavier", "bert"):
        model = build(12, init).eval()
        with torch.no_grad():
            tokens = model.pos_embed(model.patch_embed(images), (4, 4))
            tokens = tokens / tokens.std(-1, keepdim=True)
            output = model.norm(nn.Sequential(*model.blocks)(tokens))
        similarity[init] = torch.cosine_similarity(
            (tokens[0] - tokens[1]).flatten(), (output[0] - output[1]).flatten(), dim=0
        ).item()
    assert similarity["bert"] > 0.9
    assert similarity["xavier"] < 0.5


def test_an_unknown_init_raises():
    with pytest.raises(ValueError, match="init must be one of xavier, bert, got 'orthogonal'"):
        build(1, "orthogonal")


@pytest.mark.parametrize(("init", "head_mlp_dim"), [("xavier", 0), ("bert", 12)])
def test_reset_classifier_replaces_the_head_only(init, head_mlp_dim):
    sizes = {"width": 32, "depth": 1, "num_heads": 2, "image_size": 8, "patch_size": 4, "num_classes": 5}
    model = VisionTransformer(**sizes, init=init, head_mlp_dim=head_mlp_dim, mlp_dropout=0.1).double().eval()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    features, before = model.features(images), {name: weight.clone() for name, weight in model.state_dict().items()}
    model.reset_classifier(7)
    assert model(images).shape == (2, 7)
    assert model.config.num_classes == 7
    assert torch.equal(model.features(images), features)
    after = model.state_dict()
    assert after.keys() == before.keys() == VisionTransformer.from_config(model.config).state_dict().keys()
    changed = {name for name in after if after[name].shape != before[name].shape or not after[name].equal(before[name])}
    assert changed
    assert all(name.startswith("head.") for name in changed)
    assert not any(module.training for module in model.modules())
    if init == "bert":
        assert model.head.fc1.weight.std().item() == pytest.approx(BERT, rel=0.3)


def test_reset_classifier_refuses_a_number_of_classes_that_no_model_has():
    model = build(1, "xavier")
    with pytest.raises(ValueError, match=r"num_classes.*got 0"):
        model.reset_classifier(0)
    assert model.head.out_features == model.config.num_classes == 5
