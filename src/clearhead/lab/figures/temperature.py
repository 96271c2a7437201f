"""Softargmax against beta, from the smallest score over equal weights to the largest; and why scores are scaled."""

import math
from typing import TYPE_CHECKING

import torch

from clearhead.drawing import BLACK, BLUE, GREEN, GREY, SKY, VERMILION
from clearhead.lab.figures.style import (
    MISTAKE,
    SMALL,
    TEXT,
    TRUTH,
    canvas,
    count_ticks,
    headline,
    heat_maps,
    key_below,
    name,
)
from clearhead.lab.saturation import Scale, measure, one_over_root, unscaled
from clearhead.nn.attention import attend_reference
from clearhead.nn.softargmax import softargmax

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
            colour, line = (between[key - 1] if n_keys <= 5 else GREY), "--"
        axes.plot(betas, weights[:, key], line, color=colour, linewidth=3, label=f"{z[key]:+.2f}")
    axes.axhline(1 / n_keys, color=GREY, linestyle=":", zorder=0)
    axes.set_xlim(-LARGEST, LARGEST)
    axes.set_ylim(0, 1.02)
    ticks = {-30: "\nsmallest", -10: "", -3: "", -1: "", 0: "\nequal", 1: "\nsoftmax", 3: "", 10: "", 30: "\nlargest"}
    axes.set_xticks(list(ticks), labels=[f"{beta}{meaning}" for beta, meaning in ticks.items()])
    axes.set_xticks([], minor=True)
    name(axes, "", "beta (1 / temperature)", "attention weight of the key")
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
        name(axes, title)
    for axes, matrix in zip(below, weights, strict=True):
        axes.bar(range(n_keys), matrix.sum(0).tolist(), color=BLUE)
        axes.axhline(1, color=BLACK, linestyle="--")
        count_ticks(axes, 1, n_keys)
        sums = [0, 1, max(2, int(most))]
        axes.set_yticks(sums, labels=[str(total) for total in sums])
        axes.set_ylim(0, 1.1 * most)
        axes.set_xlim(-0.5, n_keys - 0.5)
        axes.grid(axis="x", visible=False)
        name(axes, "", "key")
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
    name(left, "Entropy of the weights", "width d", "entropy (1 = equal weights)")
    name(right, "Vanished gradients", "width d", "fraction of logits with\ngradient below 1e-6")
    key_below(figure, left)
    headline(figure, "Without 1/sqrt(d), wide models get hard weights, and gradients vanish")
    return figure
