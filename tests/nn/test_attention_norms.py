"""RMS norm and layer scale."""

import pytest
import torch
from torch import nn

from clearhead.nn.attention import LayerScale, RMSNorm


@pytest.fixture
def norm():
    norm = RMSNorm(6).double()
    nn.init.normal_(norm.weight)
    return norm


@pytest.fixture
def x():
    return torch.randn(3, 4, 6, dtype=torch.float64)


def test_rms_norm_is_its_formula(norm, x):
    expected = x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * norm.weight
    torch.testing.assert_close(norm(x), expected, rtol=0, atol=1e-14)


def test_rms_norm_equals_torchs_and_has_no_bias(norm, x):
    theirs = nn.RMSNorm(6, eps=1e-5).double()
    theirs.load_state_dict(norm.state_dict())
    assert torch.equal(norm(x), theirs(x))
    assert [name for name, _ in norm.named_parameters()] == ["weight"]


def test_rms_norm_does_not_depend_on_the_scale(norm, x):
    torch.testing.assert_close(norm(1000 * x), norm(10 * x), rtol=0, atol=1e-6)
    torch.testing.assert_close(norm(-x), -norm(x))


def test_rms_norm_of_centered_tokens_is_layer_norm_and_of_others_is_not(norm, x):
    layer_norm = nn.LayerNorm(6, bias=False).double()
    layer_norm.load_state_dict(norm.state_dict())
    centered = x - x.mean(-1, keepdim=True)
    torch.testing.assert_close(norm(centered), layer_norm(x))
    assert (norm(x + 1) - layer_norm(x + 1)).abs().max() > 0.1


def test_rms_norm_leaves_a_mean_square_of_one():
    out = RMSNorm(64)(100 * torch.randn(5, 64))
    torch.testing.assert_close(out.square().mean(-1), torch.ones(5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rms_norm_in_half_precision_squares_in_float32(dtype):
    """400² overflows float16."""
    x = torch.full((1, 8), 400.0, dtype=dtype)
    torch.testing.assert_close(RMSNorm(8).to(dtype)(x), torch.ones(1, 8, dtype=dtype))


def test_layer_scale_multiplies_each_channel(x):
    scale = LayerScale(6, 0.25).double()
    assert torch.equal(scale(x), 0.25 * x)
    nn.init.normal_(scale.gamma)
    assert torch.equal(scale(x), x * scale.gamma)
    assert [(name, tuple(p.shape)) for name, p in scale.named_parameters()] == [("gamma", (6,))]
