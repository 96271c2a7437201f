"""Softargmax and temperature: from the mean of all values (beta = 0) to a single value (beta = inf).

softargmax_beta(z)_i = e^(beta z_i) / sum_j e^(beta z_j); beta is the inverse temperature.
Dims: Q queries, K keys, E width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead.drawing import BLACK, BLUE, GRAY, GREEN, SKY, VERMILION
from clearhead.lab.claim import Claim, Result, at_least, at_most, equals
from clearhead.lab.plots import (
    CORRECT,
    MISCONCEPTION,
    SMALL_SIZE,
    TEXT_SIZE,
    heat_maps,
    label_axes,
    legend_below,
    set_headline,
    subplots,
    token_ticks,
)
from clearhead.nn.attention import attend_reference, softargmax

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rule = Callable[[Tensor, float], Tensor]
MAX_BETA = 30.0
"""the largest beta in the figure"""


def softargmin(z: Tensor, beta: float) -> Tensor:
    """The misconception: e^(-beta z)."""
    return softargmax(z, -beta)


def run_temperature(*, seed: int = 0, num_keys: int = 6, rule: Rule = softargmax) -> Result:
    z = torch.randn(num_keys, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    argmax, argmin = torch.zeros_like(z), torch.zeros_like(z)
    argmax[z.argmax()] = argmin[z.argmin()] = 1.0
    tied = torch.cat([z, z.max()[None]])

    def error(beta: float, expected: Tensor, scores: Tensor = z) -> float:
        return (rule(scores, beta) - expected).abs().max().item()

    return Result(
        (
            equals("beta = 1: sum over the keys", rule(z, 1.0).sum().item(), 1.0, 1e-12),
            at_most("beta = 0: difference from uniform weights 1/m", error(0.0, torch.full_like(z, 1 / num_keys)), 0.0),
            at_most("beta = 1: difference from softmax", error(1.0, z.softmax(0)), 1e-15),
            at_most("beta = +inf: difference from the one-hot argmax", error(math.inf, argmax), 0.0),
            at_most("beta = -inf: difference from the one-hot argmin", error(-math.inf, argmin), 0.0),
            at_most(
                "beta = +inf, two tied maxima: difference from 1/2 each",
                error(math.inf, (tied == z.max()) / 2, tied),
                0.0,
            ),
        )
    )


def draw_temperature(*, seed: int = 0, num_keys: int = 4) -> "Figure":
    """The weight of each key against beta."""
    random = torch.Generator().manual_seed(seed)
    z = torch.randn(num_keys, generator=random, dtype=torch.float64).sort(descending=True)[0]
    betas = torch.linspace(-math.asinh(MAX_BETA), math.asinh(MAX_BETA), 301, dtype=torch.float64).sinh()
    weights = torch.stack([softargmax(z, beta) for beta in betas.tolist()])
    figure, (axes,) = subplots()
    axes.set_xscale("asinh")  # logarithmic far from 0, linear through it
    middle_colors = (GREEN, SKY, BLACK)
    for key in range(num_keys):
        if key in (0, num_keys - 1):
            color, line = (VERMILION if key == 0 else BLUE), "-"
        else:
            color, line = (middle_colors[key - 1] if num_keys <= 5 else GRAY), "--"
        axes.plot(betas, weights[:, key], line, color=color, linewidth=3, label=f"{z[key]:+.2f}")
    axes.axhline(1 / num_keys, color=GRAY, linestyle=":", zorder=0)
    axes.set_xlim(-MAX_BETA, MAX_BETA)
    axes.set_ylim(0, 1.02)
    ticks = {-30: "\nargmin", -10: "", -3: "", -1: "", 0: "\nuniform", 1: "\nsoftmax", 3: "", 10: "", 30: "\nargmax"}
    axes.set_xticks(list(ticks), labels=[f"{beta}{meaning}" for beta, meaning in ticks.items()])
    axes.set_xticks([], minor=True)
    label_axes(axes, "", "beta (1 / temperature)", "attention weight of the key")
    set_headline(figure, "As beta increases, softargmax goes from argmin through uniform weights to argmax")
    if num_keys <= 10:
        legend = axes.legend(title="score", fontsize=SMALL_SIZE, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        legend.get_title().set_fontsize(SMALL_SIZE)
    return figure


TEMPERATURE = Claim(
    slug="temperature",
    kind="demonstration",
    lesson="Softargmax and temperature",
    statement="Softargmax gives uniform weights at beta = 0, the softmax at beta = 1, the one-hot argmax at "
    "beta = +inf and the one-hot argmin at beta = -inf. At beta = +inf, tied maxima have equal weights.",
    misconception="Softargmax is e^(-beta z) / sum e^(-beta z), and beta = 1 gives the argmin.",
    formula="softargmax_beta(z)_i = e^(beta z_i) / sum_j e^(beta z_j)",
    run=run_temperature,
    figure=draw_temperature,
    try_next="clearhead lab saturation",
)


def run_hard_and_soft(
    *, seed: int = 0, width: int = 8, num_queries: int = 12, num_keys: int = 6, beta: float = math.inf
) -> Result:
    """beta is that of hard attention; a finite beta approximates it, depending on the gap between the scores."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, width, generator=random, dtype=torch.float64) for n in (num_queries, num_keys, num_keys))
    tolerance = 1e-12 if math.isinf(beta) else 1e-3
    checks = []
    for kind, queries in (("self", k), ("cross", q)):  # in self-attention the keys are the queries too
        hard, weights = attend_reference(queries, k, v, beta=beta)
        soft, _ = attend_reference(queries, k, v, beta=0.0)
        one_hot, constant = hard_attention_as_linear(queries @ k.T), soft_attention_as_linear(num_keys)
        rest, bound = other_weight_and_bound(weights, queries @ k.T, beta)
        checks += [
            at_most(
                f"hard {kind}-attention: distance of outputs to nearest value",
                max_distance_to_values(hard, v),
                tolerance,
            ),
            at_most(
                f"hard {kind}-attention: difference from one-hot rows", max_difference(hard, one_hot @ v), tolerance
            ),
            at_most(f"hard {kind}-attention: total weight of the other keys", rest, bound),
            at_most(
                f"soft {kind}-attention: difference from a constant row", max_difference(soft, constant @ v), 1e-12
            ),
        ]
    repeated = attend_reference(k.roll(1, 0)[[0, *range(num_keys)]], k, v, beta=beta)[1]
    return Result(
        (
            *checks,
            at_most(
                "hard, two tied keys: difference from the mean of their values", tie_error(q[:1], k, v, beta), tolerance
            ),
            at_most("soft: difference from the mean of all values", max_difference(soft, v.mean(0)), 1e-12),
            at_most("hard: deviation of the sums over keys from 1", max_difference(weights.sum(-1), 1.0), 1e-12),
            at_least(
                "a repeated query: deviation of the sums over queries from 1",
                max_difference(repeated.sum(-2), 1.0),
                0.5,
            ),
        )
    )


