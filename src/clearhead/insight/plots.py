"""How the pictures of attention look: readable from the last row, and the same to the colour-blind.

Colours and saving are those of every picture: see drawing.py.
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
"""points"""
POSITIVE, NEGATIVE = "#E0007A", "#00A878"
"""magenta and green, which photographs seldom have and the colour-blind tell apart by their lightness"""
OPACITY = 0.7
"""of the largest weight over a photograph: what lies below stays recognisable"""
DPI = 120
LONG = 3
"""a name below a column that has more characters is turned"""


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of this many inches."""
    return drawing.new_figure(width, height, DPI)


def heading(figure: "Figure", text: str) -> None:
    """A title over the whole figure, wrapped to its width; the figure grows by each line after the first."""
    lines = wrap(text, 0.96 * figure.get_figwidth(), TITLE)
    figure.set_figheight(figure.get_figheight() + lines.count("\n") * 1.25 * TITLE / 72)
    figure.suptitle(lines, fontsize=TITLE, parse_math=False)


def caption(figure: "Figure", text: str) -> None:
    """A note below the whole figure, wrapped to its width; the figure grows by each line after the first."""
    lines = wrap(text, 0.96 * figure.get_figwidth(), SMALL)
    figure.set_figheight(figure.get_figheight() + lines.count("\n") * 1.25 * SMALL / 72)
    figure.supxlabel(lines, fontsize=SMALL, color=GRAY, parse_math=False)


def panel_title(axes: "Axes", text: str, width: float) -> None:
    """A title over one panel, wrapped to its width in inches."""
    axes.set_title(wrap(text, width, TEXT), fontsize=TEXT, parse_math=False)


def tint(*, signed: bool = False) -> "Colormap":
    """Colours to lay over a photograph, the more opaque the larger the value: magenta, or green if it is negative."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgba

    colours = [to_rgba(POSITIVE, 0), to_rgba(POSITIVE, OPACITY)]
    if not signed:
        return LinearSegmentedColormap.from_list("tint", colours)
    below = [to_rgba(NEGATIVE, OPACITY), to_rgba(NEGATIVE, 0)]
    return LinearSegmentedColormap.from_list("signed tint", list(zip((0, 0.5, 0.5, 1), below + colours, strict=True)))


def tint_limits(matrices: "Sequence[NDArray[np.float64]]") -> tuple[float, float]:
    """Where a tint begins and where it is full: at the mean weight, and at the largest one or twice the mean.

    So weights that are nearly uniform hardly tint a photograph, instead of covering all of it.
    """
    mean = float(np.mean([np.nanmean(matrix) for matrix in matrices]))
    return mean, max(limits(matrices)[1], 2 * mean)


def numbers(values: Any) -> "NDArray[np.float64]":
    """Tensors and lists alike."""
    return np.asarray(values.detach().cpu().double() if isinstance(values, Tensor) else values, dtype=np.float64)


def heat(
    axes: "Axes",
    matrix: "NDArray[np.float64]",
    low: float,
    high: float,
    colours: "str | Colormap" = COLORMAP,
    **options: Any,
) -> "AxesImage":
    """A matrix as colours between two limits; what is not finite stays white."""
    image = axes.imshow(
        np.ma.masked_invalid(matrix), cmap=colours, vmin=low, vmax=high, interpolation="nearest", **options
    )
    axes.grid(False)
    return image


def limits(matrices: "Sequence[NDArray[np.float64]]") -> tuple[float, float]:
    """The lowest and the highest finite number of all."""
    values = np.concatenate([matrix[np.isfinite(matrix)].ravel() for matrix in matrices])
    return (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)


def bar(figure: "Figure", image: "AxesImage", axes: "Axes | Sequence[Axes]", unit: str = "", **options: Any) -> None:
    """A colour bar whose ends are the limits, written out."""
    colour_bar = figure.colorbar(image, ax=axes if not isinstance(axes, Sequence) else list(axes), **options)
    low, high = image.get_clim()
    if low < high:
        ticks = [low, (low + high) / 2, high]
        colour_bar.set_ticks(ticks, labels=[format_number(tick, high - low) for tick in ticks])
    colour_bar.ax.tick_params(labelsize=SMALL)
    colour_bar.set_label(unit, fontsize=TEXT)


def plain(axes: "Axes") -> None:
    """Neither ticks nor frame: for pictures."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def tick_names(axes: "Axes", rows: Sequence[str] | None, columns: Sequence[str] | None, shape: Sequence[int]) -> None:
    """The tokens' names, or their places counted from 0; where there are many places, only some get a number."""
    for names, n, axis in ((rows, shape[0], axes.yaxis), (columns, shape[1], axes.xaxis)):
        if names is None:
            step = 1 if n <= 10 else math.ceil(n / 6)
            axis.set_ticks(list(range(0, n, step)), labels=[str(i) for i in range(0, n, step)])
        else:
            check_names(names, n)
            axis.set_ticks(list(range(n)), labels=list(names))
    axes.tick_params(length=0, labelsize=SMALL)
    for label in axes.get_xticklabels():
        label.set_rotation(90 if columns is not None and len(label.get_text()) > LONG else 0)


