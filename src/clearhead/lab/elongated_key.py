"""A longer key: what happens to the weights when one key is multiplied by alpha > 1."""

from collections.abc import Callable

import torch
from torch import Tensor

from clearhead.lab.claim import Claim, Result, above, at_most
from clearhead.nn.attention import softargmax

Rule = Callable[[Tensor, Tensor, float, float], Tensor]
"""(weights (m,), scores (m,), beta, alpha) -> the weights after key 0 has become alpha * key 0"""


def exact(weights: Tensor, scores: Tensor, beta: float, alpha: float) -> Tensor:
    """r = e^(beta (alpha-1) z_0); A_0 r / (1 - A_0 + A_0 r), all others divided by that same sum."""
    ratio = torch.exp(beta * (alpha - 1) * scores[0])
    grown = torch.cat([weights[:1] * ratio, weights[1:]])
    return grown / (1 - weights[0] + weights[0] * ratio)


def divided_by_alpha(weights: Tensor, scores: Tensor, beta: float, alpha: float) -> Tensor:
    """The mistake: the other weights are divided by alpha, whatever the score."""
    others = weights[1:] / alpha
    return torch.cat([1 - others.sum(0, keepdim=True), others])


def run(
    *, seed: int = 0, width: int = 8, n_keys: int = 6, alpha: float = 3.0, beta: float = 0.5, rule: Rule = exact
) -> Result:
    random = torch.Generator().manual_seed(seed)
    query = torch.randn(width, generator=random, dtype=torch.float64)
    keys = torch.randn(n_keys, width, generator=random, dtype=torch.float64)
    errors, gains = [], []
    for sign in (1, -1):  # once with a score above 0, once below
        keys[0] = keys[0] * sign * torch.sign(keys[0] @ query)
        scores = keys @ query
        longer = torch.cat([alpha * keys[:1], keys[1:]]) @ query
        before, after = softargmax(scores, beta), softargmax(longer, beta)
        errors.append((rule(before, scores, beta, alpha) - after).abs().max())
        gains.append(sign * (after[0] - before[0]))
    return Result(
        (
            at_most("largest difference between formula and measurement", torch.stack(errors).max().item(), 1e-12),
            above("how far A_0 rises where z_0 > 0", gains[0].item(), 0.0),
            above("how far it falls where z_0 < 0", gains[1].item(), 0.0),
        )
    )


CLAIM = Claim(
    slug="elongated-key",
    rows=("R4.5",),
    lesson="Attention and its weights",
    statement="A key made alpha > 1 times longer gains weight if its score is above 0 and loses weight if it is below.",
    mistake="The other weights are divided by alpha.",
    formula="r = e^(beta (alpha-1) z_a);  A'_a = A_a r / (1 - A_a + A_a r);  A'_i = A_i / (1 - A_a + A_a r)",
    run=run,
    try_next="clearhead lab elongated-key --alpha 10",
    least={"n_keys": 2, "alpha": 1},
)
