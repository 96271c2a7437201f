"""Order: attention alone does not know it, and what positions change."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from clearhead.drawing import BLACK, BLUE, GREEN, VERMILION
from clearhead.lab.figures.style import SMALL, TEXT, canvas, headline, heat_maps, key_below, name, rounding_band
from clearhead.lab.places import change, model_for
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.grid import LearnedGrid
from clearhead.nn.positions import NoPositions, Positions, SinusoidalPositions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FLOOR = 1e-17


def draw_equivariance(*, seed: int = 0, width: int = 16, n_heads: int = 4, n_tokens: int = 7) -> "Figure":
    """How far the output for permuted tokens is from the permuted output, token by token."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        attention = MultiHeadAttention(width, n_heads).double()
        for parameter in attention.parameters():
            nn.init.normal_(parameter, std=width**-0.5)
        x, cycle = torch.randn(2, n_tokens, width, dtype=torch.float64), torch.randperm(n_tokens)
    order = torch.empty_like(cycle)
    order[cycle] = cycle.roll(1)
    cases: list[tuple[str, Positions, str, str]] = [
        ("with sinusoidal positions", SinusoidalPositions(), VERMILION, "o"),
        ("without positions", NoPositions(), BLUE, "s"),
    ]
    figure, (axes,) = canvas()
    for text, positions, colour, marker in cases:
        with torch.no_grad():
            difference = attention(positions(x[:, order])) - attention(positions(x))[:, order]
        heights = difference.abs().amax(dim=(0, 2)).clamp_min(FLOOR)
        axes.plot(range(1, n_tokens + 1), heights, marker, color=colour, markersize=14, label=text)
    from_rounding(axes)
    rounding_band(axes, FLOOR, x=0.3, above=True)
    axes.set_xlim(0.3, n_tokens + 0.7)
    axes.set_xticks(range(1, n_tokens + 1, -(-n_tokens // 10)))
    key_below(figure, axes)
    name(axes, "", "output token", "largest difference\n$|f(P\\,x) - P\\,f(x)|$")
    headline(figure, "Without positions, permuting the tokens only permutes the outputs")
    return figure


def from_rounding(axes: "Axes") -> None:
    """A logarithmic axis from rounding errors to differences that everybody sees."""
    axes.set_yscale("log")
    axes.set_ylim(FLOOR, 1e3)
    axes.set_yticks([1e0, 1e-4, 1e-8, 1e-12, 1e-16])


@torch.no_grad()
def draw_learned_positions(*, seed: int = 0, width: int = 16, side: int = 4) -> "Figure":
    """Left: patches + table = what the encoder gets. Right: how far the logits move when the patches are permuted."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_for(width, "mean", side)
        images = torch.randn(1, 3, 4 * side, 4 * side, dtype=torch.float64)
        waves = model_for(width, "mean", side, "sinusoidal")
    table = model.positions
    assert isinstance(table, LearnedGrid)
    tokens, order = model.tokenize(images), torch.arange(side * side).roll(1)
    table.table.mul_(50)
    maps = [tokens[0], table.table.clone(), table(tokens, (side, side))[0]]
    moved = {"learned": change(model, tokens, order), "sinusoidal": change(waves, tokens, order)}
    table.table.zero_()
    moved["none"] = change(model, tokens, order)

    figure, (*all_maps, right) = canvas("ABCD", widths=(1, 1, 1, 2.2))
    heat_maps(figure, all_maps, maps, "value")
    for axes, title in zip(all_maps, ("patches", "+ table E", "= input"), strict=True):
        axes.set_aspect("auto")
        axes.set_xticks([0, width - 1], labels=["1", str(width)])
        axes.set_yticks([])
        name(axes, title, "feature")
    all_maps[0].set_yticks([0, side * side - 1], labels=["1", str(side * side)])
    all_maps[0].set_ylabel("patch", fontsize=TEXT)
    colours = (BLUE, GREEN, BLACK)
    drawn = right.bar(list(moved), [max(value, 2 * FLOOR) for value in moved.values()], color=colours, width=0.6)
    texts = [f"{value:.2g}" if value > 1e-12 else "rounding\nerror" for value in moved.values()]
    right.bar_label(drawn, labels=texts, fontsize=SMALL, padding=3)
    from_rounding(right)
    right.grid(axis="x", visible=False)
    name(right, "Patches permuted", "positions", "largest change of the logits")
    headline(figure, "A learned position is a vector as wide as a patch embedding, added to it")
    return figure
