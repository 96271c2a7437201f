"""Figures of matrices with their numbers: an attention mask, and the five steps of self-attention."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from clearhead.drawing import BLACK, BLUE, GRAY, LIGHT_GRAY, VERMILION, new_figure
from clearhead.models.mask_view import MaskView
from clearhead.models.steps import Panel, Step
from clearhead.models.steps_render import FEW, MAX_SHOWN, cells, rows_of, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_NUMBERED = 16
"""with more rows or columns, cells are too small for numbers"""
MAX_PANELS = 12


def draw_mask(view: MaskView) -> "Figure":
    """One panel per example and head: blue cells are visible, gray cells hidden, rows without visible keys framed."""
    from matplotlib.patches import Patch

    grids = list(view.grids())
    shown = grids[:MAX_PANELS]
    num_columns = min(len(shown), 4)
    num_rows = math.ceil(len(shown) / num_columns)
    num_queries, num_keys = view.mask.shape[-2:]
    is_numbered = max(num_queries, num_keys) <= MAX_NUMBERED
    cell = 0.32 + 0.08 * len(view.cell(False)) if is_numbered else 5.0 / max(num_queries, num_keys)  # inches
    wide, tall = cell * num_keys + 0.6, cell * num_queries + (0.6 if shown[0][0] == "" else 0.9)
    figure = new_figure(max(6.0, num_columns * wide), num_rows * (tall + 0.2) + 1.0)
    figure.set_layout_engine("constrained", h_pad=0.1)  # inches; otherwise the title touches the panels
    panels = figure.subplots(num_rows, num_columns, squeeze=False)
    for axes, (label, mask) in zip(panels.flat, shown, strict=False):
        draw_grid(axes, view, label, mask, is_numbered)
    for axes in panels.flat[len(shown) :]:
        axes.set_visible(False)
    form = "" if view.low is None else " in additive form"
    size = f"{view.title}{form}, {view.size}"
    more = f" (first {MAX_PANELS} of {len(grids)} masks)" if len(grids) > MAX_PANELS else ""
    figure.suptitle(size + more, fontsize=14)
    legend = [Patch(color=BLUE, label=f"{view.cell(True)}: may attend")]
    legend.append(Patch(color=LIGHT_GRAY, label=f"{sign(view.cell(False))}: hidden"))
    if view.empty_queries():
        legend.append(Patch(facecolor="none", edgecolor=VERMILION, label="may attend to nothing"))
    figure.legend(handles=legend, loc="outside lower center", ncols=3, fontsize=11, frameon=False)
    return figure


def draw_grid(axes: "Axes", view: MaskView, label: str, mask: Tensor, is_numbered: bool) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Rectangle

    num_queries, num_keys = mask.shape
    axes.imshow(mask.int().numpy(), cmap=ListedColormap([LIGHT_GRAY, BLUE]), vmin=0, vmax=1, interpolation="nearest")
    axes.set_title(label, fontsize=12)
    axes.set_xlabel("key", fontsize=12)
    axes.set_ylabel("query", fontsize=12)
    ticks(axes, num_keys, num_queries, view.first_query)
    if is_numbered:
        for row, values in enumerate(mask.tolist()):
            for column, visible in enumerate(values):
                text = sign(view.cell(visible))
                axes.text(column, row, text, ha="center", va="center", fontsize=12, color="white" if visible else BLACK)
    for row in (~mask.any(-1)).nonzero().flatten().tolist():
        frame = Rectangle(
            (-0.5, row - 0.5), num_keys, 1, fill=False, edgecolor=VERMILION, linewidth=2, zorder=3, clip_on=False
        )
        axes.add_patch(frame)


def ticks(axes: "Axes", num_keys: int, num_queries: int, first_query: int) -> None:
    """White lines between cells, and a number for each token, or for some tokens if there are many."""
    for set_ticks, count, first in ((axes.set_xticks, num_keys, 1), (axes.set_yticks, num_queries, first_query)):
        positions = range(0, count, 1 if count <= MAX_NUMBERED else math.ceil(count / 8))
        set_ticks(list(positions), labels=[str(position + first) for position in positions])
        if count <= 64:
            set_ticks([position + 0.5 for position in range(count - 1)], minor=True)
    axes.grid(which="minor", color="white", linewidth=min(2.0, 16 / max(num_keys, num_queries)))
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)


def sign(text: str) -> str:
    """The text with typographic minus and infinity signs."""
    return text.replace("-inf", "−∞").replace("-", "−")


CELL_HEIGHT, CHARACTER, GAP, MARGIN, HEADING = 0.3, 0.085, 0.35, 0.3, 0.64
"""inches"""
MAX_WIDTH = 11.0
"""the width of a line of matrices in inches; further matrices go below"""


@dataclass(frozen=True)
class Block:
    """A matrix with its title, its values as text, and its size in inches."""

    title: str
    texts: list[list[str]]
    values: Tensor
    is_weights: bool

    @property
    def cell_width(self) -> float:
        return 0.16 + CHARACTER * max(len(text) for row in self.texts for text in row)

    @property
    def width(self) -> float:
        return max(self.cell_width * len(self.texts[0]), 0.088 * len(self.title))

    @property
    def height(self) -> float:
        return CELL_HEIGHT * (len(self.texts) + 1)


@dataclass(frozen=True)
class Section:
    """A step: title and formula, then lines of matrices."""

    step: Step
    lines: list[list[Block]]

    @property
    def width(self) -> float:
        lines = [sum(block.width for block in line) + GAP * (len(line) - 1) for line in self.lines]
        return max(*lines, 0.085 * len(self.step.formula) + 0.2, 0.13 * len(self.step.title) + 0.3)

    @property
    def height(self) -> float:
        return HEADING + sum(max(block.height for block in line) + 0.16 for line in self.lines)


def draw_steps(steps: Sequence[Step]) -> "Figure":
    """Every step with its formula and its matrices; steps are side by side where they fit."""
    rows: list[list[Section]] = [[]]
    for section in (Section(step, list(block_lines(step))) for step in steps):
        if rows[-1] and sum(other.width + 2 * GAP for other in rows[-1]) + section.width > MAX_WIDTH:
            rows.append([])
        rows[-1].append(section)
    width = max(2 * MARGIN + sum(section.width for section in row) + 2 * GAP * (len(row) - 1) for row in rows)
    height = 2 * MARGIN + sum(max(section.height for section in row) + 0.16 for row in rows)
    figure = new_figure(max(width, 6.5), height)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, max(width, 6.5))
    axes.set_ylim(height, 0)
    axes.set_axis_off()
    y = MARGIN
    for row in rows:
        x = MARGIN
        for section in row:
            draw_section(axes, x, y, section)
            x += section.width + 2 * GAP
        y += max(section.height for section in row) + 0.16
    axes.text(MARGIN, y + 0.1, caption(steps), fontsize=10, color=GRAY, va="center")
    return figure


def caption(steps: Sequence[Step]) -> str:
    """The meaning of the colors, and what is omitted."""
    is_masked = any(matrix.isinf().any() for step in steps for matrix in step.matrices.values())
    counts = {"heads": steps[0].num_heads, "queries": steps[3].matrices["weighted"].shape[-3]}
    truncated = [f"{FEW} of {n} {name}" for name, n in counts.items() if n > MAX_SHOWN]
    colors = "blue: positive, orange: negative" + ", gray: masked" * is_masked
    return colors + (f"; showing the first {' and '.join(truncated)}" if truncated else "")


def draw_section(axes: "Axes", x: float, y: float, section: Section) -> None:
    axes.text(x, y, f"{section.step.number}  {section.step.title}", fontsize=14, fontweight="bold", va="top")
    axes.text(x, y + 0.32, typeset(section.step.formula), fontsize=11, color=BLUE, va="top")
    y += HEADING
    for line in section.lines:
        left = x
        for block in line:
            draw_block(axes, left, y, block)
            left += block.width + GAP
        y += max(block.height for block in line) + 0.16


def typeset(text: str) -> str:
    """W_Q and z_i with subscripts."""
    return re.sub(r"\b([A-Za-z]+)_([A-Za-z]+)\b", r"$\\mathrm{\1}_{\2}$", text)


def block_lines(step: Step) -> Iterator[list[Block]]:
    """Matrices side by side while they fit; with several heads, one line for each name, and in step 4 for each head."""
    panels = [panel for names in rows_of(step) for panel in shown_panels(step, names)]
    line: list[Block] = []
    previous: Panel | None = None
    for panel in panels:
        block = block_of(panel)
        is_new = previous is not None and starts_line(step, previous, panel)
        if line and (is_new or sum(other.width + GAP for other in line) + block.width > MAX_WIDTH):
            yield line
            line = []
        line.append(block)
        previous = panel
    yield line


def starts_line(step: Step, previous: Panel, panel: Panel) -> bool:
    if step.number == 4:
        return previous.head != panel.head
    return previous.name != panel.name and previous.head is not None


def shown_panels(step: Step, names: Sequence[str]) -> list[Panel]:
    """The panels of the first heads and queries."""
    num_queries = step.matrices["weighted"].shape[-3] if step.number == 4 else 0
    heads, queries = (MAX_SHOWN if n <= MAX_SHOWN else FEW for n in (step.num_heads, num_queries))
    panels = [panel for name in names for panel in step.panels(name)]
    return [panel for panel in panels if (panel.head or 1) <= heads and (panel.query or 1) <= queries]


def block_of(panel: Panel) -> Block:
    rows, columns = panel.matrix.shape
    values = panel.matrix[:MAX_SHOWN, :MAX_SHOWN]
    texts = [[sign(text) if text != "-" else "–" for text in row] for row in cells(values)]
    shape = f" [{rows},{columns}]" + ("…" if rows > MAX_SHOWN or columns > MAX_SHOWN else "")
    return Block(title_of(panel) + shape, texts, values, panel.name == "weights")


def draw_block(axes: "Axes", x: float, y: float, block: Block) -> None:
    """Cells of one size, colored by their values."""
    from matplotlib.patches import Rectangle

    axes.text(x, y + 0.24, typeset(block.title), fontsize=10.5, va="bottom")
    finite = block.values[block.values.isfinite()]
    largest = 1.0 if block.is_weights else max(float(finite.abs().max()), 1e-300) if finite.numel() else 1.0
    for i, row in enumerate(block.texts):
        for j, text in enumerate(row):
            value = float(block.values[i, j])
            hidden = math.isinf(value)
            relative = 0.0 if hidden else abs(value) / largest
            alpha = relative if block.is_weights else 0.4 * relative
            color = LIGHT_GRAY if hidden else BLUE if value >= 0 else VERMILION
            left, top = x + j * block.cell_width, y + (i + 1) * CELL_HEIGHT
            size = (block.cell_width, CELL_HEIGHT)
            fill = Rectangle((left, top), *size, facecolor=color, alpha=1.0 if hidden else alpha, linewidth=0)
            axes.add_patch(fill)
            axes.add_patch(Rectangle((left, top), *size, fill=False, edgecolor=LIGHT_GRAY, linewidth=0.8))
            is_dark = block.is_weights and alpha > 0.7
            middle = (left + size[0] / 2, top + size[1] / 2)
            axes.text(*middle, text, fontsize=10, ha="center", va="center", color="white" if is_dark else BLACK)
