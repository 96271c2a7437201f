import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead import attend_fused, attend_reference
from clearhead.lab.constructions import (
    convolution,
    feedforward_as_convolutions,
    identity,
    message_passing,
    permutation,
    pointwise,
)
from clearhead.lab.temperature import hard_attention_as_linear, soft_attention_as_linear
from clearhead.nn.blocks import MLP

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
both_dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def as_tokens(images):
    return images.flatten(2).transpose(1, 2)


def max_abs(difference):
    return difference.abs().max().item()


@both_dtypes
@settings(deadline=None, max_examples=15)
@given(
    sizes=st.tuples(*[st.sampled_from([1, 3, 5])] * 2),
    grid=st.tuples(*[st.integers(1, 7)] * 2),
    channels=st.tuples(*[st.integers(1, 4)] * 2),
    seed=st.integers(0, 99),
)
def test_attention_computes_any_convolution_of_stride_1(dtype, sizes, grid, channels, seed):
    torch.manual_seed(seed)
    weight, bias = torch.randn(*channels, *sizes, dtype=dtype), torch.randn(channels[0], dtype=dtype)
    images = torch.randn(2, channels[1], *grid, dtype=dtype)
    expected = F.conv2d(images, weight, bias, padding=tuple(size // 2 for size in sizes))
    out = convolution(weight, bias, grid)(as_tokens(images))
    assert max_abs(out - as_tokens(expected)) <= TOLERANCE[dtype]
    line = images[:, :, 0]
    expected = F.conv1d(line, weight[:, :, 0], bias, padding=sizes[1] // 2)
    out = convolution(weight[:, :, 0], bias, grid[1:])(as_tokens(line))
    assert max_abs(out - as_tokens(expected)) <= TOLERANCE[dtype]


def test_constructed_convolution_zero_pads_the_border():
    """Without the mask, a head whose offset points beyond the border selects the nearest key."""
    layer = convolution(torch.ones(1, 1, 3, dtype=torch.float64), None, (4,))
    x = torch.ones(1, 4, 1, dtype=torch.float64)
    torch.testing.assert_close(layer(x).flatten(), torch.tensor([2.0, 3, 3, 2], dtype=torch.float64))
    layer.mask = torch.ones_like(layer.mask)
    assert layer(x)[0, 0, 0] > 2.5


def test_convolution_error_decreases_with_beta():
    torch.manual_seed(0)
    weight, images = torch.randn(2, 2, 3, dtype=torch.float64), torch.randn(1, 2, 6, dtype=torch.float64)
    expected = as_tokens(F.conv1d(images, weight, padding=1))
    errors = [max_abs(convolution(weight, None, (6,), beta)(as_tokens(images)) - expected) for beta in (0.5, 2, 8, 32)]
    assert all(later < earlier / 2 for earlier, later in pairwise(errors))


def test_identity_and_pointwise_constructions_equal_linear_layers():
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    torch.testing.assert_close(identity(3, 5)(x), x)
    weight, bias = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    torch.testing.assert_close(pointwise(weight, bias, 5)(x), F.linear(x, weight, bias))
    mean = pointwise(weight, bias, 5, beta=0.0)(x)  # the misconception: all outputs are equal
    assert max_abs(mean - mean[:, :1]) < 1e-12


def test_permutation_construction_and_counterexample_without_positions():
    x, order = torch.randn(2, 5, 3, dtype=torch.float64), torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(permutation(x, order), x[:, order])
    two_tokens = torch.tensor([[1.0, 0], [3, 0]])  # both queries select the second key
    assert attend_fused(two_tokens, two_tokens, two_tokens, beta=math.inf).tolist() == [[3, 0], [3, 0]]


@pytest.mark.parametrize("is_complete", [True, False])
def test_message_passing_equals_attention_with_an_edge_mask(is_complete):
    torch.manual_seed(0)
    q, k, x = torch.randn(3, 6, 4, dtype=torch.float64)
    edges = None if is_complete else torch.rand(6, 6) < 0.4
    if edges is not None:
        edges[2] = False  # a node without edges
    out, _ = attend_reference(q, k, x, edges, beta=1.0)
    torch.testing.assert_close(message_passing(x, q @ k.T, edges), out)


@pytest.mark.parametrize("bias", [True, False])
def test_mlp_equals_two_1x1_convolutions(bias):
    net, x = MLP(4, 9, bias=bias).double(), torch.randn(2, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(feedforward_as_convolutions(net)(x.mT).mT, net(x))


def test_soft_and_hard_attention_equal_fully_connected_layers():
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 4).double(), torch.randn(6, 4).double(), torch.randn(6, 3).double()
    torch.testing.assert_close(attend_fused(q, k, v, beta=0.0), (soft_attention_as_linear(6) @ v).expand(5, 3))
    torch.testing.assert_close(attend_fused(q, k, v, beta=math.inf), hard_attention_as_linear(q @ k.T) @ v)


@pytest.mark.parametrize(
    ("shape", "grid", "message"),
    [
        ((1, 1, 2), (4,), "must be odd, got \\(2,\\)"),
        ((1, 1, 3), (4, 4), "same number of axes, got kernel sizes \\(3,\\) and grid \\(4, 4\\)"),
    ],
)
def test_invalid_kernels_raise_value_errors(shape, grid, message):
    with pytest.raises(ValueError, match=message):
        convolution(torch.ones(shape), None, grid)
