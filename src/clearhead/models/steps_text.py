"""The five steps as text for a terminal: formula, words, then the numbers, matrices side by side where they fit."""

import math
from collections.abc import Sequence
from textwrap import wrap

from rich.text import Text
from torch import Tensor

from clearhead.models.steps import Step

MOST, FEW = 6, 3
"""rows and columns of a matrix, and matrices of step 4, beyond which more does not help to follow it; JSON has all"""

NAMES = {"w_q": "W_Q", "w_k": "W_K", "w_v": "W_V"}
GAP = "    "


def steps_text(steps: Sequence[Step], width: int = 80) -> Text:
    given, z = steps[0].matrices, steps[-1].matrices["z"]
    tokens = f"{len(z)} queries, {len(given['k'])} keys"
    if "x" in given:
        tokens = f"{len(given['x'])} tokens of width {given['x'].shape[1]}"
    lines: list[tuple[str, str]] = [(f"Self-attention in five steps: {tokens}, one head", "bold"), ("", "")]
    for step in steps:
        lines += [(f"{step.number}  {step.title}", "bold"), (f"   {step.formula}", "cyan")]
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
        weighted = step.matrices["weighted"]
        n_shown = len(weighted) if len(weighted) <= MOST else FEW
        shape = ",".join(map(str, weighted.shape))
        title = f"weighted [{shape}]: queries, tokens, width of v"
        title += f"; the first {n_shown} queries" if n_shown < len(weighted) else ""
        return [[[title]], [picture(f"query {i + 1}", weighted[i]) for i in range(n_shown)]]
    weights = [picture(NAMES[name], m) for name, m in step.matrices.items() if name in NAMES]
    inputs = [picture(name, m) for name, m in step.matrices.items() if name == "x"]
    others = [picture(name, m) for name, m in step.matrices.items() if name not in NAMES and name != "x"]
    return [group for group in (inputs, weights, others) if group]


def picture(name: str, matrix: Tensor) -> list[str]:
    """Name and shape, then its rows with aligned numbers."""
    title = f"{name} [{','.join(map(str, matrix.shape))}]"
    numbers = matrix[:MOST, :MOST].tolist()
    how = number_format([n for row in numbers for n in row])
    rows = [["-" if n == -math.inf else format(n, how) for n in row] for row in numbers]
    size = max(len(cell) for row in rows for cell in row)
    more = "  ..." if matrix.shape[1] > MOST else ""
    lines = ["  ".join(cell.rjust(size) for cell in row) + more for row in rows]
    return [title, *lines, *(["..."] if matrix.shape[0] > MOST else [])]


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
