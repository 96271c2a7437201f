"""The five steps as text for a terminal: formula, words, then the numbers, matrices side by side where they fit."""

import math
from collections.abc import Iterator, Sequence
from textwrap import wrap

from rich.text import Text
from torch import Tensor

from clearhead.models.steps import Panel, Step

MOST, FEW = 6, 3
"""rows and columns of a matrix, and matrices of step 4, beyond which more does not help to follow it; JSON has all"""

NAMES = {"w_q": "W_Q", "w_k": "W_K", "w_v": "W_V", "w_o": "W_O", "z_per_head": "z"}
GAP = "    "


def steps_text(steps: Sequence[Step], width: int = 80) -> Text:
    given, z = steps[0].matrices, steps[-1].matrices["z"]
    tokens = f"{len(z)} queries, {len(given['k'])} keys"
    if "x" in given:
        tokens = f"{len(given['x'])} tokens of width {given['x'].shape[1]}"
    heads = "one head" if steps[0].num_heads == 1 else f"{steps[0].num_heads} heads"
    heads += f" ({FEW} shown)" if steps[0].num_heads > MOST else ""
    lines: list[tuple[str, str]] = [(f"Self-attention in five steps: {tokens}, {heads}", "bold"), ("", "")]
    for step in steps:
        lines += [(f"{step.number}  {step.title}", "bold")]
        lines += [(f"   {line}", "cyan") for line in wrap(step.formula, width - 3, break_on_hyphens=False)]
        lines += [(f"   {line}", "dim") for line in wrap(step.words, width - 3)]
        lines.append(("", ""))
        for group in groups(step):
            lines += [(f"   {line}".rstrip(), "") for line in beside(group, width - 3)]
    text = Text(no_wrap=True, overflow="ignore")
    for line, style in lines[:-1]:
        text.append(line, style).append("\n")
    text.rstrip()
    return text


def groups(step: Step) -> list[list[list[str]]]:
    """The pictures of a step's matrices, in groups that belong side by side."""
    if step.number == 4:
        return weighted_groups(step)
    shown = [[panel for name in names for panel in shown_heads(step, name)] for names in rows_of(step)]
    return [[picture(title_of(panel), panel.matrix) for panel in group] for group in shown]


def rows_of(step: Step) -> list[list[str]]:
    """Names of matrices, a list for each row of them: x, then its weights, then what is made of them."""
    names = list(step.matrices)
    inputs = [name for name in names if name == "x"]
    weights = [name for name in names if name.startswith("w_") and step.number == 1]
    others = [name for name in names if name not in (*inputs, *weights)]
    per_head = [name for name in others if step.num_heads > 1 and step.number > 1 and step.matrices[name].dim() > 2]
    rows = [inputs, weights, *([name] for name in per_head), [name for name in others if name not in per_head]]
    return [row for row in rows if row]


def shown_heads(step: Step, name: str) -> list[Panel]:
    panels = list(step.panels(name))
    return panels if len(panels) <= MOST else panels[:FEW]


def weighted_groups(step: Step) -> list[list[list[str]]]:
    """A matrix for each query: a row of them for each head."""
    weighted = step.matrices["weighted"]
    n_queries = weighted.shape[-3]
    n_shown = n_queries if n_queries <= MOST else FEW
    shape = ",".join(map(str, weighted.shape))
    title = f"weighted [{shape}]: {'heads, ' * (step.num_heads > 1)}queries, tokens, width of v"
    cut = [f"the first {n_shown} of {n_queries} queries"] if n_shown < n_queries else []
    heads = step.num_heads if step.num_heads <= MOST else FEW
    panels = [panel for panel in step.panels("weighted") if panel.query is not None and panel.query <= n_shown]
    by_head = [[panel for panel in panels if (panel.head or 1) == head] for head in range(1, heads + 1)]
    return [[[title, *cut]], *([picture(title_of(panel), panel.matrix) for panel in group] for group in by_head)]


