"""Attention as pictures: plain arrays in, figures out.

Dims: H heads, Q queries, K keys, C channels. Arrays may be tensors or numpy's.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.drawing import COLOURS, GREY
from clearhead.insight.style import (
    SMALL,
    TEXT,
    TITLE,
    bar,
    blank,
    check_names,
    heat,
    limits,
    numbers,
    plain,
    tick_names,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

MOST_LINES = 400
"""the strongest weights that token-to-token draws"""


def draw_head(
    weights: Any, *, queries: Sequence[str] | None = None, keys: Sequence[str] | None = None, title: str = "one head"
) -> "Figure":
    """One head's weights (Q,K) as a matrix: a row is what one query looks at."""
    matrix = two_dimensional(weights)
    figure = blank(8.0, 6.6)
    axes = figure.subplots()
    image = heat(axes, matrix, 0, limits([matrix])[1], aspect="auto" if is_long(matrix.shape) else "equal")
    tick_names(axes, queries, keys, matrix.shape)
    axes.set_title(title, fontsize=TITLE, pad=10)
    axes.set_xlabel("key", fontsize=TEXT)
    axes.set_ylabel("query", fontsize=TEXT)
    bar(figure, image, axes, "weight", shrink=0.85)
    return figure


def draw_alignment(
    weights: Any,
    source: Sequence[str],
    target: Sequence[str],
    *,
    names: tuple[str, str] = ("source", "target"),
    title: str = "which source token each target looks at",
) -> "Figure":
    """Cross-attention (Q,K) with the tokens of both sides, and `names` for what they are; a ring marks the largest
    weight of each row."""
    matrix = two_dimensional(weights)
    rows, columns = matrix.shape
    figure = blank(min(14.0, max(7.2, 2.5 + 0.5 * columns)), min(14.0, max(4.0, 2.4 + 0.5 * rows)))
    axes = figure.subplots()
    image = heat(axes, matrix, 0, limits([matrix])[1])
    tick_names(axes, target, source, matrix.shape)
    axes.scatter(
        matrix.argmax(1), range(len(matrix)), s=90, facecolors="none", edgecolors=COLOURS[1], linewidths=2, zorder=3
    )
    figure.suptitle(title, fontsize=TITLE)
    axes.set_xlabel(names[0], fontsize=TEXT)
    axes.set_ylabel(names[1], fontsize=TEXT)
    figure.supxlabel("a ring marks the largest weight of its row", fontsize=SMALL, color=GREY)
    bar(figure, image, axes, "weight", shrink=0.85)
    return figure


def draw_wall(layers: Sequence[Any], names: Sequence[str], *, title: str = "every layer and head") -> "Figure":
    """Every head of every layer, (H,Q,K) each: a row for each layer, with a scale of its own."""
    stacks = [numbers(layer) for layer in layers]
    check_names(names, len(stacks))
    columns = max(len(stack) for stack in stacks)
    figure = blank(max(8.0, 1.9 * columns + 2.6), max(3.6, 1.9 * len(stacks) + 1.2))
    figure.set_layout_engine("constrained", rect=(0.02, 0, 0.98, 1))  # room for names of two lines
    panels = figure.subplots(len(stacks), columns, squeeze=False)
    for row, (stack, name) in enumerate(zip(stacks, names, strict=True)):
        high = limits([stack])[1]
        for column, axes in enumerate(panels[row]):
            plain(axes)
            if column < len(stack):
                image = heat(axes, stack[column], 0, high, aspect="auto" if is_long(stack.shape[1:]) else "equal")
            if row == 0:
                axes.set_title(f"head {column}", fontsize=TEXT)
        panels[row][0].set_ylabel(broken(name), fontsize=SMALL)
        bar(figure, image, list(panels[row]), "weight", shrink=0.9, aspect=12)
    figure.suptitle(title, fontsize=TITLE)
    figure.supxlabel("a row is what one query looks at, a column is a key", fontsize=SMALL, color=GREY)
    return figure


