"""Figures of matrices with their numbers: an attention mask, and the five steps of self-attention."""

import math
from typing import TYPE_CHECKING

from torch import Tensor

from clearhead.drawing import BLACK, BLUE, LIGHT, VERMILION, blank
from clearhead.models.mask_view import MaskView

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_NUMBERED = 16
"""rows or columns beyond which cells are too small for numbers"""
MOST_PANELS = 12


def draw_mask(view: MaskView) -> "Figure":
    """A panel for each sequence: blue cells may be attended to, grey ones are hidden. Rows that see nothing are
    framed."""
    from matplotlib.patches import Patch

    grids = list(view.grids())
    shown = grids[:MOST_PANELS]
    n_columns = min(len(shown), 4)
    n_rows = math.ceil(len(shown) / n_columns)
    n_queries, n_keys = view.mask.shape[-2:]
    is_numbered = max(n_queries, n_keys) <= MOST_NUMBERED
    cell = 0.32 + 0.08 * len(view.cell(False)) if is_numbered else 5.0 / max(n_queries, n_keys)  # inches
    wide, tall = cell * n_keys + 0.6, cell * n_queries + (0.6 if shown[0][0] == "" else 0.9)
    figure = blank(max(6.0, n_columns * wide), n_rows * tall + 0.8)
    panels = figure.subplots(n_rows, n_columns, squeeze=False)
    for axes, (label, mask) in zip(panels.flat, shown, strict=False):
        draw_grid(axes, view, label, mask, is_numbered)
    for axes in panels.flat[len(shown) :]:
        axes.set_visible(False)
    form = "" if view.low is None else " in additive form"
    size = f"{view.title}{form}, {view.size}"
    more = f" (the first {MOST_PANELS} of {len(grids)})" if len(grids) > MOST_PANELS else ""
    figure.suptitle(size + more, fontsize=14)
    meaning = [Patch(color=BLUE, label=f"{view.cell(True)}: may attend")]
    meaning.append(Patch(color=LIGHT, label=f"{sign(view.cell(False))}: hidden"))
    if view.empty_queries():
        meaning.append(Patch(facecolor="none", edgecolor=VERMILION, label="may attend to nothing"))
    figure.legend(handles=meaning, loc="outside lower center", ncols=3, fontsize=11, frameon=False)
    return figure


def draw_grid(axes: "Axes", view: MaskView, label: str, mask: Tensor, is_numbered: bool) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Rectangle

    n_queries, n_keys = mask.shape
    axes.imshow(mask.int().numpy(), cmap=ListedColormap([LIGHT, BLUE]), vmin=0, vmax=1, interpolation="nearest")
    axes.set_title(label, fontsize=12)
    axes.set_xlabel("key", fontsize=12)
    axes.set_ylabel("query", fontsize=12)
    ticks(axes, n_keys, n_queries, view.first_query)
    if is_numbered:
        for row, values in enumerate(mask.tolist()):
            for column, seen in enumerate(values):
                text = sign(view.cell(seen))
                axes.text(column, row, text, ha="center", va="center", fontsize=12, color="white" if seen else BLACK)
    for row in (~mask.any(-1)).nonzero().flatten().tolist():
        frame = Rectangle(
            (-0.5, row - 0.5), n_keys, 1, fill=False, edgecolor=VERMILION, linewidth=2, zorder=3, clip_on=False
        )
        axes.add_patch(frame)


def ticks(axes: "Axes", n_keys: int, n_queries: int, first_query: int) -> None:
    """White lines between cells, and a number for each token, or for some where there are many."""
    for set_ticks, count, first in ((axes.set_xticks, n_keys, 1), (axes.set_yticks, n_queries, first_query)):
        places = range(0, count, 1 if count <= MOST_NUMBERED else math.ceil(count / 8))
        set_ticks(list(places), labels=[str(place + first) for place in places])
        if count <= 64:
            set_ticks([place + 0.5 for place in range(count - 1)], minor=True)
    axes.grid(which="minor", color="white", linewidth=min(2.0, 16 / max(n_keys, n_queries)))
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)


def sign(text: str) -> str:
    """With the minus and infinity signs of typography."""
    return text.replace("-inf", "−∞").replace("-", "−")