def title_of(panel: Panel) -> str:
    """scores; scores, head 2; query 1; head 2, query 1"""
    name = [] if panel.query else [NAMES.get(panel.name, panel.name)]
    head = [f"head {panel.head}"] if panel.head else []
    query = [f"query {panel.query}"] if panel.query else []
    return ", ".join([*name, *head, *query])


def picture(title: str, matrix: Tensor) -> list[str]:
    """Title and shape, then its rows with aligned numbers."""
    title = f"{title} [{','.join(map(str, matrix.shape))}]"
    rows = cells(matrix[:MOST, :MOST])
    size = max(len(cell) for row in rows for cell in row)
    more = "  ..." if matrix.shape[1] > MOST else ""
    lines = ["  ".join(cell.rjust(size) for cell in row) + more for row in rows]
    return [title, *lines, *(["..."] if matrix.shape[0] > MOST else [])]


def cells(matrix: Tensor) -> list[list[str]]:
    """Its numbers as text, all in the same way; what a mask hides is a dash."""
    numbers = matrix.tolist()
    how = number_format([n for row in numbers for n in row])
    return [["-" if n == -math.inf else format(n, how) for n in row] for row in numbers]


def number_format(numbers: Sequence[float]) -> str:
    """One for a whole matrix: whole numbers as they are, others to three places, powers of ten where these fail."""
    finite = [n for n in numbers if math.isfinite(n)]
    largest = max(map(abs, finite), default=0.0)
    if largest and not 0.01 <= largest < 1e5:
        return ".2e"
    return "z.0f" if all(n.is_integer() for n in finite) else "z.3f"  # z: no minus before zero


def beside(pictures: Sequence[list[str]], width: int) -> list[str]:
    """Pictures next to each other while they fit, then below; an empty line after each row of them."""
    lines: list[str] = []
    while pictures:
        fits = 1
        while fits < len(pictures) and len(GAP.join(widest(p) for p in pictures[: fits + 1])) <= width:
            fits += 1
        now, pictures = pictures[:fits], pictures[fits:]
        for i in range(max(map(len, now))):
            cells = [(p[i] if i < len(p) else "").ljust(len(widest(p))) for p in now]
            lines.append(GAP.join(cells))
        lines.append("")
    return lines


def widest(picture: Sequence[str]) -> str:
    return max(picture, key=len)


# The five steps as a LaTeX document: every matrix as a bmatrix with its numbers, the formulas before them.
#
# Needs amsmath only. What stands between \begin{document} and \end{document} can be pasted into another document.


MOST_LATEX = 10
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
    parts = [PREAMBLE % (MOST_LATEX + 1), r"\section*{Self-attention in five steps}"]
    for step in steps:
        parts += ["", rf"\subsection*{{{step.number}\quad {step.title}}}", display(formula_of(step))]
        parts.append(escaped(step.words))
        for line in lines_of(step):
            parts.append(display(r" \qquad ".join(equation(panel) for panel in line)))
    return "\n".join([*parts, "", r"\end{document}", ""])


def formula_of(step: Step) -> str:
    """The formula of a step, for each head h where there are several."""
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


def lines_of(step: Step) -> Iterator[list[Panel]]:
    """Matrices side by side while they fit on the page; a new line for each group, and in step 4 for each head."""
    for names in rows_of(step):
        line: list[Panel] = []
        for panel in (panel for name in names for panel in step.panels(name)):
            columns = sum(min(one.matrix.shape[1], MOST_LATEX) + 1 for one in [*line, panel])
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
    written = [[number(cell) for cell in row] for row in cells(matrix[:MOST_LATEX, :MOST_LATEX])]
    if columns > MOST_LATEX:
        written = [[*row, r"\cdots"] for row in written]
    if rows > MOST_LATEX:
        written.append([r"\vdots"] * min(columns, MOST_LATEX) + [r"\ddots"] * (columns > MOST_LATEX))
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
