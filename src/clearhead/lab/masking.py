"""Masks by large negative numbers, and what they get wrong."""

import torch

from clearhead.lab.claim import Claim, Result, at_most
from clearhead.nn import masks
from clearhead.nn.attention import attend_reference


def run(*, seed: int = 0, width: int = 8, n_tokens: int = 6, low: float = -10_000.0) -> Result:
    """Adding `low` to the scores, before they are scaled, against a mask; low = -10 is the mistake made visible."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, n_tokens, width, generator=random, dtype=torch.float64)
    mask = masks.causal(n_tokens)
    beta = width**-0.5
    bias = beta * masks.to_additive(mask, low, torch.float64)
    _, added = attend_reference(q, k, v, logit_bias=bias)
    return Result((at_most("weight that reaches a hidden key", added[~mask].max().item(), 0.0),))


def run_row(*, seed: int = 0, width: int = 8, n_tokens: int = 6, low: float = -1e14) -> Result:
    random = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, n_tokens, width, generator=random)
    nobody = torch.zeros(n_tokens, n_tokens, dtype=torch.bool)
    _, added = attend_reference(q, k, v, logit_bias=masks.to_additive(nobody, low))
    _, masked = attend_reference(q, k, v, nobody)
    return Result(
        (
            at_most("distance of its weights from 1/n each", (added - 1 / n_tokens).abs().max().item(), 1e-6),
            at_most("weight that a mask leaves it", masked.abs().max().item(), 0.0),
        )
    )


ADDITIVE = Claim(
    slug="additive-mask",
    rows=("R0.3",),
    lesson="Masks, training and testing",
    statement="-10000 added before the scale hides a key only because e^-3500 underflows to 0; -10 leaks.",
    mistake="Any large negative number is a mask.",
    formula="e^(beta (z - 10000)) = 0 in floating point, e^(beta (z - 10)) is not",
    run=run,
    try_next="clearhead lab additive-mask --low -10",
)

HIDDEN_ROW = Claim(
    slug="hidden-row",
    rows=("R0.3",),
    lesson="Masks, training and testing",
    statement="A row hidden everywhere by -1e14 becomes uniform over what it may not see; a mask gives zeros.",
    mistake="Such a row is ignored.",
    formula="z - 1e14 = -1e14 in float32, whatever z; and softargmax of equal numbers is 1/n",
    run=run_row,
    try_next="clearhead lab additive-mask",
)