def soft_attention_as_linear(num_keys: int) -> Tensor:
    """beta = 0 as a fully connected layer over the keys: one constant row 1/K. -> (1,K)"""
    return torch.full((1, num_keys), 1 / num_keys, dtype=torch.float64)


def hard_attention_as_linear(scores: Tensor) -> Tensor:
    """beta = inf as a fully connected layer over the keys: rows that are one-hot at the argmax. (Q,K) -> (Q,K)"""
    return torch.zeros_like(scores).scatter(-1, scores.argmax(-1, keepdim=True), 1.0)


def other_weight_and_bound(weights: Tensor, scores: Tensor, beta: float) -> tuple[float, float]:
    """The largest total weight, over the queries, of all keys but the best, and its bound (K-1) e^(-beta gap), where
    gap is the difference between the two largest scores. weights and scores (Q,K)"""
    num_keys = scores.shape[-1]
    if num_keys == 1:
        return 0.0, 0.0
    best = scores.topk(2, dim=-1)
    rest = weights.scatter(-1, best.indices[:, :1], 0.0).sum(-1).max().item()
    gap = (best.values[:, 0] - best.values[:, 1]).min().item()
    return rest, (num_keys - 1) * math.exp(-max(0.0, beta) * gap) + 1e-12


def tie_error(q: Tensor, k: Tensor, v: Tensor, beta: float) -> float:
    """For a query (1,E) whose best key occurs twice with different values: difference of the output from their mean."""
    q, k = (8 * q).round() / 8, (8 * k).round() / 8  # few bits, so that products are exact and scores tie exactly
    keys, values = torch.cat([k, k[(q @ k.T).argmax()][None]]), torch.cat([v, v.mean(0, keepdim=True) + 1])
    scores = (q @ keys.T)[0]
    return max_difference(attend_reference(q, keys, values, beta=beta)[0], values[scores == scores.max()].mean(0))


