"""A small random step of one key: how every output moves."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.drawing import BLACK
from clearhead.lab.claim import Check, Claim, Result, above, at_most, below, equals
from clearhead.lab.plots import (
    CORRECT,
    MISCONCEPTION,
    label,
    label_axes,
    legend_below,
    scatter_against,
    set_headline,
    subplots,
)
from clearhead.nn.attention import attend_reference, softargmax

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FirstOrderRule = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""(weights of key a (n,), eps·q (n,), v_a (t,), out (n,t), beta) -> first-order change of the outputs (n,t)"""


def first_order(weight: Tensor, step: Tensor, v_a: Tensor, out: Tensor, beta: float) -> Tensor:
    """beta A_aj (eps·q_j) (v_a - h_j)"""
    return beta * (weight * step)[:, None] * (v_a - out)


def scaled_down(weight: Tensor, step: Tensor, v_a: Tensor, out: Tensor, beta: float) -> Tensor:
    """The misconception: the weight of the key falls, whichever way the key moved."""
    return -beta * (weight * step.abs())[:, None] * (v_a - out)


def run_perturbed_key(
    *,
    seed: int = 0,
    width: int = 8,
    num_keys: int = 6,
    beta: float = 1.0,
    step_size: float = 1e-6,
    rule: FirstOrderRule = first_order,
) -> Result:
    """Queries have variance 1/width and keys variance 1, so that beta = 1 is the usual scale."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, width, generator=random, dtype=torch.float64) for n in (5, num_keys, num_keys))
    q /= width**0.5
    eps = torch.randn(width, generator=random, dtype=torch.float64)
    eps = step_size * eps / eps.norm()
    out, weights = attend_reference(q, k, v, beta=beta)
    moved = k.clone()
    moved[0] += eps
    # Central difference: the terms of second order are the same on both sides, and cancel.
    back = k.clone()
    back[0] -= eps
    measured = (attend_reference(q, moved, v, beta=beta)[0] - attend_reference(q, back, v, beta=beta)[0]) / 2
    predicted = rule(weights[:, 0], q @ eps, v[0], out, beta)
    error = (measured - predicted).norm() / measured.norm()
    remainder = (beta * q @ eps).abs().max().item() ** 2 / 2  # of the terms of third order, relative to the first
    still = int((measured.norm(dim=1) == 0).sum())
    return Result(
        (
            at_most("relative error of the first-order formula", error.item(), max(1e-5, remainder)),
            at_most("outputs that did not move at all", still, 0.0),
            *second_order(random, q[0], k, v, beta),
        )
    )


def second_order(random: torch.Generator, q: Tensor, k: Tensor, v: Tensor, beta: float) -> list[Check]:
    """Random steps of variance s²: which way they move the output, and the mean scatter_against the formula."""
    out, weights = attend_reference(q[None], k, v, beta=beta)
    share = weights[0, 0]
    s = 0.05 / (beta * q.norm())  # small enough for the third order to stay away
    steps = torch.randn(20_000, 1, len(q), generator=random, dtype=torch.float64)
    steps *= s * q.norm() / (steps @ q).square().mean().sqrt()  # their spread along q is s² exactly, not nearly
    total, closer = torch.zeros_like(out), 0.0
    for sign in (1, -1):  # each step and its opposite: the first-order part, a control variate, drops out
        moved = k.repeat(len(steps), 1, 1)
        moved[:, 0] += sign * steps[:, 0]
        queries = q.expand(len(steps), 1, -1)
        outputs = attend_reference(queries, moved, v.expand(len(steps), -1, -1), beta=beta)[0]
        total += outputs.mean(0) / 2
        if sign == 1:
            closer = ((outputs - out) @ (v[0] - out[0]) > 0).double().mean().item()
    scale = 0.5 * beta**2 * s**2 * q.square().sum() * share * (v[0] - out)
    error = (total - out - scale * (1 - 2 * share)).norm() / scale.norm()
    return [
        equals("share of random steps that bring the output closer to v_a", closer, 0.5, 0.03),
        at_most("error of the second-order mean, over ½ beta² s² |q|² A_a |v_a - h|", error.item(), 0.02),
    ]


def draw_perturbed_key(
    *, seed: int = 0, width: int = 8, num_keys: int = 6, beta: float = 1.0, step_size: float = 1e-6
) -> "Figure":
    """Left: each number of each output after one random step of key 1. Right: one output after many such steps."""
    if step_size == 0:
        raise ValueError("a step must have a size to be drawn, got step_size=0; try step_size=1e-6")
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, width, generator=random, dtype=torch.float64) for n in (5, num_keys, num_keys))
    q /= width**0.5
    steps = torch.randn(1000, width, generator=random, dtype=torch.float64)
    steps = step_size * steps / steps.norm(dim=-1, keepdim=True)
    out, weights = attend_reference(q, k, v, beta=beta)
    moved = k.repeat(len(steps), 1, 1)
    moved[:, 0] += steps
    queries, values = q.expand(len(steps), -1, -1), v.expand(len(steps), -1, -1)
    measured = (attend_reference(queries, moved, values, beta=beta)[0] - out) / step_size  # (steps,queries,width)
    arguments = (weights[:, 0], q @ steps[0] / step_size, v[0], out, beta)

    figure, (left, right) = subplots("AB")
    scatter_against(left, measured[0], rules(first_order(*arguments), scaled_down(*arguments)))
    label_axes(left, "One step of key 1", "predicted change / |step|", "measured change / |step|")
    legend_below(figure, left)
    along = measured[:, 0] @ F.normalize(v[0] - out[0], dim=0)
    right.hist(along.tolist(), bins=30, color=CORRECT)
    right.axvline(0, color=BLACK, linewidth=2)
    right.axvline(along.mean().item(), color=MISCONCEPTION, linewidth=2, linestyle="--")
    label(right, along.mean().item(), 1.0, "mean", MISCONCEPTION, xycoords=("data", "axes fraction"), offset=(6, -14))
    right.margins(y=0.15)
    label_axes(right, "1000 random steps", "change towards $v_1$ / |step|", "number of steps")
    set_headline(figure, "A small step of a key moves the output along $v_1 - h$, zero on average")
    return figure


def rules(formula: Tensor, misconception: Tensor) -> dict[str, tuple[Tensor, str, str]]:
    """Two predictions, as `scatter_against` draws them."""
    return {"formula": (formula, CORRECT, "o"), "misconception": (misconception, MISCONCEPTION, "x")}


PERTURBED_KEY = Claim(
    slug="perturbed-key",
    kind="demonstration",
    lesson="Attention and its weights",
    statement="A small random step of key a moves every output to or from v_a; to first order, zero on average.",
    conditions="The step is small: the first-order formula is off by a part of the order of (beta eps·q_j)².",
    misconception="The attention paid to the moved key is always scaled down.",
    formula="dh_j = beta A_aj (eps·q_j)(v_a - h_j);  E[dh_j] = ½ beta² s² |q_j|² A_a (1 - 2 A_a)(v_a - h_j)",
    run=run_perturbed_key,
    figure=draw_perturbed_key,
    try_next="clearhead lab perturbed-key --step-size 0.1",
    minimum={"num_keys": 2, "beta": 0.01, "step_size": 1e-9},
    maximum={"width": 1024, "beta": 2, "step_size": 1},
)


Rule = Callable[[Tensor, Tensor, float, float], Tensor]
"""(weights (m,), scores (m,), beta, alpha) -> the weights after key 0 has become alpha * key 0"""


def exact(weights: Tensor, scores: Tensor, beta: float, alpha: float) -> Tensor:
    """r = e^(beta (alpha-1) z_0); A_0 r / (1 - A_0 + A_0 r), all others divided by that same sum."""
    exponent = beta * (alpha - 1) * scores[0]
    scale = torch.exp(-exponent.clamp(min=0))  # numerator and denominator are multiplied by it: r may overflow
    grown = torch.cat([weights[:1] * torch.exp(exponent.clamp(max=0)), weights[1:] * scale])
    return grown / ((1 - weights[0]) * scale + grown[0])


def divided_by_alpha(weights: Tensor, scores: Tensor, beta: float, alpha: float) -> Tensor:
    """The misconception: key 0 gets 1/alpha of its weight, the others alpha/(m-1) times theirs, whatever the score."""
    return torch.cat([weights[:1] / alpha, weights[1:] * alpha / max(1, len(weights) - 1)])


def output_change(before: Tensor, after: Tensor, values: Tensor) -> Tensor:
    """(A'_0 - A_0) / (1 - A_0) (v_0 - h): weights before and after (m,), values (m,t) -> (t,)"""
    return (after[0] - before[0]) / (1 - before[0]) * (values[0] - before @ values)


def run_scaled_key(
    *, seed: int = 0, width: int = 8, num_keys: int = 6, alpha: float = 3.0, beta: float = 1.0, rule: Rule = exact
) -> Result:
    """Queries have variance 1/width and keys variance 1, so that beta = 1 is the usual scale."""
    random = torch.Generator().manual_seed(seed)
    query = torch.randn(width, generator=random, dtype=torch.float64) / width**0.5
    keys, values = torch.randn(2, num_keys, width, generator=random, dtype=torch.float64)
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


NUM_QUERIES = 12


def draw_scaled_key(
    *, seed: int = 0, width: int = 8, num_keys: int = 6, alpha: float = 3.0, beta: float = 1.0
) -> "Figure":
    """Once key 1 is alpha times as long: the weights and outputs of some queries, and its own weight scatter_against alpha."""
    random = torch.Generator().manual_seed(seed)
    keys = torch.randn(num_keys, width, generator=random, dtype=torch.float64)
    queries = torch.randn(NUM_QUERIES, width, generator=random, dtype=torch.float64) / width**0.5
    values = torch.randn(num_keys, width, generator=random, dtype=torch.float64)
    scores = queries @ keys.T
    before, after = softargmax(scores, beta), softargmax(longer(scores, alpha), beta)
    formula, misconception = (
        torch.stack([rule(a, z, beta, alpha) for a, z in zip(before, scores, strict=True)])
        for rule in (exact, divided_by_alpha)
    )
    figure, (left, middle, right) = subplots("ABC")
    scatter_against(left, after, rules(formula, misconception), bins=3)
    label_axes(left, f"Weights, alpha = {alpha:.3g}", "predicted", "measured")
    legend_below(figure, left)
    scatter_against(
        middle,
        (after - before) @ values,
        rules(moved_output(before, formula, values), (misconception - before) @ values),
        3,
    )
    label_axes(middle, "Change of the output", "predicted", "measured")
    draw_own_weight(right, before, scores, beta, alpha)
    set_headline(figure, "A longer key gains weight if its score is positive, and loses it otherwise")
    return figure


def moved_output(before: Tensor, after: Tensor, values: Tensor) -> Tensor:
    """h' - h = (A'_1 - A_1) / (1 - A_1) (v_1 - h), from the weights of key 1 alone. (Q,m), (Q,m), (m,E) -> (Q,E)"""
    gain = (after[:, :1] - before[:, :1]) / (1 - before[:, :1])
    return gain * (values[0] - before @ values)


def draw_own_weight(axes: "Axes", before: Tensor, scores: Tensor, beta: float, alpha: float) -> None:
    """The weight of the longer key scatter_against alpha, of one query with a positive score and of one with a negative."""
    low, high = min(1.0, max(alpha, 0.1)), max(alpha, 1.5)  # a shorter key is shown too
    alphas = torch.linspace(low, high, 37, dtype=torch.float64)
    own = scores[:, 0]
    for text, query in (("z > 0", own.argmax()), ("z < 0", before[:, 0].where(own < 0, -1).argmax())):
        a, z = before[query], scores[query]
        measured = [softargmax(longer(z, times), beta)[0].item() for times in alphas.tolist()]
        claimed = [divided_by_alpha(a, z, beta, times)[0].item() for times in alphas.tolist()]
        look: dict[str, Any] = {"linewidth": 3, "markersize": 8, "markevery": 9}
        axes.plot(alphas, claimed, "x--", color=MISCONCEPTION, markeredgewidth=2, **look)
        axes.plot(alphas, measured, "o-", color=CORRECT, **look)
        label(axes, alphas[-1].item(), measured[-1], text, CORRECT, offset=(8, 0), va="center")
    axes.set_ylim(-0.05, 1.1)
    axes.set_xlim(low, low + 1.45 * (high - low))
    label_axes(axes, "Weight, by score z", "alpha", "attention weight")
    axes.set_box_aspect(1)


def longer(scores: Tensor, alpha: float) -> Tensor:
    """The scores (...,m) once key 1 is alpha times as long."""
    return torch.cat([alpha * scores[..., :1], scores[..., 1:]], dim=-1)


SCALED_KEY = Claim(
    slug="scaled-key",
    kind="demonstration",
    lesson="Attention and its weights",
    statement="A key made alpha > 1 times longer gains weight if its score is above 0 and loses weight if it is below; "
    "the output moves towards its value, or away from it.",
    conditions="beta > 0. With alpha = 1 nothing changes; with alpha < 1, a shorter key, both directions are reversed.",
    misconception="The longer key's weight is divided by alpha, and the other m - 1 weights are multiplied by alpha/(m-1).",
    formula="r = e^(beta (alpha-1) z_a);  A'_a = A_a r / (1 - A_a + A_a r);  A'_i = A_i / (1 - A_a + A_a r);  "
    "dh = (A'_a - A_a) / (1 - A_a) (v_a - h)",
    run=run_scaled_key,
    figure=draw_scaled_key,
    try_next="clearhead lab scaled-key --alpha 10",
    minimum={"num_keys": 2, "alpha": 0, "beta": -10},
    maximum={"alpha": 1000, "beta": 10},
)
