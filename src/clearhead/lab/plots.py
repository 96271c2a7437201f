"""Panels, labels and styles of the lab's figures, legible when projected; colors and saving are in drawing.py."""

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from clearhead.drawing import (
    BLACK,
    BLUE,
    COLORMAP,
    COLORS,
    GRAY,
    LIGHT_GRAY,
    VERMILION,
    check_suffix,
    format_number,
    new_figure,
    save_figure,
)
from clearhead.lab.claim import Check, Curve, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

FIGURE_SIZE = (10.0, 5.6)
"""inches"""
TITLE_SIZE, TEXT_SIZE, SMALL_SIZE = 18, 16, 14
"""points, at FIGURE_SIZE"""

CORRECT, MISCONCEPTION = BLUE, VERMILION


def subplots(
    mosaic: str = "A",
    *,
    widths: Sequence[float] | None = None,
    heights: Sequence[float] | None = None,
    same_x: bool = False,
    same_y: bool = False,
) -> "tuple[Figure, list[Axes]]":
    """A figure and its axes, from a mosaic: "AB" is two panels side by side, "AB;AC" one tall and two small ones."""
    figure = new_figure(*FIGURE_SIZE)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr, call-arg]
    by_letter = figure.subplot_mosaic(mosaic, width_ratios=widths, height_ratios=heights, sharex=same_x, sharey=same_y)
    all_axes = [by_letter[letter] for letter in sorted(by_letter)]
    for axes in all_axes:
        axes.tick_params(labelsize=SMALL_SIZE)
        axes.tick_params(which="minor", labelbottom=False, labelleft=False)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=LIGHT_GRAY, linewidth=0.8)
        axes.set_axisbelow(True)
    return figure, all_axes


