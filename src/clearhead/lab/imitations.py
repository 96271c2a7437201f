"""Attention as a convolution: one head for each offset."""

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.lab.claim import Claim, Result, at_most
from clearhead.lab.constructions import SHARP, OffsetAttention, convolution, pointwise


def run(
    *, seed: int = 0, width: int = 3, length: int = 9, kernel: int = 3, beta: float = SHARP, border_mask: bool = True
) -> Result:
    """border_mask=False lets heads that look beyond the border look at the nearest place instead of at nothing."""
    torch.manual_seed(seed)

    def made(weight: Tensor, grid: tuple[int, ...]) -> OffsetAttention:
        attention = convolution(weight, None, grid, beta)
        if not border_mask:
            attention.mask = torch.ones_like(attention.mask)
        return attention

    line = torch.randn(2, width, length, dtype=torch.float64)
    weight = torch.randn(width, width, kernel, dtype=torch.float64)
    error_1d = (made(weight, (length,))(line.mT).mT - F.conv1d(line, weight, padding=kernel // 2)).abs().max().item()
    side = min(length, 6)
    image = torch.randn(2, width, side, side, dtype=torch.float64)
    weight = torch.randn(width, width, kernel, kernel, dtype=torch.float64)
    out = made(weight, (side, side))(image.flatten(2).mT).mT.unflatten(2, (side, side))
    error_2d = (out - F.conv2d(image, weight, padding=kernel // 2)).abs().max().item()
    return Result(
        (
            at_most("largest difference from conv1d", error_1d, 1e-9),
            at_most("largest difference from conv2d", error_2d, 1e-9),
        )
    )


def run_linear(*, seed: int = 0, width: int = 4, length: int = 6, beta: float = SHARP) -> Result:
    torch.manual_seed(seed)
    x, weight = torch.randn(2, length, width, dtype=torch.float64), torch.randn(width, width, dtype=torch.float64)
    error = (pointwise(weight, None, length, beta)(x) - F.linear(x, weight)).abs().max().item()
    flat = pointwise(weight, None, length, beta=0.0)(x)
    return Result(
        (
            at_most("largest difference from a linear layer at each place", error, 1e-9),
            at_most("beta 0: largest difference between two places", (flat - flat[:, :1]).abs().max().item(), 1e-12),
        )
    )


CONVOLUTION = Claim(
    slug="convolution",
    kind="demonstration",
    rows=("R4.11", "R4.7"),
    lesson="What attention can compute",
    statement="One head per offset, none beyond the border, beta large: attention is any convolution of stride 1.",
    mistake="Attention cannot look at neighbours by their place.",
    formula="score = -|y + offset - y'|² + const;  W_O W_V of a head = the kernel's tap;  zero padding",
    run=run,
    try_next="clearhead lab convolution --beta 2",
)

RUNNING_LINEAR = Claim(
    slug="running-linear",
    kind="demonstration",
    rows=("R4.10",),
    lesson="What attention can compute",
    statement="Attention whose weights are the identity is a linear layer run along the sequence: a 1x1 convolution.",
    mistake="beta = 0 makes it one (that gives every place the same mean).",
    formula="A = I:  H = W X",
    run=run_linear,
    try_next="clearhead lab running-linear --beta 0",
)
