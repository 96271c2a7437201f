import math

import torch

from clearhead.nn.attention import Linear


def test_weights_are_drawn_within_the_bound_of_xavier_and_the_bias_is_zero():
    linear = Linear(30, 50)
    bound = math.sqrt(6 / (30 + 50))
    assert linear.weight.shape == (50, 30)
    assert 0.95 * bound < linear.weight.abs().max() <= bound
    assert (linear.bias == 0).all()
    assert Linear(3, 5, bias=False).bias is None


def test_a_square_layer_keeps_the_variance_forwards_and_backwards():
    linear = Linear(256, 256)
    x = torch.randn(500, 256, requires_grad=True)
    out = linear(x)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    assert abs(out.var() - 1) < 0.05
    assert abs(x.grad.var() - 1) < 0.05
