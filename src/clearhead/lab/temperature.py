"""What beta does: from the mean of the values to the choice of one."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from clearhead.lab.claim import Claim, Result, at_most, equals
from clearhead.nn.softargmax import softargmax

Rule = Callable[[Tensor, float], Tensor]


def softargmin(z: Tensor, beta: float) -> Tensor:
    """The mistake: e^(-beta z)."""
    return softargmax(z, -beta)


def run(*, seed: int = 0, n_keys: int = 6, rule: Rule = softargmax) -> Result:
    z = torch.randn(n_keys, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    best, worst = torch.zeros_like(z), torch.zeros_like(z)
    best[z.argmax()] = worst[z.argmin()] = 1.0
    tied = torch.cat([z, z.max()[None]])

    def gap(beta: float, expected: Tensor, scores: Tensor = z) -> float:
        return (rule(scores, beta) - expected).abs().max().item()

    return Result(
        (
            equals("beta 1: sum over the keys", rule(z, 1.0).sum().item(), 1.0, 1e-12),
            at_most("beta 0: distance from 1/m each", gap(0.0, torch.full_like(z, 1 / n_keys)), 0.0),
            at_most("beta 1: distance from plain softmax", gap(1.0, z.softmax(0)), 1e-15),
            at_most("beta +inf: distance from the argmax", gap(math.inf, best), 0.0),
            at_most("beta -inf: distance from the argmin", gap(-math.inf, worst), 0.0),
            at_most("beta +inf, two largest: distance from 1/2", gap(math.inf, (tied == z.max()) / 2, tied), 0.0),
        )
    )


CLAIM = Claim(
    slug="temperature",
    kind="demonstration",
    rows=("R4.1",),
    lesson="Softargmax and its temperature",
    statement="beta = 0 shares equally, 1 is softmax, +inf chooses the largest and -inf the smallest; ties share.",
    mistake="softargmax is e^(-beta z) / sum, and beta = 1 gives the argmin.",
    formula="softargmax_beta(z)_i = e^(beta z_i) / sum_j e^(beta z_j)",
    run=run,
    try_next="clearhead lab saturation",
)
