"""Figures of attention weights: one head, a grid of all heads, alignments, maps over images, lines between tokens.

Functions take tensors or arrays and return matplotlib figures that are legible when projected and use a palette for
color-blind readers. Colors and saving are defined in drawing.py.
Dims: H heads, Q queries, K keys, C channels.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from clearhead import drawing
from clearhead.drawing import COLORMAP, COLORS, GRAY, format_number, wrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage
    from numpy.typing import NDArray

TITLE, TEXT, SMALL = 18, 15, 12
"""font sizes in points"""
POSITIVE, NEGATIVE = "#E0007A", "#00A878"
"""magenta and green: rare in photographs, and of different lightness"""
OPACITY = 0.7
"""opacity of the largest weight over an image, so that the image remains recognizable"""
DPI = 120
MAX_HORIZONTAL = 3
"""the longest column label, in characters, that is not rotated"""
MAX_LINES = 400
"""the largest number of lines between tokens; smaller weights are not drawn"""
TINT_NOTE = (
    "The tint starts at the mean weight and is strongest at the largest, or at twice the mean if that is larger. "
    "Patches in the upper half of the scale are outlined. A map without visible tint is nearly uniform."
)


def draw_head(
    weights: Any,
    *,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    title: str = "Attention weights of one head",
) -> "Figure":
    """The weights (Q,K) of one head as a matrix, with one row per query."""
    matrix = to_matrix(weights)
    figure = new_figure(8.0, 6.6)
    axes = figure.subplots()
    image = draw_heatmap(
        axes, matrix, 0, value_range([matrix])[1], aspect="auto" if is_elongated(matrix.shape) else "equal"
    )
    label_tokens(axes, queries, keys, matrix.shape)
    add_title(figure, title)
    axes.set_xlabel("key", fontsize=TEXT)
    axes.set_ylabel("query", fontsize=TEXT)
    add_colorbar(figure, image, axes, "weight", shrink=0.85)
    return figure


def draw_head_grid(
    layers: Sequence[Any], names: Sequence[str], *, title: str = "Attention weights of all layers and heads"
) -> "Figure":
    """All heads of all layers, (H,Q,K) each, with one row and one color scale per layer.

    Layers with a single head are arranged in a grid.
    """
    stacks = [to_numpy(layer) for layer in layers]
    check_labels(names, len(stacks))
    num_heads = max(len(stack) for stack in stacks)
    figure = layers_in_grid(stacks, names) if num_heads == 1 else heads_in_rows(stacks, names, num_heads)
    add_title(figure, title)
    add_caption(figure, "Rows are queries, columns are keys; each layer has its own color scale.")
    return figure


def heads_in_rows(stacks: "Sequence[NDArray[np.float64]]", names: Sequence[str], num_heads: int) -> "Figure":
    side = max(1.9, 5.4 / num_heads)
    figure = new_figure(side * num_heads + 2.6, max(3.6, side * len(stacks) + 1.2))
    figure.set_layout_engine("constrained", rect=(0.02, 0, 0.98, 1))  # room for names of two lines
    panels = figure.subplots(len(stacks), num_heads, squeeze=False)
    for row, (stack, name) in enumerate(zip(stacks, names, strict=True)):
        high = value_range([stack])[1]
        for column, axes in enumerate(panels[row]):
            hide_axes(axes)
            if column < len(stack):
                image = draw_matrix(axes, stack[column], high)
            if row == 0:
                axes.set_title(f"head {column}", fontsize=TEXT)
        panels[row][0].set_ylabel(wrap(on_two_lines(name), 1.3 * side, SMALL), fontsize=SMALL)
        add_colorbar(figure, image, list(panels[row]), "weight", shrink=0.9, aspect=12)
    return figure


def layers_in_grid(stacks: "Sequence[NDArray[np.float64]]", names: Sequence[str]) -> "Figure":
    """Layers with one head each, row by row in order of execution."""
    columns = min(4, math.ceil(math.sqrt(len(stacks))))
    rows, side = math.ceil(len(stacks) / columns), max(3.2, 6.0 / columns)
    figure = new_figure((side + 0.9) * columns, (side + 0.4) * rows + 0.8)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        hide_axes(axes)
    for axes, stack, name in zip(panels, stacks, names, strict=False):
        image = draw_matrix(axes, stack[0], value_range([stack])[1])
        panel_title(axes, name, side)
        add_colorbar(figure, image, axes, "weight", shrink=0.85, aspect=16)
    return figure


def draw_matrix(axes: "Axes", matrix: "NDArray[np.float64]", high: float) -> Any:
    if is_elongated(matrix.shape):
        axes.set_box_aspect(1)  # the same panel size as for square matrices
    return draw_heatmap(axes, matrix, 0, high, aspect="auto" if is_elongated(matrix.shape) else "equal")


def draw_alignment(
    weights: Any,
    source: Sequence[str],
    target: Sequence[str],
    *,
    names: tuple[str, str] = ("source", "target"),
    title: str = "Attention from target to source tokens",
) -> "Figure":
    """Cross-attention (Q,K) with the tokens of both sequences; `names` are the labels of the axes.

    A ring marks the largest weight of each row.
    """
    matrix = to_matrix(weights)
    rows, columns = matrix.shape
    figure = new_figure(min(14.0, max(7.2, 2.5 + 0.5 * columns)), min(14.0, max(4.0, 2.4 + 0.5 * rows)))
    axes = figure.subplots()
    image = draw_heatmap(axes, matrix, 0, value_range([matrix])[1])
    label_tokens(axes, target, source, matrix.shape)
    axes.scatter(
        matrix.argmax(1), range(len(matrix)), s=90, facecolors="none", edgecolors=COLORS[1], linewidths=2, zorder=3
    )
    add_title(figure, title)
    axes.set_xlabel(names[0], fontsize=TEXT)
    axes.set_ylabel(names[1], fontsize=TEXT)
    add_caption(figure, "A ring marks the largest weight of each row.")
    add_colorbar(figure, image, axes, "weight", shrink=0.85)
    return figure


def draw_over_image(
    image: Any,
    maps: Mapping[str, Any],
    *,
    title: str = "Attention from the output to each patch",
) -> "Figure":
    """An image (C,height,width) with values from 0 to 255, and each map (rows,columns) of its patches on top of it.

    All maps share one color scale, which starts at the mean weight.
    """
    cells = {name: to_matrix(cells) for name, cells in maps.items()}
    low, high = tint_limits(list(cells.values()))
    columns = min(5, len(cells) + 1)
    rows, side = math.ceil((len(cells) + 1) / columns), max(2.5, 7.0 / columns)
    figure = new_figure(side * columns + 1.2, (side + 0.3) * rows + 1.0)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        hide_axes(axes)
    draw_image(panels[0], image)
    panels[0].set_title("image", fontsize=TEXT)
    for axes, (name, matrix) in zip(panels[1:], cells.items(), strict=False):
        drawn = draw_overlay(axes, image, matrix, low, high)
        panel_title(axes, name, side)
    add_title(figure, title)
    add_caption(figure, TINT_NOTE)
    add_colorbar(figure, drawn, panels, "weight", shrink=0.85)
    return figure


def draw_tokens(
    weights: Any,
    queries: Sequence[str],
    keys: Sequence[str] | None = None,
    *,
    title: str = "Attention between tokens",
) -> "Figure":
    """The weights (Q,K) of one head as lines from queries on the left to keys on the right; width shows weight."""
    matrix = to_matrix(weights)
    keys = queries if keys is None else keys
    check_labels(queries, matrix.shape[0])
    check_labels(keys, matrix.shape[1])
    figure = new_figure(8.0, max(4.5, 0.42 * max(matrix.shape) + 1.5))
    axes = figure.subplots()
    positions = [np.linspace(0, 1, n) if n > 1 else np.array([0.5]) for n in matrix.shape]
    strongest = np.argsort(-matrix, axis=None, kind="stable")[:MAX_LINES]
    high = matrix.max() or 1.0
    for query, key in zip(*np.unravel_index(strongest, matrix.shape), strict=True):
        relative = matrix[query, key] / high
        ends = [positions[0][query], positions[1][key]]
        axes.plot([0, 1], ends, color=COLORS[query % 6], linewidth=5 * relative, alpha=min(1, 0.1 + 0.9 * relative))
    for x, side, names, heights in ((-0.03, "right", queries, positions[0]), (1.03, "left", keys, positions[1])):
        for y, name in zip(heights, names, strict=True):
            axes.text(x, y, name, ha=side, va="center", fontsize=TEXT)
    axes.set(xlim=(-0.25, 1.25), ylim=(1.06, -0.06))
    hide_axes(axes)
    add_title(figure, title)
    axes.set_xlabel(
        f"queries (left) to keys (right); the widest line has weight {high:.2f}", fontsize=SMALL, color=GRAY
    )
    return figure


def draw_image(axes: "Axes", image: Any) -> None:
    pixels = to_numpy(image).transpose(1, 2, 0) / 255
    rgb = pixels.repeat(3, axis=2) if pixels.shape[2] == 1 else pixels
    axes.imshow(rgb.clip(0, 1), interpolation="nearest")


def draw_overlay(
    axes: "Axes", image: Any, cells: "NDArray[np.float64]", low: float, high: float, colors: "Colormap | None" = None
) -> Any:
    """The image, a tint whose opacity grows with the weight, and outlines around the upper half of the scale.

    If `low` is negative, the scale is symmetric and large negative values are outlined too.
    """
    draw_image(axes, image)
    height, width = to_numpy(image).shape[1:]
    drawn = draw_heatmap(axes, cells, low, high, colors or tint(), extent=(-0.5, width - 0.5, height - 0.5, -0.5))
    inside = np.abs(cells) > high / 2 if low < 0 else cells > (low + high) / 2
    draw_outline(axes, inside, (height, width))
    return drawn


def draw_outline(axes: "Axes", inside: "NDArray[np.bool_]", shape: tuple[int, int]) -> None:
    """Lines around the cells (rows,columns) that are `inside`, over an image of this shape."""
    from matplotlib.collections import LineCollection

    rows, columns = inside.shape
    y, x = np.linspace(-0.5, shape[0] - 0.5, rows + 1), np.linspace(-0.5, shape[1] - 0.5, columns + 1)
    padded = np.pad(inside, 1)
    across, down = padded[1:, 1:-1] != padded[:-1, 1:-1], padded[1:-1, 1:] != padded[1:-1, :-1]
    lines = [((x[j], y[i]), (x[j + 1], y[i])) for i, j in np.argwhere(across)]
    lines += [((x[j], y[i]), (x[j], y[i + 1])) for i, j in np.argwhere(down)]
    for width, color in ((3.0, "white"), (1.2, "black")):  # visible on light and on dark images
        axes.add_collection(LineCollection(lines, colors=color, linewidths=width, capstyle="projecting"))


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure; sizes are in inches."""
    return drawing.new_figure(width, height, DPI)


