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