def max_difference(a: Tensor, b: Tensor | float) -> float:
    return (a - b).abs().max().item()


def max_distance_to_values(outputs: Tensor, values: Tensor) -> float:
    """The largest distance from an output to its nearest value."""
    return torch.cdist(outputs, values, compute_mode="donot_use_mm_for_euclid_dist").amin(1).max().item()


def draw_hard_and_soft(
    *, seed: int = 0, width: int = 8, num_queries: int = 6, num_keys: int = 6, beta: float = math.inf
) -> "Figure":
    """Top: the weights of the same queries and keys at three betas. Bottom: their sums over the queries."""
    random = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(n, width, generator=random, dtype=torch.float64) for n in (num_queries, num_keys))
    titles = {0.0: "soft: beta = 0", width**-0.5: "beta = 1/sqrt(d)", beta: f"hard: beta = {beta:g}"}
    weights = [attend_reference(q, k, k, beta=b)[1] for b in titles]
    figure, all_axes = subplots("ABC;DEF", heights=(3, 1))
    top, bottom = all_axes[:3], all_axes[3:]
    heat_maps(figure, top, weights, "attention weight")
    largest_sum = max(matrix.sum(0).max().item() for matrix in weights)
    for axes, title in zip(top, titles.values(), strict=True):
        label_axes(axes, title)
    for axes, matrix in zip(bottom, weights, strict=True):
        axes.bar(range(num_keys), matrix.sum(0).tolist(), color=BLUE)
        axes.axhline(1, color=BLACK, linestyle="--")
        token_ticks(axes, 1, num_keys)
        ticks = [0, 1, max(2, int(largest_sum))]
        axes.set_yticks(ticks, labels=[str(tick) for tick in ticks])
        axes.set_ylim(0, 1.1 * largest_sum)
        axes.set_xlim(-0.5, num_keys - 0.5)
        axes.grid(axis="x", visible=False)
        label_axes(axes, "", "key")
    top[0].set_ylabel("query", fontsize=TEXT_SIZE)
    bottom[0].set_ylabel("column sum", fontsize=SMALL_SIZE)
    set_headline(figure, "Soft attention averages, hard attention selects; only rows sum to 1")
    return figure


HARD_AND_SOFT = Claim(
    slug="hard-and-soft",
    kind="demonstration",
    lesson="Softargmax and temperature",
    statement="Hard attention (beta = inf) returns the value of the key with the largest score, or the mean over tied "
    "keys; several queries may select the same value. Soft attention (beta = 0) returns the mean of all values.",
    misconception="Hard attention preserves all values: rows and columns of the weights sum to 1.",
    formula="beta = inf: h_j = mean of the v_i with the largest q_j·k_i;  beta = 0: h_j = (1/m) sum_i v_i;  "
    "0 < beta < inf: all weights but the largest sum to at most (m-1) e^(-beta gap)",
    run=run_hard_and_soft,
    figure=draw_hard_and_soft,
    try_next="clearhead lab permutation",
)

Scale = Callable[[int], float]


def inverse_sqrt(width: int) -> float:
    return 1 / math.sqrt(width)


def unscaled(width: int) -> float:
    """The misconception: no scale."""
    return 1.0


@dataclass(frozen=True)
class SoftargmaxStatistics:
    """Statistics of softargmax, averaged over many random queries and keys."""

    logit_variance: float
    entropy: float
    """of the weights, relative to that of uniform weights"""
    gradient_norm: float
    """at the logits, for a gradient of unit variance at the weights"""
    vanished: float
    """fraction of the logits whose gradient is below 1e-6"""


