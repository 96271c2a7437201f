"""The five steps as text for a terminal, and as a LaTeX document."""

import math
from collections.abc import Iterator, Sequence
from textwrap import wrap

from rich.text import Text
from torch import Tensor

from clearhead.models.steps import Panel, Step

MAX_SHOWN, FEW = 6, 3
"""Up to MAX_SHOWN rows, columns, heads and queries are shown; of more heads or queries, the first FEW."""

NAMES = {"w_q": "W_Q", "w_k": "W_K", "w_v": "W_V", "w_o": "W_O", "z_per_head": "z"}
GAP = "    "


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
    panels = [[panel for name in names for panel in shown_heads(step, name)] for names in rows_of(step)]
    return [[matrix_lines(title_of(panel), panel.matrix) for panel in group] for group in panels]


def rows_of(step: Step) -> list[list[str]]:
    """The names of the matrices of a step in rows: x, then its weights, then the results."""
    names = list(step.matrices)
    inputs = [name for name in names if name == "x"]
    weights = [name for name in names if name.startswith("w_") and step.number == 1]
    others = [name for name in names if name not in (*inputs, *weights)]
    per_head = [name for name in others if step.num_heads > 1 and step.number > 1 and step.matrices[name].dim() > 2]
    rows = [inputs, weights, *([name] for name in per_head), [name for name in others if name not in per_head]]
    return [row for row in rows if row]


def shown_heads(step: Step, name: str) -> list[Panel]:
    panels = list(step.panels(name))
    return panels if len(panels) <= MAX_SHOWN else panels[:FEW]


def weighted_groups(step: Step) -> list[list[list[str]]]:
    """One matrix per query, and one row of matrices per head."""
    weighted = step.matrices["weighted"]
    num_queries = weighted.shape[-3]
    num_shown = num_queries if num_queries <= MAX_SHOWN else FEW
    shape = ",".join(map(str, weighted.shape))
    title = f"weighted [{shape}]: {'heads, ' * (step.num_heads > 1)}queries, keys, width of v"
    truncated = [f"the first {num_shown} of {num_queries} queries"] if num_shown < num_queries else []
    heads = step.num_heads if step.num_heads <= MAX_SHOWN else FEW
    panels = [panel for panel in step.panels("weighted") if panel.query is not None and panel.query <= num_shown]
    by_head = [[panel for panel in panels if (panel.head or 1) == head] for head in range(1, heads + 1)]
    return [
        [[title, *truncated]],
        *([matrix_lines(title_of(panel), panel.matrix) for panel in group] for group in by_head),
    ]


def title_of(panel: Panel) -> str:
    """For example "scores", "scores, head 2", "query 1" or "head 2, query 1"."""
    name = [] if panel.query else [NAMES.get(panel.name, panel.name)]
    head = [f"head {panel.head}"] if panel.head else []
    query = [f"query {panel.query}"] if panel.query else []
    return ", ".join([*name, *head, *query])


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
        while fits < len(blocks) and len(GAP.join(widest(p) for p in blocks[: fits + 1])) <= width:
            fits += 1
        row, blocks = blocks[:fits], blocks[fits:]
        for i in range(max(map(len, row))):
            cells = [(p[i] if i < len(p) else "").ljust(len(widest(p))) for p in row]
            lines.append(GAP.join(cells))
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
    for sign in "%&_#$":
        text = text.replace(sign, rf"\{sign}")
    return text.replace("A dash marks", r"$-\infty$ marks")