def draw_over_image(image: Any, maps: Mapping[str, Any], *, title: str = "where the answer looks") -> "Figure":
    """The image (C,height,width), numbers from 0 to 255, and over it each map (rows,columns) of its patches.

    All maps are on one scale, from 0 to the largest number, which the colour bar names.
    """
    cells = {name: two_dimensional(cells) for name, cells in maps.items()}
    low, high = limits(list(cells.values()))
    columns = min(5, len(cells) + 1)
    rows = -(-(len(cells) + 1) // columns)
    figure = blank(2.5 * columns + 1.2, 2.8 * rows + 0.7)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        plain(axes)
    show_picture(panels[0], image)
    panels[0].set_title("image", fontsize=TEXT)
    for axes, (name, matrix) in zip(panels[1:], cells.items(), strict=False):
        drawn = lay_over(axes, image, matrix, min(0.0, low), high)
        axes.set_title(name, fontsize=TEXT)
    figure.suptitle(title, fontsize=TITLE)
    bar(figure, drawn, panels, "weight", shrink=0.85)
    return figure


def draw_tokens(
    weights: Any,
    queries: Sequence[str],
    keys: Sequence[str] | None = None,
    *,
    title: str = "who looks at whom",
) -> "Figure":
    """One head's weights (Q,K) as lines from each query, on the left, to its keys, on the right: the wider the more."""
    matrix = two_dimensional(weights)
    keys = queries if keys is None else keys
    check_names(queries, matrix.shape[0])
    check_names(keys, matrix.shape[1])
    figure = blank(8.0, max(4.5, 0.42 * max(matrix.shape) + 1.5))
    axes = figure.subplots()
    places = [np.linspace(0, 1, n) if n > 1 else np.array([0.5]) for n in matrix.shape]
    strongest = np.argsort(-matrix, axis=None, kind="stable")[:MOST_LINES]
    high = matrix.max() or 1.0
    for query, key in zip(*np.unravel_index(strongest, matrix.shape), strict=True):
        share = matrix[query, key] / high
        ends = [places[0][query], places[1][key]]
        axes.plot([0, 1], ends, color=COLOURS[query % 6], linewidth=5 * share, alpha=min(1, 0.1 + 0.9 * share))
    for x, side, names, spots in ((-0.03, "right", queries, places[0]), (1.03, "left", keys, places[1])):
        for spot, name in zip(spots, names, strict=True):
            axes.text(x, spot, name, ha=side, va="center", fontsize=TEXT)
    axes.set(xlim=(-0.25, 1.25), ylim=(1.06, -0.06))
    plain(axes)
    axes.set_title(title, fontsize=TITLE, pad=12)
    axes.set_xlabel(f"from queries (left) to keys (right); the widest line is {high:.2f}", fontsize=SMALL, color=GREY)
    return figure


def show_picture(axes: "Axes", image: Any) -> None:
    pixels = numbers(image).transpose(1, 2, 0) / 255
    shown = pixels.repeat(3, axis=2) if pixels.shape[2] == 1 else pixels
    axes.imshow(shown.clip(0, 1), interpolation="nearest")


def lay_over(axes: "Axes", image: Any, cells: "NDArray[np.float64]", low: float, high: float, colours: str = "") -> Any:
    """A map in its true colours, and the picture as a veil: white where it is lighter than most, black where darker.

    Colours that are white in their middle get the negative, which shows on them.
    """
    grey = numbers(image).mean(0) / 255
    height, width = grey.shape
    drawn = heat(
        axes, cells, low, high, *([colours] if colours else []), extent=(-0.5, width - 0.5, height - 0.5, -0.5)
    )
    lighter = (grey - np.median(grey)) * (-0.6 if colours else 1)
    veil = np.stack([(lighter > 0).astype(float)] * 3 + [0.6 * np.abs(lighter)], axis=-1)
    axes.imshow(veil, interpolation="nearest")
    return drawn


def two_dimensional(values: Any) -> "NDArray[np.float64]":
    matrix = numbers(values)
    if matrix.ndim != 2 or not matrix.size:
        raise ValueError(
            f"this draws one matrix, got an array of shape {matrix.shape}; choose an example, a layer and a head"
        )
    return matrix


def is_long(shape: Sequence[int]) -> bool:
    """So unlike a square that equal cells would be a thin line."""
    return max(shape) > 4 * min(shape)


def broken(name: str) -> str:
    """An address on two lines, so that it fits beside its row."""
    return ".\n".join(name.rsplit(".", 1))