def add_title(figure: "Figure", text: str) -> None:
    """A title above the whole figure, wrapped to its width; the figure grows with each additional line."""
    lines = wrap(text, 0.96 * figure.get_figwidth(), TITLE)
    figure.set_figheight(figure.get_figheight() + lines.count("\n") * 1.25 * TITLE / 72)
    figure.suptitle(lines, fontsize=TITLE, parse_math=False)


def add_caption(figure: "Figure", text: str) -> None:
    """A caption below the whole figure, wrapped to its width; the figure grows with each additional line."""
    lines = wrap(text, 0.96 * figure.get_figwidth(), SMALL)
    figure.set_figheight(figure.get_figheight() + lines.count("\n") * 1.25 * SMALL / 72)
    figure.supxlabel(lines, fontsize=SMALL, color=GRAY, parse_math=False)


def panel_title(axes: "Axes", text: str, width: float) -> None:
    """A title above one panel, wrapped to its width in inches."""
    axes.set_title(wrap(text, width, TEXT), fontsize=TEXT, parse_math=False)


def draw_heatmap(
    axes: "Axes",
    matrix: "NDArray[np.float64]",
    low: float,
    high: float,
    colors: "str | Colormap" = COLORMAP,
    **options: Any,
) -> "AxesImage":
    """A matrix as colors between two limits; values that are not finite stay white."""
    image = axes.imshow(
        np.ma.masked_invalid(matrix), cmap=colors, vmin=low, vmax=high, interpolation="nearest", **options
    )
    axes.grid(False)
    return image