def check_names(names: Sequence[str], n: int) -> None:
    if len(names) != n:
        raise ValueError(f"each token has one name, got {len(names)} names for {n} tokens; leave them out, or name all")


# Attention as pictures: plain arrays in, figures out.
#
# Dims: H heads, Q queries, K keys, C channels. Arrays may be tensors or numpy's.


MOST_LINES = 400
"""the strongest weights that token-to-token draws"""
TINT_NOTE = (
    "The tint runs from the mean weight to the largest, or to twice the mean if no weight is larger; patches in the "
    "upper half of the scale are outlined. A map without a visible tint is nearly uniform."
)


def draw_head(
    weights: Any, *, queries: Sequence[str] | None = None, keys: Sequence[str] | None = None, title: str = "one head"
) -> "Figure":
    """One head's weights (Q,K) as a matrix: a row is what one query looks at."""
    matrix = two_dimensional(weights)
    figure = new_figure(8.0, 6.6)
    axes = figure.subplots()
    image = heat(axes, matrix, 0, limits([matrix])[1], aspect="auto" if is_long(matrix.shape) else "equal")
    tick_names(axes, queries, keys, matrix.shape)
    heading(figure, title)
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
    figure = new_figure(min(14.0, max(7.2, 2.5 + 0.5 * columns)), min(14.0, max(4.0, 2.4 + 0.5 * rows)))
    axes = figure.subplots()
    image = heat(axes, matrix, 0, limits([matrix])[1])
    tick_names(axes, target, source, matrix.shape)
    axes.scatter(
        matrix.argmax(1), range(len(matrix)), s=90, facecolors="none", edgecolors=COLORS[1], linewidths=2, zorder=3
    )
    heading(figure, title)
    axes.set_xlabel(names[0], fontsize=TEXT)
    axes.set_ylabel(names[1], fontsize=TEXT)
    caption(figure, "A ring marks the largest weight of its row.")
    bar(figure, image, axes, "weight", shrink=0.85)
    return figure


def draw_wall(layers: Sequence[Any], names: Sequence[str], *, title: str = "every layer and head") -> "Figure":
    """Every head of every layer, (H,Q,K) each: one row and one colour scale per layer. Layers of a single head are
    arranged in a grid instead, which fills the picture."""
    stacks = [numbers(layer) for layer in layers]
    check_names(names, len(stacks))
    num_heads = max(len(stack) for stack in stacks)
    figure = wall_of_layers(stacks, names) if num_heads == 1 else wall_of_heads(stacks, names, num_heads)
    heading(figure, title)
    caption(figure, "Each row of a matrix shows where one query attends; each column is one key.")
    return figure


def wall_of_heads(stacks: "Sequence[NDArray[np.float64]]", names: Sequence[str], num_heads: int) -> "Figure":
    side = max(1.9, 5.4 / num_heads)
    figure = new_figure(side * num_heads + 2.6, max(3.6, side * len(stacks) + 1.2))
    figure.set_layout_engine("constrained", rect=(0.02, 0, 0.98, 1))  # room for names of two lines
    panels = figure.subplots(len(stacks), num_heads, squeeze=False)
    for row, (stack, name) in enumerate(zip(stacks, names, strict=True)):
        high = limits([stack])[1]
        for column, axes in enumerate(panels[row]):
            plain(axes)
            if column < len(stack):
                image = draw_matrix(axes, stack[column], high)
            if row == 0:
                axes.set_title(f"head {column}", fontsize=TEXT)
        panels[row][0].set_ylabel(wrap(broken(name), 1.3 * side, SMALL), fontsize=SMALL)
        bar(figure, image, list(panels[row]), "weight", shrink=0.9, aspect=12)
    return figure


def wall_of_layers(stacks: "Sequence[NDArray[np.float64]]", names: Sequence[str]) -> "Figure":
    """Layers of one head each, row by row in the order of execution."""
    columns = min(4, math.ceil(math.sqrt(len(stacks))))
    rows, side = math.ceil(len(stacks) / columns), max(3.2, 6.0 / columns)
    figure = new_figure((side + 0.9) * columns, (side + 0.4) * rows + 0.8)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        plain(axes)
    for axes, stack, name in zip(panels, stacks, names, strict=False):
        image = draw_matrix(axes, stack[0], limits([stack])[1])
        panel_title(axes, name, side)
        bar(figure, image, axes, "weight", shrink=0.85, aspect=16)
    return figure


