"""What beta does: from the mean of the values to the choice of one."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead.drawing import BLACK, BLUE, GRAY, GREEN, SKY, VERMILION
from clearhead.lab.claim import Claim, Result, at_least, at_most, equals
from clearhead.lab.constructions import SHARP, hard_attention_as_linear, identity, permutation, soft_attention_as_linear
from clearhead.lab.plots import (
    MISTAKE,
    SMALL,
    TEXT,
    TRUTH,
    canvas,
    count_ticks,
    headline,
    heat_maps,
    key_below,
    name_axis,
)
from clearhead.nn.attention import attend_reference, softargmax

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rule = Callable[[Tensor, float], Tensor]


def softargmin(z: Tensor, beta: float) -> Tensor:
    """The mistake: e^(-beta z)."""
    return softargmax(z, -beta)


def run_temperature(*, seed: int = 0, n_keys: int = 6, rule: Rule = softargmax) -> Result:
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


TEMPERATURE = Claim(
    slug="temperature",
    kind="demonstration",
    rows=("R4.1",),
    lesson="Softargmax and its temperature",
    statement="beta = 0 shares equally, 1 is softmax, +inf chooses the largest and -inf the smallest; ties share.",
    mistake="softargmax is e^(-beta z) / sum, and beta = 1 gives the argmin.",
    formula="softargmax_beta(z)_i = e^(beta z_i) / sum_j e^(beta z_j)",
    run=run_temperature,
    try_next="clearhead lab saturation",
)


# Hard and soft attention: one value, or the mean of all; and when that is the identity.


def run_hard_and_soft(
    *, seed: int = 0, width: int = 8, n_queries: int = 12, n_keys: int = 6, beta: float = math.inf
) -> Result:
    """beta is that of hard attention. A finite one comes as close to a choice as the gap between scores allows."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, width, generator=random, dtype=torch.float64) for n in (n_queries, n_keys, n_keys))
    exact = 1e-12 if math.isinf(beta) else 1e-3
    checks = []
    for kind, queries in (("self", k), ("cross", q)):  # of self-attention, the keys ask as well
        hard, weights = attend_reference(queries, k, v, beta=beta)
        soft, _ = attend_reference(queries, k, v, beta=0.0)
        one_hot, constant = hard_attention_as_linear(queries @ k.T), soft_attention_as_linear(n_keys)
        checks += [
            at_most(f"hard, {kind}: distance of an output from the nearest value", furthest(hard, v), exact),
            at_most(f"hard, {kind}: distance from one-hot rows", distance(hard, one_hot @ v), exact),
            at_most(f"hard, {kind}: weight of all keys but the best", *rest_and_bound(weights, queries @ k.T, beta)),
            at_most(f"soft, {kind}: distance from a constant row", distance(soft, constant @ v), 1e-12),
        ]
    twice = attend_reference(k.roll(1, 0)[[0, *range(n_keys)]], k, v, beta=beta)[1]  # one query asks twice
    return Result(
        (
            *checks,
            at_most("hard, two best keys tie: distance from the mean of their values", tied(q[:1], k, v, beta), exact),
            at_most("soft: distance from the mean of the values", distance(soft, v.mean(0)), 1e-12),
            at_most("hard: distance of the weights' sums over keys from 1", distance(weights.sum(-1), 1.0), 1e-12),
            at_least("one query twice: distance of the sums over queries from 1", distance(twice.sum(-2), 1.0), 0.5),
        )
    )


def rest_and_bound(weights: Tensor, scores: Tensor, beta: float) -> tuple[float, float]:
    """The largest weight (of all queries) that is not the best key's; at most (m-1) e^(-beta gap), the gap being that
    between the two best scores. weights and scores (Q,K)"""
    n_keys = scores.shape[-1]
    if n_keys == 1:
        return 0.0, 0.0
    best = scores.topk(2, dim=-1)
    rest = weights.scatter(-1, best.indices[:, :1], 0.0).sum(-1).max().item()
    gap = (best.values[:, 0] - best.values[:, 1]).min().item()
    return rest, (n_keys - 1) * math.exp(-max(0.0, beta) * gap) + 1e-12


def tied(q: Tensor, k: Tensor, v: Tensor, beta: float) -> float:
    """One query (1,d) whose best key is there twice, with two values: the distance of its output from their mean."""
    q, k = (8 * q).round() / 8, (8 * k).round() / 8  # short enough for exact products: rounding would break the tie
    keys, values = torch.cat([k, k[(q @ k.T).argmax()][None]]), torch.cat([v, v.mean(0, keepdim=True) + 1])
    scores = (q @ keys.T)[0]
    return distance(attend_reference(q, keys, values, beta=beta)[0], values[scores == scores.max()].mean(0))


