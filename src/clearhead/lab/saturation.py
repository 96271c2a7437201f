"""Why scores are divided by sqrt(d): the spread of q·k grows with d, and softargmax saturates with the spread."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.lab.claim import Claim, Result, at_least, at_most, equals
from clearhead.nn.softargmax import softargmax

Scale = Callable[[int], float]


def one_over_root(width: int) -> float:
    return 1 / math.sqrt(width)


def unscaled(width: int) -> float:
    """The mistake: the scale does not matter."""
    return 1.0


@dataclass(frozen=True)
class Softness:
    """Of softargmax over some keys, the mean over many draws of a query and its keys."""

    variance: float
    """of the logits"""
    entropy: float
    """of the weights, in units of the largest possible"""
    gradient: float
    """norm at the logits of what arrives at the weights as random numbers of unit variance"""
    vanished: float
    """fraction of the logits whose gradient is below 1e-6"""


def measure(width: int, beta: float, n_keys: int, random: torch.Generator, raised: float = 0.0) -> Softness:
    """`raised` is added to all logits alike: as large as they then are, their spread stays."""
    n_draws = max(4, min(512, 2**24 // (width * n_keys)))  # larger draws vary less, and have to fit into memory
    q = torch.randn(n_draws, 1, width, generator=random, dtype=torch.float64)
    k = torch.randn(n_draws, n_keys, width, generator=random, dtype=torch.float64)
    logits = (raised + beta * (q @ k.mT)[:, 0]).requires_grad_()
    weights = softargmax(logits)
    arriving = torch.randn(weights.shape, generator=random, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(weights, logits, arriving)
    return Softness(
        variance=logits.var().item(),
        entropy=entropy(weights).mean().item() / math.log(n_keys),
        gradient=gradient.norm(dim=-1).mean().item(),
        vanished=(gradient.abs() < 1e-6).double().mean().item(),
    )


def entropy(shares: Tensor) -> Tensor:
    return -torch.xlogy(shares, shares).sum(-1)


def run(*, seed: int = 0, width: int = 256, n_keys: int = 16, scale: Scale = one_over_root) -> Result:
    random = torch.Generator().manual_seed(seed)
    narrow, wide, plain = (measure(d, s, n_keys, random) for d, s in ((4, scale(4)), (width, scale(width)), (width, 1)))
    raised = measure(width, scale(width), n_keys, random, raised=1000.0)
    return Result(
        (
            equals("variance of the logits at width 4", narrow.variance, 1.0, 0.35),
            equals(f"variance of the logits at width {width}", wide.variance, 1.0, 0.15),
            equals("variance without the scale, over the width", plain.variance / width, 1.0, 0.15),
            at_most("entropy lost from width 4 to the wide", narrow.entropy - wide.entropy, 0.1),
            at_least("entropy left with the scale (1 is the most)", wide.entropy, 0.7),
            at_most("entropy left without it", plain.entropy, 0.5),
            at_most("fraction of logits with a gradient below 1e-6, with the scale", wide.vanished, 0.05),
            at_least("the same without it", plain.vanished, 0.15),
            at_least("all logits 1000 larger, spread the same: entropy left", raised.entropy, 0.7),
        )
    )


CLAIM = Claim(
    slug="saturation",
    rows=("R4.17", "R4.1"),
    lesson="Softargmax and its temperature",
    statement="Softargmax saturates with the spread of its logits, and many of their gradients vanish; 1/sqrt(d) keeps "
    "their variance at 1 for unit-variance q and k.",
    conditions="The components of q and k are independent, with mean 0 and variance 1; the width is at least 64.",
    mistake="The scale is a detail: softargmax gives the same without it.",
    formula="Var(q·k) = d, so Var(q·k / sqrt(d)) = 1",
    run=run,
    try_next="clearhead lab saturation --width 4096",
    least={"width": 64, "n_keys": 2},
    most={"width": 4096, "n_keys": 4096},
)
