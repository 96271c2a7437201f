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


def test_bert_starts_with_small_weights_and_no_biases():
    torch.manual_seed(0)
    model = VisionTransformer.from_config(bert_cifar10())
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    assert len(layers) > 12 * 6
    for layer in layers:
        assert layer.weight.std().item() == pytest.approx(BERT, rel=0.1)
        assert not layer.bias.any()


def test_what_passes_by_survives_twelve_norms():
    """The share of an image's own difference from another that is left behind the blocks, norms after each sum."""
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    left = {}
    for init in ("xavier", "bert"):
        model = build(12, init).eval()
        with torch.no_grad():
            tokens = model.pos_embed(model.patch_embed(images), (4, 4))
            tokens = tokens / tokens.std(-1, keepdim=True)
            behind = model.norm(nn.Sequential(*model.blocks)(tokens))
        left[init] = torch.cosine_similarity(
            (tokens[0] - tokens[1]).flatten(), (behind[0] - behind[1]).flatten(), dim=0
        ).item()
    assert left["bert"] > 0.9
    assert left["xavier"] < 0.5


def test_a_word_that_is_no_way_to_start_is_answered():
    with pytest.raises(ValueError, match="init must be one of xavier, bert, got 'orthogonal'"):
        build(1, "orthogonal")