def set_headline(figure: "Figure", sentence: str) -> None:
    """Sets the title of the figure: one sentence that states the claim, wrapped to two lines if needed."""
    length = len(sentence) - sentence.count("$") - sentence.count("$W_")  # math markup is not visible
    figure.suptitle(sentence if length <= 74 else fill(sentence, 8 + length // 2), fontsize=TITLE_SIZE)


def label_axes(axes: "Axes", title: str = "", x: str = "", y: str = "") -> None:
    """Sets the title of a panel and the labels of its axes."""
    axes.set_title(title, fontsize=TEXT_SIZE, pad=10)
    axes.set_xlabel(x, fontsize=TEXT_SIZE)
    axes.set_ylabel(y, fontsize=TEXT_SIZE)


def label(
    axes: "Axes",
    x: float,
    y: float,
    text: str,
    color: str = BLACK,
    *,
    offset: tuple[float, float] = (0, 0),
    ha: Literal["left", "center", "right"] = "left",
    va: Literal["baseline", "center", "top"] = "baseline",
    xycoords: Any = "data",
) -> None:
    """Labels a line or a point in its own color; `offset` is in points."""
    axes.annotate(
        text, (x, y), offset, xycoords, "offset points", color=color, fontsize=SMALL_SIZE, ha=ha, va=va, clip_on=False
    )


def legend_below(figure: "Figure", axes: "Axes", columns: int = 4) -> None:
    """A legend of `axes`, in reverse order of drawing, below all panels."""
    handles, names = axes.get_legend_handles_labels()
    figure.legend(
        handles[::-1], names[::-1], loc="outside lower center", ncols=columns, fontsize=SMALL_SIZE, frameon=False
    )


def heat_maps(
    figure: "Figure", all_axes: "Sequence[Axes]", maps: Sequence[Tensor], unit: str, *, beside: "Sequence[Axes]" = ()
) -> "list[AxesImage]":
    """Draws matrices on a common color scale from the smallest to the largest value; non-finite values stay white.

    The color bar is placed beside the axes `beside`, by default beside all maps.
    """
    import numpy as np

    numbers = torch.cat([matrix[matrix.isfinite()].flatten() for matrix in maps])
    low, high = numbers.min().item(), numbers.max().item()
    if high - low <= 1e-12 * max(abs(low), abs(high)):  # a constant matrix: use a scale that includes 0 and 1
        low, high = min(low, 0.0), max(high, 1.0)
    images = []
    for axes, matrix in zip(all_axes, maps, strict=True):
        masked = np.ma.masked_invalid(matrix.detach().double().numpy())
        aspect: Any = (
            "equal" if 0.5 <= matrix.shape[0] / matrix.shape[1] <= 2 else "auto"
        )  # keep elongated matrices readable
        images.append(axes.imshow(masked, cmap=COLORMAP, vmin=low, vmax=high, interpolation="nearest", aspect=aspect))
        axes.grid(False)
        token_ticks(axes, *matrix.shape)
    bar = figure.colorbar(images[-1], ax=list(beside or all_axes), shrink=0.85, pad=0.03)
    bar.ax.tick_params(labelsize=SMALL_SIZE)
    bar.set_label(unit, fontsize=TEXT_SIZE)
    if low < high:
        ticks = [low, (low + high) / 2, high]
        bar.set_ticks(ticks, labels=[without_negative_zero(format_number(tick, high - low)) for tick in ticks])
    return images


def without_negative_zero(number: str) -> str:
    """-0.00 is 0.00."""
    return number if float(number) else number.removeprefix("-")


def scatter_against(
    axes: "Axes", measured: Tensor, predictions: "dict[str, tuple[Tensor, str, str]]", bins: int = 4
) -> None:
    """Scatter plot of measured values against predictions {name: (values, color, marker)}, with the diagonal."""
    for text, (numbers, color, marker) in reversed(predictions.items()):
        edge: dict[str, Any] = {} if marker == "x" else {"edgecolor": "white"}
        axes.scatter(numbers.flatten(), measured.flatten(), s=65, marker=marker, color=color, label=text, **edge)
    axes.axline((0, 0), slope=1, color=GRAY, linewidth=2, zorder=0)
    parts = [measured, *(numbers for numbers, _, _ in predictions.values())]
    finite = torch.cat([part[part.isfinite()].flatten() for part in parts])
    margin = 0.06 * (finite.max() - finite.min()).item() or 1.0
    limits = finite.min().item() - margin, finite.max().item() + margin
    axes.set(xlim=limits, ylim=limits)
    axes.set_box_aspect(1)
    axes.locator_params(nbins=bins)


def bars(axes: "Axes", heights: "dict[str, tuple[float, str]]", fmt: str = "{:.2g}") -> None:
    """Labeled bars {name: (height, color)}."""
    drawn = axes.bar(list(heights), [height for height, _ in heights.values()], color=[c for _, c in heights.values()])
    axes.bar_label(drawn, labels=[fmt.format(height) for height, _ in heights.values()], fontsize=SMALL_SIZE, padding=3)
    top = max(height for height, _ in heights.values())
    axes.set_ylim(0, 1.15 * top or 1.0)
    axes.grid(axis="x", visible=False)


def rounding_band(axes: "Axes", low: float = 1e-17, *, x: float = 0.0, above: bool = False) -> None:
    """Shades the range of float64 rounding errors on a logarithmic axis; its label starts at `x`, inside or above."""
    axes.axhspan(low, 1e-14, color=LIGHT_GRAY, zorder=0)
    label(axes, x, 1e-14, "rounding (float64)", BLACK, offset=(4, 5 if above else -18))


def draw_flow(
    axes: "Axes",
    boxes: dict[str, tuple[float, float, str]],
    arrows: Sequence[tuple[str, str]],
    size: tuple[float, float],
) -> None:
    """A diagram of boxes {text: (x, y, color)} and arrows between them; x and y range from 0 to `size`."""
    drawn = {}
    for text, (x, y, color) in boxes.items():
        frame = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": color, "linewidth": 2.5}
        drawn[text] = axes.text(x, y, text, fontsize=SMALL_SIZE, ha="center", va="center", bbox=frame)
    for start, end in arrows:
        ends = {"patchA": drawn[start].get_bbox_patch(), "patchB": drawn[end].get_bbox_patch()}
        style = {"arrowstyle": "-|>,head_width=0.35,head_length=0.6", "color": GRAY, "linewidth": 2}
        axes.annotate("", boxes[end][:2], boxes[start][:2], arrowprops={**ends, **style, "shrinkA": 1, "shrinkB": 2})
    hide_axes(axes, size)


def hide_axes(axes: "Axes", size: tuple[float, float]) -> None:
    """Hides ticks and frame, for a diagram; x and y range from 0 to `size`."""
    axes.set(xlim=(0, size[0]), ylim=(0, size[1]), xticks=[], yticks=[])
    axes.set_axis_off()


def mask_map(axes: "Axes", mask: Tensor, texts: list[list[str]]) -> None:
    """Draws a mask, blue where it is True and gray where it is False, with a text per cell if it is small."""
    from matplotlib.colors import ListedColormap

    rows, columns = mask.shape
    axes.imshow(mask.int().numpy(), cmap=ListedColormap([LIGHT_GRAY, BLUE]), vmin=0, vmax=1, interpolation="nearest")
    token_ticks(axes, rows, columns)
    axes.grid(False)
    axes.set_xticks([column + 0.5 for column in range(columns - 1)], minor=True)
    axes.set_yticks([row + 0.5 for row in range(rows - 1)], minor=True)
    axes.grid(which="minor", color="white", linewidth=min(2.0, 12 / rows))  # between the cells
    axes.tick_params(which="minor", length=0)
    axes.spines[:].set_visible(False)
    if rows <= 6:
        for row, column in product(range(rows), range(columns)):
            label(
                axes, column, row, texts[row][column], "white" if mask[row, column] else BLACK, ha="center", va="center"
            )
    for text in axes.texts:
        text.set_in_layout(False)  # inside the axes, so irrelevant to the layout


def token_ticks(axes: "Axes", rows: int, columns: int) -> None:
    """Tick labels count tokens from 1; long axes get only some labels."""
    for set_ticks, count in ((axes.set_xticks, columns), (axes.set_yticks, rows)):
        step = 1 if count <= 8 else math.ceil(count / 5)
        indices = range(0, count, step)
        set_ticks(list(indices), labels=[str(index + 1) for index in indices])
    axes.tick_params(length=0)


def save(figure: "Figure", path: Path) -> Path:
    """Saves the figure as PNG, SVG or PDF, according to the suffix; the same figure gives the same bytes."""
    check_suffix(path)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # one layout for all formats: repeating it would shift the panels
    for axes in figure.axes:  # round positions, since SVG ids depend on every bit
        x, y, width, height = axes.get_position(original=True).bounds
        axes.set_position((round(x, 7), round(y, 7), round(width, 7), round(height, 7)))
    return save_figure(figure, path)


MARKERS = "os^Dv*X"


def draw_measured(result: Result, sentence: str) -> "Figure":
    """One panel per quantity of the result's curves; the checks if there are no curves."""
    quantities = list(dict.fromkeys(curve.quantity for curve in result.curves))
    if not quantities:
        figure, (axes,) = subplots()
        draw_checks(axes, result.checks)
    else:
        figure, all_axes = subplots("ABCDEF"[: len(quantities)])
        for axes, quantity in zip(all_axes, quantities, strict=True):
            draw_quantity(axes, [curve for curve in result.curves if curve.quantity == quantity])
        if max(len(curve.x) for curve in result.curves) > 1:
            legend_below(figure, all_axes[0], 3)
    set_headline(figure, sentence)
    return figure


def draw_quantity(axes: "Axes", curves: Sequence[Curve]) -> None:
    """Lines over training steps; bars if each curve has one point or each point has a name."""
    quantity, names = curves[0].quantity, curves[0].quantity.split(", ")
    if len(names) == len(curves[0].x) > 1:
        draw_groups(axes, curves, names)
        quantity = "accuracy"
    elif all(len(curve.x) == 1 for curve in curves):
        bars(axes, {fill(curve.name, 11): (curve.y[0], CORRECT) for curve in curves}, "{:.3g}")
    else:
        draw_lines(axes, curves)
    axes.set_ylim(0, 1.1 * max(1.0, *(height for curve in curves for height in curve.y)))
    axes.set_ylabel(fill(quantity, 24), fontsize=TEXT_SIZE)


def draw_groups(axes: "Axes", curves: Sequence[Curve], names: Sequence[str]) -> None:
    """Grouped bars: one group per name."""
    width = 0.8 / len(curves)
    for number, curve in reversed(list(enumerate(curves))):
        centers = [group + (number + 0.5) * width - 0.4 for group in range(len(names))]
        drawn = axes.bar(centers, curve.y, width, color=COLORS[number % len(COLORS)], label=curve.name)
        axes.bar_label(drawn, fmt="{:.0%}", fontsize=SMALL_SIZE)
    axes.set_xticks(range(len(names)), labels=[fill(text, 12) for text in names])
    axes.grid(axis="x", visible=False)


def draw_lines(axes: "Axes", curves: Sequence[Curve]) -> None:
    """Lines over training steps on a logarithmic axis."""
    for number, curve in reversed(list(enumerate(curves))):
        color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        axes.plot(curve.x, curve.y, f"{marker}-", color=color, linewidth=3, markersize=8, label=curve.name)
    steps = sorted({step for curve in curves for step in curve.x})
    axes.set_xscale("log", base=2)
    axes.set_xticks(steps, labels=[f"{step:g}" for step in steps])
    axes.set_xlabel("training steps", fontsize=TEXT_SIZE)


def draw_checks(axes: "Axes", checks: Sequence[Check]) -> None:
    """One horizontal bar per check, with its name and expectation."""
    values = [check.value for check in checks]
    colors = [CORRECT if check.passed else MISCONCEPTION for check in checks]
    axes.barh(range(len(checks)), values, color=colors, height=0.6)
    for row, check in enumerate(checks):
        label(axes, max(check.value, 0.0), row, f"{check.value:.3g} ({check.expectation})", offset=(6, 0), va="center")
    axes.set_yticks(range(len(checks)), labels=[fill(check.name, 32) for check in checks])
    axes.invert_yaxis()
    axes.axvline(0, color=GRAY)
    axes.set_xlim(min(0.0, 1.1 * min(values)), 1.6 * max(*values, 0.1))
    axes.grid(axis="y", visible=False)
    label_axes(axes, "", "measured value")