def measure(
    width: int, beta: float, num_keys: int, random: torch.Generator, shift: float = 0.0
) -> SoftargmaxStatistics:
    """`shift` is added to all logits: it changes their size but not their spread."""
    num_draws = max(4, min(512, 2**24 // (width * num_keys)))  # limited by memory; larger sizes vary less
    q = torch.randn(num_draws, 1, width, generator=random, dtype=torch.float64)
    k = torch.randn(num_draws, num_keys, width, generator=random, dtype=torch.float64)
    logits = (shift + beta * (q @ k.mT)[:, 0]).requires_grad_()
    weights = softargmax(logits)
    grad_weights = torch.randn(weights.shape, generator=random, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(weights, logits, grad_weights)
    return SoftargmaxStatistics(
        logit_variance=logits.var().item(),
        entropy=entropy(weights).mean().item() / math.log(num_keys),
        gradient_norm=gradient.norm(dim=-1).mean().item(),
        vanished=(gradient.abs() < 1e-6).double().mean().item(),
    )


def entropy(weights: Tensor) -> Tensor:
    return -torch.xlogy(weights, weights).sum(-1)


def run_saturation(*, seed: int = 0, width: int = 256, num_keys: int = 16, scale: Scale = inverse_sqrt) -> Result:
    random = torch.Generator().manual_seed(seed)
    narrow, wide, plain = (
        measure(d, beta, num_keys, random) for d, beta in ((4, scale(4)), (width, scale(width)), (width, 1))
    )
    shifted = measure(width, scale(width), num_keys, random, shift=1000.0)
    return Result(
        (
            equals("scaled, d = 4: variance of the logits", narrow.logit_variance, 1.0, 0.35),
            equals(f"scaled, d = {width}: variance of the logits", wide.logit_variance, 1.0, 0.15),
            equals(f"unscaled, d = {width}: variance of the logits / d", plain.logit_variance / width, 1.0, 0.15),
            at_most(f"scaled: loss of relative entropy from d = 4 to d = {width}", narrow.entropy - wide.entropy, 0.1),
            at_least("scaled: relative entropy of the weights (uniform: 1)", wide.entropy, 0.7),
            at_most("unscaled: relative entropy of the weights", plain.entropy, 0.5),
            at_most("scaled: fraction of logits with a gradient below 1e-6", wide.vanished, 0.05),
            at_least("unscaled: fraction of logits with a gradient below 1e-6", plain.vanished, 0.15),
            at_least("scaled, 1000 added to all logits: relative entropy", shifted.entropy, 0.7),
        )
    )


def draw_saturation(*, seed: int = 0, width: int = 256, num_keys: int = 16) -> "Figure":
    """Entropy of the weights, and the fraction of logits whose gradient vanishes, against the width d."""
    widths = [4**power for power in range(1, 8) if 4**power <= width / 2] + [width]
    scales: list[tuple[str, Scale, str]] = [
        ("scaled by 1/sqrt(d)", inverse_sqrt, CORRECT),
        ("unscaled", unscaled, MISCONCEPTION),
    ]
    figure, (left, right) = subplots("AB", same_x=True)
    for name, scale, color in scales:
        random = torch.Generator().manual_seed(seed)
        statistics = [measure(d, scale(d), num_keys, random) for d in widths]
        for axes, heights in (
            (left, [s.entropy for s in statistics]),
            (right, [s.vanished for s in statistics]),
        ):
            axes.plot(widths, heights, "o-", color=color, linewidth=3, markersize=8, label=name)
            axes.set_ylim(0, 1.25 * max(axes.get_ylim()[1] / 1.25, *heights))
    left.set_xscale("log", base=2)
    left.set_xticks(widths, labels=[str(d) for d in widths])
    label_axes(left, "Entropy of the weights", "width d", "entropy (1 = uniform weights)")
    label_axes(right, "Vanished gradients", "width d", "fraction of logits with\ngradient below 1e-6")
    legend_below(figure, left)
    set_headline(figure, "Without 1/sqrt(d), softargmax saturates as d grows, and gradients vanish")
    return figure


SATURATION = Claim(
    slug="saturation",
    lesson="Softargmax and temperature",
    statement="Softargmax saturates when the spread of its logits is large, and the gradients of many logits vanish; "
    "the scale 1/sqrt(d) keeps the variance of the logits at 1.",
    conditions="The components of q and k are independent, with mean 0 and variance 1; the width d is at least 64.",
    misconception="The scale is a detail: softargmax behaves the same without it.",
    formula="Var(q·k) = d, so Var(q·k / sqrt(d)) = 1",
    run=run_saturation,
    figure=draw_saturation,
    try_next="clearhead lab saturation --width 4096",
    minimum={"width": 64, "num_keys": 2},
    maximum={"width": 4096, "num_keys": 4096},
)
