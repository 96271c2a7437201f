"""The effect of changing one key: a small random perturbation, or a scaling by alpha.

A_aj is the weight of key a for query j, h_j the output for query j.
Dims: Q queries, K keys, E width.
"""

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
"""(weights of key a (Q,), eps·q (Q,), v_a (E,), outputs (Q,E), beta) -> first-order change of the outputs (Q,E)"""


def first_order(weight: Tensor, step: Tensor, v_a: Tensor, out: Tensor, beta: float) -> Tensor:
    """beta A_aj (eps·q_j) (v_a - h_j)"""
    return beta * (weight * step)[:, None] * (v_a - out)


def scaled_down(weight: Tensor, step: Tensor, v_a: Tensor, out: Tensor, beta: float) -> Tensor:
    """The misconception: the weight of the key decreases for every direction of the perturbation."""
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
    """Queries have variance 1/width and keys variance 1, so beta = 1 corresponds to the usual scale."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, width, generator=random, dtype=torch.float64) for n in (5, num_keys, num_keys))
    q /= width**0.5
    eps = torch.randn(width, generator=random, dtype=torch.float64)
    eps = step_size * eps / eps.norm()
    out, weights = attend_reference(q, k, v, beta=beta)
    plus, minus = k.clone(), k.clone()  # central difference: terms of second order cancel
    plus[0] += eps
    minus[0] -= eps
    measured = (attend_reference(q, plus, v, beta=beta)[0] - attend_reference(q, minus, v, beta=beta)[0]) / 2
    predicted = rule(weights[:, 0], q @ eps, v[0], out, beta)
    error = (measured - predicted).norm() / measured.norm()
    remainder = (beta * q @ eps).abs().max().item() ** 2 / 2  # third-order terms relative to the first order
    unchanged = int((measured.norm(dim=1) == 0).sum())
    return Result(
        (
            at_most("relative error of the first-order formula", error.item(), max(1e-5, remainder)),
            at_most("number of outputs that did not change", unchanged, 0.0),
            *check_second_order(random, q[0], k, v, beta),
        )
    )


def check_second_order(random: torch.Generator, q: Tensor, k: Tensor, v: Tensor, beta: float) -> list[Check]:
    """Perturbations of variance s²: the direction of the change, and its mean compared with the formula."""
    out, weights = attend_reference(q[None], k, v, beta=beta)
    weight = weights[0, 0]
    s = 0.05 / (beta * q.norm())  # small enough for third-order terms to be negligible
    steps = torch.randn(20_000, 1, len(q), generator=random, dtype=torch.float64)
    steps *= s * q.norm() / (steps @ q).square().mean().sqrt()  # their variance along q is exactly s²
    total, toward = torch.zeros_like(out), 0.0
    for sign in (1, -1):  # antithetic pairs: the first-order terms cancel
        perturbed = k.repeat(len(steps), 1, 1)
        perturbed[:, 0] += sign * steps[:, 0]
        queries = q.expand(len(steps), 1, -1)
        outputs = attend_reference(queries, perturbed, v.expand(len(steps), -1, -1), beta=beta)[0]
        total += outputs.mean(0) / 2
        if sign == 1:
            toward = ((outputs - out) @ (v[0] - out[0]) > 0).double().mean().item()
    scale = 0.5 * beta**2 * s**2 * q.square().sum() * weight * (v[0] - out)
    error = (total - out - scale * (1 - 2 * weight)).norm() / scale.norm()
    return [
        equals("fraction of random perturbations that move the output toward v_a", toward, 0.5, 0.03),
        at_most("error of the second-order mean relative to ½ beta² s² |q|² A_a |v_a - h|", error.item(), 0.02),
    ]


def draw_perturbed_key(
    *, seed: int = 0, width: int = 8, num_keys: int = 6, beta: float = 1.0, step_size: float = 1e-6
) -> "Figure":
    """Left: predicted and measured change of all outputs for one perturbation of key 1. Right: many perturbations."""
    if step_size == 0:
        raise ValueError("step_size must not be 0; try step_size=1e-6")
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, width, generator=random, dtype=torch.float64) for n in (5, num_keys, num_keys))
    q /= width**0.5
    steps = torch.randn(1000, width, generator=random, dtype=torch.float64)
    steps = step_size * steps / steps.norm(dim=-1, keepdim=True)
    out, weights = attend_reference(q, k, v, beta=beta)
    perturbed = k.repeat(len(steps), 1, 1)
    perturbed[:, 0] += steps
    queries, values = q.expand(len(steps), -1, -1), v.expand(len(steps), -1, -1)
    measured = (attend_reference(queries, perturbed, values, beta=beta)[0] - out) / step_size  # (steps,queries,width)
    arguments = (weights[:, 0], q @ steps[0] / step_size, v[0], out, beta)

    figure, (left, right) = subplots("AB")
    scatter_against(left, measured[0], predictions(first_order(*arguments), scaled_down(*arguments)))
    label_axes(left, "One perturbation of key 1", "predicted change / |eps|", "measured change / |eps|")
    legend_below(figure, left)
    along = measured[:, 0] @ F.normalize(v[0] - out[0], dim=0)
    right.hist(along.tolist(), bins=30, color=CORRECT)
    right.axvline(0, color=BLACK, linewidth=2)
    right.axvline(along.mean().item(), color=MISCONCEPTION, linewidth=2, linestyle="--")
    label(right, along.mean().item(), 1.0, "mean", MISCONCEPTION, xycoords=("data", "axes fraction"), offset=(6, -14))
    right.margins(y=0.15)
    label_axes(right, "1000 random perturbations", "change toward $v_1$ / |eps|", "number of perturbations")
    set_headline(figure, "Perturbing a key moves the output toward or away from its value equally often")
    return figure


def predictions(formula: Tensor, misconception: Tensor) -> dict[str, tuple[Tensor, str, str]]:
    """Both predictions, in the format of `scatter_against`."""
    return {"formula": (formula, CORRECT, "o"), "misconception": (misconception, MISCONCEPTION, "x")}


PERTURBED_KEY = Claim(
    slug="perturbed-key",
    kind="demonstration",
    lesson="Attention weights",
    statement="A small random perturbation of key a moves every output toward v_a or away from it; to first order, the "
    "mean change is zero.",
    conditions="The perturbation eps is small and has mean zero and variance s²; the relative error of the first-order "
    "formula is of the order of (beta eps·q_j)².",
    misconception="The attention weight of the perturbed key always decreases.",
    formula="dh_j = beta A_aj (eps·q_j)(v_a - h_j);  E[dh_j] = ½ beta² s² |q_j|² A_a (1 - 2 A_a)(v_a - h_j)",
    run=run_perturbed_key,
    figure=draw_perturbed_key,
    try_next="clearhead lab perturbed-key --step-size 0.1",
    minimum={"num_keys": 2, "beta": 0.01, "step_size": 1e-9},
    maximum={"width": 1024, "beta": 2, "step_size": 1},
)


Rule = Callable[[Tensor, Tensor, float, float], Tensor]
"""(weights (K,), scores (K,), beta, alpha) -> the weights after key 0 is multiplied by alpha"""


def exact(weights: Tensor, scores: Tensor, beta: float, alpha: float) -> Tensor:
    """A_0 r / (1 - A_0 + A_0 r) with r = e^(beta (alpha-1) z_0); the other weights are divided by the same sum."""
    exponent = beta * (alpha - 1) * scores[0]
    scale = torch.exp(-exponent.clamp(min=0))  # multiplies numerator and denominator, since r may overflow
    scaled = torch.cat([weights[:1] * torch.exp(exponent.clamp(max=0)), weights[1:] * scale])
    return scaled / ((1 - weights[0]) * scale + scaled[0])


def divided_by_alpha(weights: Tensor, scores: Tensor, beta: float, alpha: float) -> Tensor:
    """The misconception: the weight of key 0 is divided by alpha, the others are multiplied by alpha/(K-1)."""
    return torch.cat([weights[:1] / alpha, weights[1:] * alpha / max(1, len(weights) - 1)])


def output_change(before: Tensor, after: Tensor, values: Tensor) -> Tensor:
    """h' - h = (A'_0 - A_0) / (1 - A_0) (v_0 - h): weights before and after (...,K), values (K,E) -> (...,E)"""
    gain = (after[..., :1] - before[..., :1]) / (1 - before[..., :1])
    return gain * (values[0] - before @ values)


def run_scaled_key(
    *, seed: int = 0, width: int = 8, num_keys: int = 6, alpha: float = 3.0, beta: float = 1.0, rule: Rule = exact
) -> Result:
    """Queries have variance 1/width and keys variance 1, so beta = 1 corresponds to the usual scale."""
    random = torch.Generator().manual_seed(seed)
    query = torch.randn(width, generator=random, dtype=torch.float64) / width**0.5
    keys, values = torch.randn(2, num_keys, width, generator=random, dtype=torch.float64)
    errors, gains, output_errors = [], [], []
    for sign in (1, -1):  # a positive and a negative score of key 0
        keys[0] = keys[0] * sign * torch.sign(keys[0] @ query)
        scores = keys @ query
        scaled = torch.cat([alpha * keys[:1], keys[1:]]) @ query
        before, after = softargmax(scores, beta), softargmax(scaled, beta)
        predicted = rule(before, scores, beta, alpha)
        errors.append((predicted - after).abs().max())
        gains.append((after[0] - before[0]).item())
        change = (after - before) @ values
        output_errors.append((output_change(before, predicted, values) - change).abs().max())
    return Result(
        (
            at_most("weights: largest difference between formula and measurement", max(errors).item(), 1e-12),
            at_most("output: largest difference between formula and measurement", max(output_errors).item(), 1e-12),
            check_sign("change of A_a for z_a > 0", gains[0], alpha - 1),
            check_sign("change of A_a for z_a < 0", gains[1], 1 - alpha),
        )
    )


def check_sign(name: str, change: float, direction: float) -> Check:
    """The change must have the sign of `direction`, and be 0 if that is 0 (alpha = 1)."""
    if direction == 0:
        return equals(name, change, 0.0, 0.0)
    return above(name, change, 0.0) if direction > 0 else below(name, change, 0.0)


NUM_QUERIES = 12


def draw_scaled_key(
    *, seed: int = 0, width: int = 8, num_keys: int = 6, alpha: float = 3.0, beta: float = 1.0
) -> "Figure":
    """Key 1 is multiplied by alpha: weights and outputs of several queries, and the weight of key 1 against alpha."""
    random = torch.Generator().manual_seed(seed)
    keys = torch.randn(num_keys, width, generator=random, dtype=torch.float64)
    queries = torch.randn(NUM_QUERIES, width, generator=random, dtype=torch.float64) / width**0.5
    values = torch.randn(num_keys, width, generator=random, dtype=torch.float64)
    scores = queries @ keys.T
    before, after = softargmax(scores, beta), softargmax(scale_first(scores, alpha), beta)
    formula, misconception = (
        torch.stack([rule(a, z, beta, alpha) for a, z in zip(before, scores, strict=True)])
        for rule in (exact, divided_by_alpha)
    )
    figure, (left, middle, right) = subplots("ABC")
    scatter_against(left, after, predictions(formula, misconception), bins=3)
    label_axes(left, f"Weights, alpha = {alpha:.3g}", "predicted", "measured")
    legend_below(figure, left)
    scatter_against(
        middle,
        (after - before) @ values,
        predictions(output_change(before, formula, values), (misconception - before) @ values),
        3,
    )
    label_axes(middle, "Change of the output", "predicted", "measured")
    draw_weight_by_alpha(right, before, scores, beta, alpha)
    set_headline(figure, "Scaling up a key raises its weight if its score is positive, else lowers it")
    return figure


def draw_weight_by_alpha(axes: "Axes", before: Tensor, scores: Tensor, beta: float, alpha: float) -> None:
    """The weight of the scaled key against alpha, for a query with a positive score and one with a negative score."""
    low, high = min(1.0, max(alpha, 0.1)), max(alpha, 1.5)  # alpha < 1 is shown too
    alphas = torch.linspace(low, high, 37, dtype=torch.float64)
    key_scores = scores[:, 0]
    for text, query in (("z > 0", key_scores.argmax()), ("z < 0", before[:, 0].where(key_scores < 0, -1).argmax())):
        a, z = before[query], scores[query]
        measured = [softargmax(scale_first(z, factor), beta)[0].item() for factor in alphas.tolist()]
        misconception = [divided_by_alpha(a, z, beta, factor)[0].item() for factor in alphas.tolist()]
        style: dict[str, Any] = {"linewidth": 3, "markersize": 8, "markevery": 9}
        axes.plot(alphas, misconception, "x--", color=MISCONCEPTION, markeredgewidth=2, **style)
        axes.plot(alphas, measured, "o-", color=CORRECT, **style)
        label(axes, alphas[-1].item(), measured[-1], text, CORRECT, offset=(8, 0), va="center")
    axes.set_ylim(-0.05, 1.1)
    axes.set_xlim(low, low + 1.45 * (high - low))
    label_axes(axes, "Weight of key 1", "alpha", "attention weight")
    axes.set_box_aspect(1)


def scale_first(scores: Tensor, alpha: float) -> Tensor:
    """The scores (...,K) after the first key is multiplied by alpha."""
    return torch.cat([alpha * scores[..., :1], scores[..., 1:]], dim=-1)


SCALED_KEY = Claim(
    slug="scaled-key",
    kind="demonstration",
    lesson="Attention weights",
    statement="Multiplying a key by alpha > 1 raises its attention weight if its score is positive and lowers it if "
    "the score is negative; the output moves toward its value or away from it.",
    conditions="beta > 0. With alpha = 1 nothing changes; with alpha < 1 both directions are reversed.",
    misconception="The weight of the key is divided by alpha, and the other weights are multiplied by alpha/(m-1).",
    formula="r = e^(beta (alpha-1) z_a);  A'_a = A_a r / (1 - A_a + A_a r);  A'_i = A_i / (1 - A_a + A_a r);  "
    "dh = (A'_a - A_a) / (1 - A_a) (v_a - h)",
    run=run_scaled_key,
    figure=draw_scaled_key,
    try_next="clearhead lab scaled-key --alpha 10",
    minimum={"num_keys": 2, "alpha": 0, "beta": -10},
    maximum={"alpha": 1000, "beta": 10},
)
