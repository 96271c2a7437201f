"""Why scores are divided by sqrt(d): the spread of q·k grows with d, and softargmax saturates with the spread."""

import math
from collections.abc import Callable

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


def measure(width: int, beta: float, n_keys: int, random: torch.Generator) -> tuple[float, float]:
    """Variance of the logits, and entropy of their softargmax in units of the largest possible, over 512 draws."""
    q = torch.randn(512, 1, width, generator=random, dtype=torch.float64)
    k = torch.randn(512, n_keys, width, generator=random, dtype=torch.float64)
    logits = beta * (q @ k.mT)[:, 0]
    return logits.var().item(), entropy(softargmax(logits)).mean().item() / math.log(n_keys)


def entropy(shares: Tensor) -> Tensor:
    return -torch.xlogy(shares, shares).sum(-1)


def run(*, seed: int = 0, width: int = 256, n_keys: int = 16, scale: Scale = one_over_root) -> Result:
    random = torch.Generator().manual_seed(seed)
    narrow, wide = 4, max(16, width)
    variances, entropies = zip(*(measure(d, scale(d), n_keys, random) for d in (narrow, wide)), strict=True)
    plain_variance, plain_entropy = measure(wide, 1.0, n_keys, random)
    return Result(
        (
            equals(f"variance of the logits at width {wide}", variances[1], 1.0, 0.15),
            at_most("entropy lost from the narrow to the wide", entropies[0] - entropies[1], 0.1),
            equals("variance without the scale, over the width", plain_variance / wide, 1.0, 0.15),
            at_most("entropy left without the scale (1 is the most)", plain_entropy, 0.5),
            at_least("entropy left with it", entropies[1], 0.7),
        )
    )


CLAIM = Claim(
    slug="saturation",
    rows=("R4.17", "R4.1"),
    lesson="Softargmax and its temperature",
    statement="1/sqrt(d) keeps the logits of unit-variance queries and keys at unit variance: softargmax stays soft.",
    mistake="The scale is a detail: softargmax gives the same without it.",
    formula="Var(q·k) = d, so Var(q·k / sqrt(d)) = 1",
    run=run,
    try_next="clearhead lab saturation --width 4096",
)