def draw_matrix(axes: "Axes", matrix: "NDArray[np.float64]", high: float) -> Any:
    if is_long(matrix.shape):
        axes.set_box_aspect(1)  # in line with the square maps of other layers
    return heat(axes, matrix, 0, high, aspect="auto" if is_long(matrix.shape) else "equal")


def draw_over_image(
    image: Any,
    maps: Mapping[str, Any],
    *,
    title: str = "attention from the output to each patch",
) -> "Figure":
    """The image (C,height,width), numbers from 0 to 255, and over it each map (rows,columns) of its patches.

    All maps are on one scale, which the colour bar names: it begins at the mean weight.
    """
    cells = {name: two_dimensional(cells) for name, cells in maps.items()}
    low, high = tint_limits(list(cells.values()))
    columns = min(5, len(cells) + 1)
    rows, side = math.ceil((len(cells) + 1) / columns), max(2.5, 7.0 / columns)
    figure = new_figure(side * columns + 1.2, (side + 0.3) * rows + 1.0)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        plain(axes)
    show_picture(panels[0], image)
    panels[0].set_title("image", fontsize=TEXT)
    for axes, (name, matrix) in zip(panels[1:], cells.items(), strict=False):
        drawn = lay_over(axes, image, matrix, low, high)
        panel_title(axes, name, side)
    heading(figure, title)
    caption(figure, TINT_NOTE)
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
    figure = new_figure(8.0, max(4.5, 0.42 * max(matrix.shape) + 1.5))
    axes = figure.subplots()
    places = [np.linspace(0, 1, n) if n > 1 else np.array([0.5]) for n in matrix.shape]
    strongest = np.argsort(-matrix, axis=None, kind="stable")[:MOST_LINES]
    high = matrix.max() or 1.0
    for query, key in zip(*np.unravel_index(strongest, matrix.shape), strict=True):
        share = matrix[query, key] / high
        ends = [places[0][query], places[1][key]]
        axes.plot([0, 1], ends, color=COLORS[query % 6], linewidth=5 * share, alpha=min(1, 0.1 + 0.9 * share))
    for x, side, names, spots in ((-0.03, "right", queries, places[0]), (1.03, "left", keys, places[1])):
        for spot, name in zip(spots, names, strict=True):
            axes.text(x, spot, name, ha=side, va="center", fontsize=TEXT)
    axes.set(xlim=(-0.25, 1.25), ylim=(1.06, -0.06))
    plain(axes)
    heading(figure, title)
    axes.set_xlabel(f"from queries (left) to keys (right); the widest line is {high:.2f}", fontsize=SMALL, color=GRAY)
    return figure


def show_picture(axes: "Axes", image: Any) -> None:
    pixels = numbers(image).transpose(1, 2, 0) / 255
    shown = pixels.repeat(3, axis=2) if pixels.shape[2] == 1 else pixels
    axes.imshow(shown.clip(0, 1), interpolation="nearest")


def lay_over(
    axes: "Axes", image: Any, cells: "NDArray[np.float64]", low: float, high: float, colours: "Colormap | None" = None
) -> Any:
    """The image in its own colours, a tint that is the more opaque the larger the weight, and an outline around the
    patches in the upper half of the scale; below 0 a scale is symmetric, and large negative values count too."""
    show_picture(axes, image)
    height, width = numbers(image).shape[1:]
    drawn = heat(axes, cells, low, high, colours or tint(), extent=(-0.5, width - 0.5, height - 0.5, -0.5))
    inside = np.abs(cells) > high / 2 if low < 0 else cells > (low + high) / 2
    draw_outline(axes, inside, (height, width))
    return drawn


def draw_outline(axes: "Axes", inside: "NDArray[np.bool_]", shape: tuple[int, int]) -> None:
    """Lines between the cells (rows,columns) inside and those outside, over an image of this shape."""
    from matplotlib.collections import LineCollection

    rows, columns = inside.shape
    y, x = np.linspace(-0.5, shape[0] - 0.5, rows + 1), np.linspace(-0.5, shape[1] - 0.5, columns + 1)
    padded = np.pad(inside, 1)
    across, down = padded[1:, 1:-1] != padded[:-1, 1:-1], padded[1:-1, 1:] != padded[1:-1, :-1]
    lines = [((x[j], y[i]), (x[j + 1], y[i])) for i, j in np.argwhere(across)]
    lines += [((x[j], y[i]), (x[j], y[i + 1])) for i, j in np.argwhere(down)]
    for width, colour in ((3.0, "white"), (1.2, "black")):  # visible on light and on dark photographs
        axes.add_collection(LineCollection(lines, colors=colour, linewidths=width, capstyle="projecting"))


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
