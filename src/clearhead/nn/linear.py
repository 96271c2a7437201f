"""The linear layer as every part of this package starts it."""

from torch import nn


def xavier_linear(n_in: int, n_out: int, bias: bool = True) -> nn.Linear:
    """x Wᵀ + b, with W drawn so that the variance is kept forwards and backwards (Xavier, uniform), and b = 0."""
    linear = nn.Linear(n_in, n_out, bias)
    nn.init.xavier_uniform_(linear.weight)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear
