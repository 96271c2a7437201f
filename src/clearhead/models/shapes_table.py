"""The shapes of a model as a table for people: a section for each block, equal blocks folded, totals below."""

import io
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from clearhead.messages import printable
from clearhead.models.recorder import TIED, Shape, TensorShape

if TYPE_CHECKING:
    from clearhead.models.shapes import Conventions, Shapes

WIDE = 110
"""from this width on there is room for words beside each name"""

LEGEND = {
    "rows": "rows           a token is a row, y = x W: [batch, tokens, width]",
    "columns": "columns        a token is a column, y = W x: [width, tokens] of one example",
    "multiply-adds": "multiply-adds  matrix products and convolutions; elementwise work is not counted",
}

BLOCK = re.compile(r"(.+?\.\d+)\.([^.]+\..+)")
"""encoder.blocks.0 and attention.query"""
NUMBERED = re.compile(r"(.+?\.\d+)\.")


@dataclass(frozen=True)
class Line:
    label: str
    what: str = ""
    rows: Shape = ()
    columns: Shape = ()
    parameters: int = 0
    multiply_adds: int = 0
    style: str = ""


def shapes_table(shapes: "Shapes", conventions: "Conventions", *, every_block: bool, width: int) -> Group:
    shown = ["rows", "columns"] if conventions == "both" else [conventions]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("tensor", overflow="fold")
    if width >= WIDE:
        table.add_column("what", overflow="fold")
    for name in shown:
        table.add_column(name, no_wrap=True)
    table.add_column("params", justify="right", no_wrap=True)
    table.add_column("multiply-\nadds", justify="right", no_wrap=True)

    for line in block_lines(shapes.tensors, every_block):
        cells = [line.label]
        cells += [line.what] if width >= WIDE else []
        cells += [brackets(getattr(line, name)) for name in shown]
        cells += ["tied" if line.what.startswith(TIED) else count(line.parameters), count(line.multiply_adds)]
        table.add_row(*(Text(printable(cell)) for cell in cells), style=line.style)
    of = "these inputs" if shapes.batch is None else f"a batch of {shapes.batch}"
    total = f"{shapes.parameters:,} parameters; {shapes.multiply_adds:,} multiply-adds for {of}"
    legend = [LEGEND[name] for name in (*shown, "multiply-adds")]
    return Group(table, Text(), Text(total, style="bold"), Text(), *(Text(line, style="dim") for line in legend))


def block_lines(tensors: Sequence[TensorShape], every_block: bool) -> Iterator[Line]:
    """A line for each tensor, indented below the name of its block; blocks that equal the one before in one line."""
    shown: list[Line] = []
    folded: list[str] = []
    names = {match[1] for tensor in tensors if (match := BLOCK.fullmatch(tensor.name))}
    for block, group in groupby(tensors, lambda tensor: block_of(tensor, names)):
        lines = [tensor_line(tensor, block) for tensor in group]
        if block and lines == shown and not every_block:
            folded.append(block)
            continue
        yield from folded_line(folded, shown)
        folded = []
        if block:
            yield Line(block, style="bold")
        yield from lines
        shown = lines
    yield from folded_line(folded, shown)


def block_of(tensor: TensorShape, names: Collection[str]) -> str:
    """The block that a tensor belongs to. A block has parts with tensors of their own; a layer of a Sequential has not,
    and is none."""
    match = NUMBERED.match(tensor.name)
    return match[1] if match and match[1] in names else ""


def tensor_line(tensor: TensorShape, block: str) -> Line:
    label = f" {tensor.name.removeprefix(block + '.')}" if block else tensor.name
    return Line(label, tensor.what, tensor.rows, tensor.columns, tensor.parameters, tensor.multiply_adds)


def folded_line(blocks: Sequence[str], like: Sequence[Line]) -> Iterator[Line]:
    if blocks:
        last = "" if len(blocks) == 1 else f"-{blocks[-1].rpartition('.')[2]}"
        yield Line(
            f"{blocks[0]}{last}: the same",
            parameters=len(blocks) * sum(line.parameters for line in like),
            multiply_adds=len(blocks) * sum(line.multiply_adds for line in like),
            style="bold",
        )


def brackets(shape: Shape) -> str:
    return f"[{','.join(map(str, shape))}]" if shape else ""


def count(n: int) -> str:
    """In full while that is readable, then to four figures."""
    if n < 10_000_000:
        return f"{n:,}" if n else ""
    for unit, size in (("M", 10**6), ("G", 10**9), ("T", 10**12), ("P", 10**15)):
        if n < 1000 * size:
            return f"{n / size:.4g} {unit}"
    return f"{n:.3e}"


def as_text(table: Group, width: int = 120) -> str:
    """Without colours."""
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())
