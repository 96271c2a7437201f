"""How the pictures of attention look: readable from the last row, and the same to the colour-blind.

Colours and saving are those of every picture: see drawing.py.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from clearhead import drawing
from clearhead.drawing import GREY, MAP, short, wrap

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


def blank(width: float, height: float) -> "Figure":
    """An empty figure of this many inches."""
    return drawing.blank(width, height, DPI)


def heading(figure: "Figure", text: str) -> None:
    """A title over the whole figure, wrapped to its width; the figure grows by each line after the first."""
    lines = wrap(text, 0.96 * figure.get_figwidth(), TITLE)
    figure.set_figheight(figure.get_figheight() + lines.count("\n") * 1.25 * TITLE / 72)
    figure.suptitle(lines, fontsize=TITLE, parse_math=False)


def caption(figure: "Figure", text: str) -> None:
    """A note below the whole figure, wrapped to its width; the figure grows by each line after the first."""
    lines = wrap(text, 0.96 * figure.get_figwidth(), SMALL)
    figure.set_figheight(figure.get_figheight() + lines.count("\n") * 1.25 * SMALL / 72)
    figure.supxlabel(lines, fontsize=SMALL, color=GREY, parse_math=False)


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
    colours: "str | Colormap" = MAP,
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
        colour_bar.set_ticks(ticks, labels=[short(tick, high - low) for tick in ticks])
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
