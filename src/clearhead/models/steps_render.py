"""The five steps as text for a terminal, as a LaTeX document, and as a figure."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import wrap
from typing import TYPE_CHECKING

from rich.text import Text
from torch import Tensor

from clearhead.drawing import BLACK, BLUE, GRAY, LIGHT_GRAY, VERMILION, new_figure
from clearhead.models.mask_view import sign
from clearhead.models.steps import Panel, Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_SHOWN, FEW = 6, 3
"""Up to MAX_SHOWN rows, columns, heads and queries are shown; of more heads or queries, the first FEW."""

TEXT_GAP = "    "
CELL_HEIGHT, CHARACTER, GAP, MARGIN, HEADING = 0.3, 0.085, 0.35, 0.3, 0.64
"""inches"""
MAX_WIDTH = 11.0
"""the width of a line of matrices in inches; further matrices go below"""


def steps_text(steps: Sequence[Step], width: int = 80) -> Text:
    """Each step with its formula, an explanation and its matrices, side by side where they fit."""
    inputs, z = steps[0].matrices, steps[-1].matrices["z"]
    tokens = f"{len(z)} queries, {len(inputs['k'])} keys"
    if "x" in inputs:
        tokens = f"{len(inputs['x'])} tokens of width {inputs['x'].shape[1]}"
    heads = "one head" if steps[0].num_heads == 1 else f"{steps[0].num_heads} heads"
    heads += f" ({FEW} shown)" if steps[0].num_heads > MAX_SHOWN else ""
    lines: list[tuple[str, str]] = [(f"Self-attention in five steps: {tokens}, {heads}", "bold"), ("", "")]
    for step in steps:
        lines += [(f"{step.number}  {step.title}", "bold")]
        lines += [(f"   {line}", "cyan") for line in wrap(step.formula, width - 3, break_on_hyphens=False)]
        lines += [(f"   {line}", "dim") for line in wrap(step.explanation, width - 3)]
        lines.append(("", ""))
        for group in groups(step):
            lines += [(f"   {line}".rstrip(), "") for line in side_by_side(group, width - 3)]
    text = Text(no_wrap=True, overflow="ignore")
    for line, style in lines[:-1]:
        text.append(line, style).append("\n")
    text.rstrip()
    return text


def groups(step: Step) -> list[list[list[str]]]:
    """The matrices of a step as text, in groups that are shown side by side."""
    if step.number == 4:
        return weighted_groups(step)
    panels = (shown_panels(step, names) for names in rows_of(step))
    return [[matrix_lines(panel.title, panel.matrix) for panel in group] for group in panels]


def rows_of(step: Step) -> list[list[str]]:
    """The names of the matrices of a step in rows: x, then its weights, then the results."""
    names = list(step.matrices)
    inputs = [name for name in names if name == "x"]
    weights = [name for name in names if name.startswith("w_") and step.number == 1]
    others = [name for name in names if name not in (*inputs, *weights)]
    per_head = [name for name in others if step.num_heads > 1 and step.number > 1 and step.matrices[name].dim() > 2]
    rows = [inputs, weights, *([name] for name in per_head), [name for name in others if name not in per_head]]
    return [row for row in rows if row]


def shown_panels(step: Step, names: Sequence[str]) -> list[Panel]:
    """The panels of the first heads and queries."""
    num_queries = step.matrices["weighted"].shape[-3] if step.number == 4 else 0
    heads, queries = (MAX_SHOWN if n <= MAX_SHOWN else FEW for n in (step.num_heads, num_queries))
    panels = [panel for name in names for panel in step.panels(name)]
    return [panel for panel in panels if (panel.head or 1) <= heads and (panel.query or 1) <= queries]


def weighted_groups(step: Step) -> list[list[list[str]]]:
    """One matrix per query, and one row of matrices per head."""
    weighted = step.matrices["weighted"]
    num_queries = weighted.shape[-3]
    num_shown = num_queries if num_queries <= MAX_SHOWN else FEW
    shape = ",".join(map(str, weighted.shape))
    title = f"weighted [{shape}]: {'heads, ' * (step.num_heads > 1)}queries, keys, width of v"
    truncated = [f"the first {num_shown} of {num_queries} queries"] if num_shown < num_queries else []
    by_head = groupby(shown_panels(step, ["weighted"]), lambda panel: panel.head)
    return [
        [[title, *truncated]],
        *([matrix_lines(panel.title, panel.matrix) for panel in group] for _, group in by_head),
    ]


def matrix_lines(title: str, matrix: Tensor) -> list[str]:
    """The title with the shape, then the rows with aligned numbers."""
    title = f"{title} [{','.join(map(str, matrix.shape))}]"
    rows = cells(matrix[:MAX_SHOWN, :MAX_SHOWN])
    size = max(len(cell) for row in rows for cell in row)
    more = "  ..." if matrix.shape[1] > MAX_SHOWN else ""
    lines = ["  ".join(cell.rjust(size) for cell in row) + more for row in rows]
    return [title, *lines, *(["..."] if matrix.shape[0] > MAX_SHOWN else [])]


def cells(matrix: Tensor) -> list[list[str]]:
    """The values as text in one format; a masked score is a dash."""
    numbers = matrix.tolist()
    spec = number_format([n for row in numbers for n in row])
    return [["-" if n == -math.inf else format(n, spec) for n in row] for row in numbers]


def number_format(numbers: Sequence[float]) -> str:
    """The format of a matrix: integers, three decimals, or scientific notation for very small or large values."""
    finite = [n for n in numbers if math.isfinite(n)]
    largest = max(map(abs, finite), default=0.0)
    if largest and not 0.01 <= largest < 1e5:
        return ".2e"
    return "z.0f" if all(n.is_integer() for n in finite) else "z.3f"  # z: no negative zero


def side_by_side(blocks: Sequence[list[str]], width: int) -> list[str]:
    """Blocks of lines next to each other while they fit, then below; an empty line follows each row of blocks."""
    lines: list[str] = []
    while blocks:
        fits = 1
        while fits < len(blocks) and len(TEXT_GAP.join(widest(p) for p in blocks[: fits + 1])) <= width:
            fits += 1
        row, blocks = blocks[:fits], blocks[fits:]
        for i in range(max(map(len, row))):
            cells = [(p[i] if i < len(p) else "").ljust(len(widest(p))) for p in row]
            lines.append(TEXT_GAP.join(cells))
        lines.append("")
    return lines


def widest(block: Sequence[str]) -> str:
    return max(block, key=len)


MAX_LATEX = 10
"""rows and columns of a matrix in LaTeX; the others are replaced by dots"""
MAX_COLUMNS = 15
"""columns of all matrices in one line"""

SYMBOLS = {
    "w_q": "W_Q",
    "w_k": "W_K",
    "w_v": "W_V",
    "w_o": "W_O",
    "scores": r"\mathrm{scores}",
    "scaled": r"\beta\,\mathrm{scores}",
    "weights": r"\mathrm{weights}",
    "weighted": r"\mathrm{weighted}",
    "z_per_head": "z",
    "output": r"\mathrm{output}",
}

PREAMBLE = r"""\documentclass{article}
\usepackage[margin=2cm]{geometry}
\usepackage{amsmath}
\setcounter{MaxMatrixCols}{%d}
\begin{document}
"""


def steps_latex(steps: Sequence[Step]) -> str:
    """A LaTeX document with the formulas and matrices of all steps; it needs only amsmath."""
    parts = [PREAMBLE % (MAX_LATEX + 1), r"\section*{Self-attention in five steps}"]
    for step in steps:
        parts += ["", rf"\subsection*{{{step.number}\quad {step.title}}}", display(latex_formula(step))]
        parts.append(escape(step.explanation))
        for line in latex_lines(step):
            parts.append(display(r" \qquad ".join(equation(panel) for panel in line)))
    return "\n".join([*parts, "", r"\end{document}", ""])


def latex_formula(step: Step) -> str:
    """The formula of a step, with an index h if there are several heads."""
    h = "^{(h)}" if step.num_heads > 1 else ""
    match step.number:
        case 1 if "x" in step.matrices:
            return r"q = x W_Q, \quad k = x W_K, \quad v = x W_V"
        case 1:
            return r"q, \ k, \ v \ \text{given}"
        case 2:
            return rf"\mathrm{{scores}}{h} = q{h} (k{h})^\top" if h else r"\mathrm{scores} = q k^\top"
        case 3:
            return rf"\mathrm{{weights}}{h} = \operatorname{{softargmax}}(\beta\,\mathrm{{scores}}{h})"
        case 4:
            return rf"\mathrm{{weighted}}_{{ij}}{h} = \mathrm{{weights}}_{{ij}}{h} \, v_j{h}"
    formula = rf"z_i{h} = \sum_j \mathrm{{weighted}}_{{ij}}{h}"
    if h:
        dots = r"\ \cdots \ " if step.num_heads > 2 else r"\ \ "
        formula += rf", \quad z = [\, z^{{(1)}} {dots} z^{{({step.num_heads})}} \,]"
    return formula + (r", \quad \mathrm{output} = z W_O" if "w_o" in step.matrices else "")


def latex_lines(step: Step) -> Iterator[list[Panel]]:
    """Matrices side by side while they fit on a page; a new line for each group and, in step 4, for each head."""
    for names in rows_of(step):
        line: list[Panel] = []
        for panel in (panel for name in names for panel in step.panels(name)):
            columns = sum(min(other.matrix.shape[1], MAX_LATEX) + 1 for other in [*line, panel])
            if line and (columns > MAX_COLUMNS or (panel.query and panel.head != line[0].head)):
                yield line
                line = []
            line.append(panel)
        yield line


def equation(panel: Panel) -> str:
    rows, columns = panel.matrix.shape
    head = f"^{{({panel.head})}}" if panel.head else ""
    query = f"_{{{panel.query}}}" if panel.query else ""
    symbol = SYMBOLS.get(panel.name, panel.name)
    symbol = f"{{{symbol}}}" if head or query else symbol
    return rf"\underset{{{rows} \times {columns}}}{{{symbol}{query}{head}}} = {bmatrix(panel.matrix)}"


def bmatrix(matrix: Tensor) -> str:
    rows, columns = matrix.shape
    rows_of_cells = [[latex_number(cell) for cell in row] for row in cells(matrix[:MAX_LATEX, :MAX_LATEX])]
    if columns > MAX_LATEX:
        rows_of_cells = [[*row, r"\cdots"] for row in rows_of_cells]
    if rows > MAX_LATEX:
        rows_of_cells.append([r"\vdots"] * min(columns, MAX_LATEX) + [r"\ddots"] * (columns > MAX_LATEX))
    body = r" \\ ".join(" & ".join(row) for row in rows_of_cells)
    return rf"\begin{{bmatrix}} {body} \end{{bmatrix}}"


def latex_number(cell: str) -> str:
    """1.50e+06 becomes 1.50 \\cdot 10^{6}, and a masked score -\\infty."""
    if cell == "-":
        return r"-\infty"
    mantissa, e, power = cell.partition("e")
    return rf"{mantissa} \cdot 10^{{{int(power)}}}" if e else cell


def display(formula: str) -> str:
    return f"\\[\n{formula}\n\\]"


def escape(text: str) -> str:
    for character in "%&_#$":
        text = text.replace(character, rf"\{character}")
    return text.replace("A dash marks", r"$-\infty$ marks")


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


def block_of(panel: Panel) -> Block:
    rows, columns = panel.matrix.shape
    values = panel.matrix[:MAX_SHOWN, :MAX_SHOWN]
    texts = [[sign(text) if text != "-" else "–" for text in row] for row in cells(values)]
    shape = f" [{rows},{columns}]" + ("…" if rows > MAX_SHOWN or columns > MAX_SHOWN else "")
    return Block(panel.title + shape, texts, values, panel.name == "weights")


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