def distance(a: Tensor, b: Tensor | float) -> float:
    return (a - b).abs().max().item()


def furthest(outputs: Tensor, values: Tensor) -> float:
    """The largest distance of an output from the value that is nearest to it."""
    return torch.cdist(outputs, values, compute_mode="donot_use_mm_for_euclid_dist").amin(1).max().item()


def run_permutation(
    *, seed: int = 0, width: int = 8, n_tokens: int = 6, beta: float = SHARP, by_place: bool = True
) -> Result:
    """by_place=False lets the tokens themselves ask and be asked, and trusts in beta: the mistake."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(1, n_tokens, width, generator=random, dtype=torch.float64)
    order = torch.randperm(n_tokens, generator=random)
    both = torch.tensor([[1.0, 0.0], [3.0, 0.0]], dtype=torch.float64)
    with torch.no_grad():
        same = attend_reference(both, both, both, beta=math.inf)[0]
        kept = identity(width, n_tokens, beta)(x) if by_place else attend_reference(x, x, x, beta=beta)[0]
        moved = permutation(x, order, beta) if by_place else attend_reference(x[:, order], x, x, beta=beta)[0]
    return Result(
        (
            at_most("distance from the permuted tokens", distance(moved, x[:, order]), 1e-9),
            at_most("distance from the tokens themselves", distance(kept, x), 1e-9),
            at_most("x1=[1,0], x2=[3,0] at beta inf: distance of both outputs from x2", distance(same, both[1]), 0.0),
        )
    )


HARD_AND_SOFT = Claim(
    slug="hard-and-soft",
    kind="demonstration",
    rows=("R4.2", "R4.3"),
    lesson="Softargmax and its temperature",
    statement="At beta = inf each output is one of the values, repeats allowed, or the mean of several whose keys tie; "
    "at beta = 0 it is the mean of all.",
    mistake="Hard attention preserves all values: rows and columns of the weights sum to 1.",
    formula="beta = inf: h_j = mean of v_i over all i of the largest q_j·k_i;  beta = 0: h_j = (1/m) sum_i v_i;  "
    "0 < beta: all weights but the largest sum to at most (m-1) e^(-beta gap)",
    run=run_hard_and_soft,
    try_next="clearhead lab permutation",
)

PERMUTATION = Claim(
    slug="permutation",
    kind="demonstration",
    rows=("R4.9",),
    lesson="What attention can compute",
    statement="Attention is the identity or a permutation if the best keys form one; a large beta alone is not enough.",
    mistake="A large beta makes self-attention the identity.",
    formula="argmax_j q_i·k_j = order(i), W_V = W_O = I, beta large",
    run=run_permutation,
    try_next="clearhead lab permutation --beta 2",
)


# Why scores are divided by sqrt(d): the spread of q·k grows with d, and softargmax saturates with the spread.


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


def run_saturation(*, seed: int = 0, width: int = 256, n_keys: int = 16, scale: Scale = one_over_root) -> Result:
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


SATURATION = Claim(
    slug="saturation",
    rows=("R4.17", "R4.1"),
    lesson="Softargmax and its temperature",
    statement="Softargmax saturates with the spread of its logits, and many of their gradients vanish; 1/sqrt(d) keeps "
    "their variance at 1 for unit-variance q and k.",
    conditions="The components of q and k are independent, with mean 0 and variance 1; the width is at least 64.",
    mistake="The scale is a detail: softargmax gives the same without it.",
    formula="Var(q·k) = d, so Var(q·k / sqrt(d)) = 1",
    run=run_saturation,
    try_next="clearhead lab saturation --width 4096",
    least={"width": 64, "n_keys": 2},
    most={"width": 4096, "n_keys": 4096},
)


# Softargmax against beta, from the smallest score over equal weights to the largest; and why scores are scaled.


LARGEST = 30.0


def draw_temperature(*, seed: int = 0, n_keys: int = 4) -> "Figure":
    """The weight of each key while beta goes from far below 0 to far above."""
    z = torch.randn(n_keys, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).sort(descending=True)[0]
    betas = torch.linspace(-math.asinh(LARGEST), math.asinh(LARGEST), 301, dtype=torch.float64).sinh()
    weights = torch.stack([softargmax(z, beta) for beta in betas.tolist()])
    figure, (axes,) = canvas()
    axes.set_xscale("asinh")  # as a logarithm far from 0, and straight through it
    between = (GREEN, SKY, BLACK)
    for key in range(n_keys):
        if key in (0, n_keys - 1):
            colour, line = (VERMILION if key == 0 else BLUE), "-"
        else:
            colour, line = (between[key - 1] if n_keys <= 5 else GRAY), "--"
        axes.plot(betas, weights[:, key], line, color=colour, linewidth=3, label=f"{z[key]:+.2f}")
    axes.axhline(1 / n_keys, color=GRAY, linestyle=":", zorder=0)
    axes.set_xlim(-LARGEST, LARGEST)
    axes.set_ylim(0, 1.02)
    ticks = {-30: "\nsmallest", -10: "", -3: "", -1: "", 0: "\nequal", 1: "\nsoftmax", 3: "", 10: "", 30: "\nlargest"}
    axes.set_xticks(list(ticks), labels=[f"{beta}{meaning}" for beta, meaning in ticks.items()])
    axes.set_xticks([], minor=True)
    name_axis(axes, "", "beta (1 / temperature)", "attention weight of the key")
    headline(figure, "Beta decides how sharply softargmax chooses one key")
    if n_keys <= 10:
        keys = axes.legend(title="score", fontsize=SMALL, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        keys.get_title().set_fontsize(SMALL)
    return figure


def draw_hard_and_soft(
    *, seed: int = 0, width: int = 8, n_queries: int = 6, n_keys: int = 6, beta: float = math.inf
) -> "Figure":
    """The weights of the same queries and keys at three betas; below, their sums over the queries."""
    random = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(n, width, generator=random, dtype=torch.float64) for n in (n_queries, n_keys))
    titles = {0.0: "soft: beta = 0", width**-0.5: "beta = 1/sqrt(d)", beta: f"hard: beta = {beta:g}"}
    weights = [attend_reference(q, k, k, beta=one)[1] for one in titles]
    figure, all_axes = canvas("ABC;DEF", heights=(3, 1))
    above, below = all_axes[:3], all_axes[3:]
    heat_maps(figure, above, weights, "attention weight")
    most = max(matrix.sum(0).max().item() for matrix in weights)
    for axes, title in zip(above, titles.values(), strict=True):
        name_axis(axes, title)
    for axes, matrix in zip(below, weights, strict=True):
        axes.bar(range(n_keys), matrix.sum(0).tolist(), color=BLUE)
        axes.axhline(1, color=BLACK, linestyle="--")
        count_ticks(axes, 1, n_keys)
        sums = [0, 1, max(2, int(most))]
        axes.set_yticks(sums, labels=[str(total) for total in sums])
        axes.set_ylim(0, 1.1 * most)
        axes.set_xlim(-0.5, n_keys - 0.5)
        axes.grid(axis="x", visible=False)
        name_axis(axes, "", "key")
    above[0].set_ylabel("query", fontsize=TEXT)
    below[0].set_ylabel("column sum", fontsize=SMALL)
    headline(figure, "Soft attention averages, hard attention selects; rows sum to 1")
    return figure


def draw_saturation(*, seed: int = 0, width: int = 256, n_keys: int = 16) -> "Figure":
    """Entropy of the weights, and the fraction of logits whose gradient vanishes, against the width d."""
    widths = [4**power for power in range(1, 8) if 4**power <= width / 2] + [width]
    scales: list[tuple[str, Scale, str]] = [
        ("with 1/sqrt(d)", one_over_root, TRUTH),
        ("without", unscaled, MISTAKE),
    ]
    figure, (left, right) = canvas("AB", same_x=True)
    for text, scale, colour in scales:
        random = torch.Generator().manual_seed(seed)
        found = [measure(d, scale(d), n_keys, random) for d in widths]
        for axes, heights in ((left, [soft.entropy for soft in found]), (right, [soft.vanished for soft in found])):
            axes.plot(widths, heights, "o-", color=colour, linewidth=3, markersize=8, label=text)
            axes.set_ylim(0, 1.25 * max(axes.get_ylim()[1] / 1.25, *heights))
    left.set_xscale("log", base=2)
    left.set_xticks(widths, labels=[str(d) for d in widths])
    name_axis(left, "Entropy of the weights", "width d", "entropy (1 = equal weights)")
    name_axis(right, "Vanished gradients", "width d", "fraction of logits with\ngradient below 1e-6")
    key_below(figure, left)
    headline(figure, "Without 1/sqrt(d), wide models get hard weights, and gradients vanish")
    return figure
