"""Masks by large negative numbers, and what they get wrong."""

import math

import torch
from torch import Tensor

from clearhead.lab.claim import Claim, Result, above, at_least, at_most
from clearhead.nn import masks
from clearhead.nn.attention import attend_reference


def run(*, seed: int = 0, width: int = 8, n_tokens: int = 6, low: float = -10_000.0) -> Result:
    """Adding `low` to the scores, before they are scaled, against a mask; low = -10 is the mistake made visible."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, n_tokens, width, generator=random)
    mask = masks.causal(n_tokens)
    beta = width**-0.5

    def added(number: float) -> Tensor:
        return attend_reference(q, k, v, logit_bias=beta * masks.to_additive(mask, number))[1]

    logits = beta * (q @ k.T + masks.to_additive(mask, low))
    by_mask = attend_reference(q, k, v, mask)[1]
    return Result(
        (
            at_most("weight that reaches a hidden key", added(low)[~mask].max().item(), 0.0),
            at_most("difference of all weights from a mask's", (added(low) - by_mask).abs().max().item(), 1e-6),
            above(
                "logarithm of that weight (with a mask: -inf)", logits.log_softmax(-1)[~mask].max().item(), -math.inf
            ),
            at_least("weight that reaches a hidden key with -10 instead", added(-10.0)[~mask].max().item(), 1e-8),
        )
    )


def run_row(*, seed: int = 0, width: int = 8, n_tokens: int = 6, low: float = -1e14, by_mask: bool = False) -> Result:
    """by_mask hides the row by a mask instead, and asks of it what holds of the number: the mistake."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, n_tokens, width, generator=random)
    nobody = torch.zeros(n_tokens, n_tokens, dtype=torch.bool)
    masked = attend_reference(q, k, v, nobody)[1]
    hidden = masked if by_mask else attend_reference(q, k, v, logit_bias=masks.to_additive(nobody, low))[1]
    return Result(
        (
            at_most("distance of its weights from 1/n each", (hidden - 1 / n_tokens).abs().max().item(), 1e-6),
            at_most("weight that a mask leaves it", masked.abs().max().item(), 0.0),
        )
    )


ADDITIVE = Claim(
    slug="additive-mask",
    kind="demonstration",
    rows=("R0.3",),
    lesson="Masks, training and testing",
    statement="-10000 added before the scale hides a key only because e^(-10000/sqrt d) underflows to 0; -10 leaks.",
    mistake="Any large negative number is a mask.",
    formula="e^(beta (z - 10000)) = 0 in floating point, e^(beta (z - 10)) is not",
    run=run,
    try_next="clearhead lab additive-mask --low -10",
    least={"n_tokens": 2},
)

HIDDEN_ROW = Claim(
    slug="hidden-row",
    kind="demonstration",
    rows=("R0.3",),
    lesson="Masks, training and testing",
    statement="A row hidden everywhere by -1e14 becomes uniform over what it may not see; a mask gives zeros.",
    mistake="Such a row is ignored.",
    formula="z - 1e14 = -1e14 in float32, whatever z; and softargmax of equal numbers is 1/n",
    run=run_row,
    try_next="clearhead lab additive-mask",
)