def value_range(matrices: "Sequence[NDArray[np.float64]]") -> tuple[float, float]:
    """The smallest and the largest finite value."""
    values = np.concatenate([matrix[np.isfinite(matrix)].ravel() for matrix in matrices])
    return (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)


def add_colorbar(
    figure: "Figure", image: "AxesImage", axes: "Axes | Sequence[Axes]", unit: str = "", **options: Any
) -> None:
    """A color bar with ticks at both limits and in the middle."""
    color_bar = figure.colorbar(image, ax=axes if not isinstance(axes, Sequence) else list(axes), **options)
    low, high = image.get_clim()
    if low < high:
        ticks = [low, (low + high) / 2, high]
        color_bar.set_ticks(ticks, labels=[format_number(tick, high - low) for tick in ticks])
    color_bar.ax.tick_params(labelsize=SMALL)
    color_bar.set_label(unit, fontsize=TEXT)


def tint(*, signed: bool = False) -> "Colormap":
    """A colormap for overlays, whose opacity grows with the value: magenta, and green for negative values."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgba

    colors = [to_rgba(POSITIVE, 0), to_rgba(POSITIVE, OPACITY)]
    if not signed:
        return LinearSegmentedColormap.from_list("tint", colors)
    below = [to_rgba(NEGATIVE, OPACITY), to_rgba(NEGATIVE, 0)]
    return LinearSegmentedColormap.from_list("signed tint", list(zip((0, 0.5, 0.5, 1), below + colors, strict=True)))


def tint_limits(matrices: "Sequence[NDArray[np.float64]]") -> tuple[float, float]:
    """The values at which a tint starts and is strongest: the mean weight, and the largest weight or twice the mean.

    Nearly uniform weights then hardly tint an image, instead of covering all of it.
    """
    mean = float(np.mean([np.nanmean(matrix) for matrix in matrices]))
    return mean, max(value_range(matrices)[1], 2 * mean)


def hide_axes(axes: "Axes") -> None:
    """Hide ticks and frame."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def label_tokens(axes: "Axes", rows: Sequence[str] | None, columns: Sequence[str] | None, shape: Sequence[int]) -> None:
    """Label the axes with token names, or with positions from 0, of which only some are shown if there are many."""
    for names, n, axis in ((rows, shape[0], axes.yaxis), (columns, shape[1], axes.xaxis)):
        if names is None:
            step = 1 if n <= 10 else math.ceil(n / 6)
            axis.set_ticks(list(range(0, n, step)), labels=[str(i) for i in range(0, n, step)])
        else:
            check_labels(names, n)
            axis.set_ticks(list(range(n)), labels=list(names))
    axes.tick_params(length=0, labelsize=SMALL)
    for label in axes.get_xticklabels():
        label.set_rotation(90 if columns is not None and len(label.get_text()) > MAX_HORIZONTAL else 0)


def check_labels(names: Sequence[str], n: int) -> None:
    if len(names) != n:
        raise ValueError(f"there must be one name for each of {n} tokens or layers, got {len(names)} names")


def to_numpy(values: Any) -> "NDArray[np.float64]":
    """A tensor or a list as an array of float64."""
    return np.asarray(values.detach().cpu().double() if isinstance(values, Tensor) else values, dtype=np.float64)


def to_matrix(values: Any) -> "NDArray[np.float64]":
    matrix = to_numpy(values)
    if matrix.ndim != 2 or not matrix.size:
        raise ValueError(
            f"weights must be one matrix (Q,K), got shape {matrix.shape}; choose an example, a layer and a head"
        )
    return matrix


def is_elongated(shape: Sequence[int]) -> bool:
    """Whether the matrix is too elongated to be drawn with square cells."""
    return max(shape) > 4 * min(shape)


def on_two_lines(name: str) -> str:
    """A module name split into two lines, to fit beside its row."""
    return ".\n".join(name.rsplit(".", 1))
