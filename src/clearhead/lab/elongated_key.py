"""A longer key: what happens to the weights when one key is multiplied by alpha > 1."""

from collections.abc import Callable

import torch
from torch import Tensor

from clearhead.lab.claim import Check, Claim, Result, above, at_most, below, equals
from clearhead.nn.softargmax import softargmax

Rule = Callable[[Tensor, Tensor, float, float], Tensor]
"""(weights (m,), scores (m,), beta, alpha) -> the weights after key 0 has become alpha * key 0"""


def exact(weights: Tensor, scores: Tensor, beta: float, alpha: float) -> Tensor:
    """r = e^(beta (alpha-1) z_0); A_0 r / (1 - A_0 + A_0 r), all others divided by that same sum."""
    exponent = beta * (alpha - 1) * scores[0]
    scale = torch.exp(-exponent.clamp(min=0))  # numerator and denominator are multiplied by it: r may overflow
    grown = torch.cat([weights[:1] * torch.exp(exponent.clamp(max=0)), weights[1:] * scale])
    return grown / ((1 - weights[0]) * scale + grown[0])


def divided_by_alpha(weights: Tensor, scores: Tensor, beta: float, alpha: float) -> Tensor:
    """The mistake: key 0 gets 1/alpha of its weight, the others alpha/(m-1) times theirs, whatever the score."""
    return torch.cat([weights[:1] / alpha, weights[1:] * alpha / max(1, len(weights) - 1)])


def output_change(before: Tensor, after: Tensor, values: Tensor) -> Tensor:
    """(A'_0 - A_0) / (1 - A_0) (v_0 - h): weights before and after (m,), values (m,t) -> (t,)"""
    return (after[0] - before[0]) / (1 - before[0]) * (values[0] - before @ values)


def run(
    *, seed: int = 0, width: int = 8, n_keys: int = 6, alpha: float = 3.0, beta: float = 1.0, rule: Rule = exact
) -> Result:
    """Queries have variance 1/width and keys variance 1, so that beta = 1 is the usual scale."""
    random = torch.Generator().manual_seed(seed)
    query = torch.randn(width, generator=random, dtype=torch.float64) / width**0.5
    keys, values = torch.randn(2, n_keys, width, generator=random, dtype=torch.float64)
    errors, gains, output_errors = [], [], []
    for sign in (1, -1):  # once with a score above 0, once below
        keys[0] = keys[0] * sign * torch.sign(keys[0] @ query)
        scores = keys @ query
        longer = torch.cat([alpha * keys[:1], keys[1:]]) @ query
        before, after = softargmax(scores, beta), softargmax(longer, beta)
        predicted = rule(before, scores, beta, alpha)
        errors.append((predicted - after).abs().max())
        gains.append((after[0] - before[0]).item())
        moved = (after - before) @ values
        output_errors.append((output_change(before, predicted, values) - moved).abs().max())
    return Result(
        (
            at_most("weights: largest difference of the formula from measurement", max(errors).item(), 1e-12),
            at_most("output: largest difference of the formula from measurement", max(output_errors).item(), 1e-12),
            towards("change of A_a where z_a > 0", gains[0], alpha - 1),
            towards("change of A_a where z_a < 0", gains[1], 1 - alpha),
        )
    )


def towards(name: str, change: float, direction: float) -> Check:
    """A change of the sign of `direction`; with alpha = 1 the key stays as it is, and so does its weight."""
    if direction == 0:
        return equals(name, change, 0.0, 0.0)
    return above(name, change, 0.0) if direction > 0 else below(name, change, 0.0)


CLAIM = Claim(
    slug="elongated-key",
    kind="demonstration",
    rows=("R4.5",),
    lesson="Attention and its weights",
    statement="A key made alpha > 1 times longer gains weight if its score is above 0 and loses weight if it is below; "
    "the output moves towards its value, or away from it.",
    conditions="beta > 0. With alpha = 1 nothing changes; with alpha < 1, a shorter key, both directions are reversed.",
    mistake="The longer key's weight is divided by alpha, and the other m - 1 weights are multiplied by alpha/(m-1).",
    formula="r = e^(beta (alpha-1) z_a);  A'_a = A_a r / (1 - A_a + A_a r);  A'_i = A_i / (1 - A_a + A_a r);  "
    "dh = (A'_a - A_a) / (1 - A_a) (v_a - h)",
    run=run,
    try_next="clearhead lab elongated-key --alpha 10",
    least={"n_keys": 2, "alpha": 0, "beta": -10},
    most={"alpha": 1000, "beta": 10},
)
