"""Masks as pictures: causal, padding, window, and two of them joined; and a row that may see nothing."""

from typing import TYPE_CHECKING

import torch

from clearhead.drawing import BLACK, BLUE, GREEN, VERMILION
from clearhead.lab.figures.style import SMALL, TITLE, canvas, label, name, two_colours
from clearhead.nn import masks
from clearhead.nn.attention import attend_reference

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_masks(*, seed: int = 0, n_tokens: int = 5, low: float = -10_000.0) -> "Figure":
    """The causal mask as numbers that are added to the scores, and our masks: bool, True = may attend.

    Nothing in it is random.
    """
    figure, (numbers, *four) = canvas("ABC;ADE", widths=(2.1, 1, 1))
    causal = masks.CausalMask(n_tokens, n_tokens).dense()
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
    four[2].set_xlabel("T, blue: may attend", fontsize=SMALL)
    four[3].set_xlabel("F, grey: hidden", fontsize=SMALL)
    return figure


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
    label(all_axes[2], 0.03, 1 / n_tokens, "1/n", xycoords=("axes fraction", "data"), offset=(0, 4))
    figure.suptitle("When every key is hidden", fontsize=TITLE)
    return figure
