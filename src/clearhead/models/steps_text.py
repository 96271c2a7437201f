"""The five steps as text for a terminal: formula, words, then the numbers, matrices side by side where they fit."""

import math
from collections.abc import Sequence
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
    heads = "one head" if steps[0].n_heads == 1 else f"{steps[0].n_heads} heads"
    heads += f" ({FEW} shown)" if steps[0].n_heads > MOST else ""
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
    per_head = [name for name in others if step.n_heads > 1 and step.number > 1 and step.matrices[name].dim() > 2]
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
    title = f"weighted [{shape}]: {'heads, ' * (step.n_heads > 1)}queries, tokens, width of v"
    cut = [f"the first {n_shown} of {n_queries} queries"] if n_shown < n_queries else []
    heads = step.n_heads if step.n_heads <= MOST else FEW
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
