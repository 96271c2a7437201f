"""Masks as pictures: causal, padding, window, and two of them joined; and a row that may see nothing."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead.lab.figures.style import (
    BLACK,
    BLUE,
    GREEN,
    LIGHT,
    SMALL,
    TITLE,
    VERMILION,
    canvas,
    count_ticks,
    label,
    name,
)
from clearhead.nn import masks
from clearhead.nn.attention import attend_reference

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_masks(*, seed: int = 0, n_tokens: int = 5, low: float = -10_000.0) -> "Figure":
    """The causal mask as numbers that are added to the scores, and our masks: bool, True = may attend.

    Nothing in it is random.
    """
    figure, (numbers, *four) = canvas("ABC;ADE", widths=(2.1, 1, 1))
    causal = masks.causal(n_tokens).dense()  # type: ignore[attr-defined]
    padding = masks.padding([max(1, n_tokens - 2)], n_tokens)[0, 0].expand(n_tokens, n_tokens)
    additive = masks.to_additive(causal, low)
    two_colours(numbers, causal, [[f"{number:g}" for number in row] for row in additive.tolist()])
    name(numbers, "Causal mask, as added numbers", "key", "query")
    ours = {
        "causal": causal,
        "padding": padding,
        "window": masks.window(n_tokens, 1),
        "causal & padding": causal & padding,
    }
    for axes, (title, mask) in zip(four, ours.items(), strict=True):
        two_colours(axes, mask, [["T" if seen else "F" for seen in row] for row in mask.tolist()])
        axes.set_title(title, fontsize=SMALL)
    four[2].set_xlabel("T: may attend", fontsize=SMALL)
    four[3].set_xlabel("F: hidden", fontsize=SMALL)
    return figure


def two_colours(axes: "Axes", mask: Tensor, texts: list[list[str]]) -> None:
    """Blue where the mask is True; each cell with its text, if there is room for it."""
    from matplotlib.colors import ListedColormap

    axes.imshow(mask.int().numpy(), cmap=ListedColormap([LIGHT, BLUE]), vmin=0, vmax=1, interpolation="nearest")
    rows, columns = mask.shape
    count_ticks(axes, rows, columns)
    axes.grid(False)
    # white lines between the cells
    axes.set_xticks([column + 0.5 for column in range(columns - 1)], minor=True)
    axes.set_yticks([row + 0.5 for row in range(rows - 1)], minor=True)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.tick_params(which="minor", length=0)
    axes.spines[:].set_visible(False)
    if rows <= 6:
        for row, column in torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).tolist():
            colour = "white" if mask[row, column] else BLACK
            label(axes, column, row, texts[row][column], colour, ha="center", va="center", in_layout=False)


def draw_hidden_row(*, seed: int = 0, width: int = 8, n_tokens: int = 6, low: float = -1e14) -> "Figure":
    """The weights of a query that may see nothing: before, with a large negative number, with a mask."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, n_tokens, width, generator=random)
    nobody = torch.zeros(n_tokens, n_tokens, dtype=torch.bool)
    cases = {
        "nothing hidden": (attend_reference(q, k, v)[1], GREEN),
        f"{low:g} added": (attend_reference(q, k, v, logit_bias=masks.to_additive(nobody, low))[1], VERMILION),
        "our mask": (attend_reference(q, k, v, nobody)[1], BLUE),
    }
    figure, all_axes = canvas("ABC", same_y=True)
    for axes, (title, (weights, colour)) in zip(all_axes, cases.items(), strict=True):
        axes.bar(range(1, n_tokens + 1), weights[0].tolist(), color=colour)
        axes.axhline(1 / n_tokens, color=BLACK, linestyle="--")
        axes.grid(axis="x", visible=False)
        axes.set_xticks(range(1, n_tokens + 1, -(-n_tokens // 8)))
        name(axes, title, "key")
        label(axes, 0.98, 0.98, f"sum {weights[0].sum():.2g}", colour, xycoords="axes fraction", ha="right", va="top")
    top = max(float(weights[0].max()) for weights, _ in cases.values())
    all_axes[0].set_ylim(0, 1.2 * top)
    name(all_axes[0], "nothing hidden", "key", "weight of the key")
    all_axes[0].locator_params(axis="y", nbins=5)
    label(all_axes[2], 0.5, 1 / n_tokens, "1/n", offset=(0, 4))
    figure.suptitle("When every key is hidden", fontsize=TITLE)
    return figure
