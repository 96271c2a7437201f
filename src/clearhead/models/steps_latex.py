"""The five steps as a LaTeX document: every matrix as a bmatrix with its numbers, the formulas before them.

Needs amsmath only. What stands between \\begin{document} and \\end{document} can be pasted into another document.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from clearhead.models.steps import Panel, Step
from clearhead.models.steps_text import cells, rows_of

MOST = 10
"""rows and columns of a matrix that fit on a page; the others are dots"""
MOST_COLUMNS = 15
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
    """A document that any LaTeX compiles."""
    parts = [PREAMBLE % (MOST + 1), r"\section*{Self-attention in five steps}"]
    for step in steps:
        parts += ["", rf"\subsection*{{{step.number}\quad {step.title}}}", display(formula_of(step))]
        parts.append(escaped(step.words))
        for line in lines_of(step):
            parts.append(display(r" \qquad ".join(equation(panel) for panel in line)))
    return "\n".join([*parts, "", r"\end{document}", ""])


def formula_of(step: Step) -> str:
    """The formula of a step, for each head h where there are several."""
    h = "^{(h)}" if step.n_heads > 1 else ""
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
        dots = r"\ \cdots \ " if step.n_heads > 2 else r"\ \ "
        formula += rf", \quad z = [\, z^{{(1)}} {dots} z^{{({step.n_heads})}} \,]"
    return formula + (r", \quad \mathrm{output} = z W_O" if "w_o" in step.matrices else "")


def lines_of(step: Step) -> Iterator[list[Panel]]:
    """Matrices side by side while they fit on the page; a new line for each group, and in step 4 for each head."""
    for names in rows_of(step):
        line: list[Panel] = []
        for panel in (panel for name in names for panel in step.panels(name)):
            columns = sum(min(one.matrix.shape[1], MOST) + 1 for one in [*line, panel])
            if line and (columns > MOST_COLUMNS or (panel.query and panel.head != line[0].head)):
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
    written = [[number(cell) for cell in row] for row in cells(matrix[:MOST, :MOST])]
    if columns > MOST:
        written = [[*row, r"\cdots"] for row in written]
    if rows > MOST:
        written.append([r"\vdots"] * min(columns, MOST) + [r"\ddots"] * (columns > MOST))
    body = r" \\ ".join(" & ".join(row) for row in written)
    return rf"\begin{{bmatrix}} {body} \end{{bmatrix}}"


def number(cell: str) -> str:
    """1.50e+06 is 1.50 \\cdot 10^{6}; a score that is hidden is minus infinity."""
    if cell == "-":
        return r"-\infty"
    mantissa, e, power = cell.partition("e")
    return rf"{mantissa} \cdot 10^{{{int(power)}}}" if e else cell


def display(formula: str) -> str:
    return f"\\[\n{formula}\n\\]"


def escaped(words: str) -> str:
    for sign in "%&_#$":
        words = words.replace(sign, rf"\{sign}")
    return words.replace("A dash:", r"$-\infty$:")
