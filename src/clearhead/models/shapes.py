"""Every tensor of a model: its shape in two conventions, its parameters, its multiply-adds.

Nothing is calculated by hand: the model is built on the meta device, where tensors have shapes but no numbers, an
ordinary forward pass runs, and models/recorder.py writes down what goes by.

    rows      a token is a row: (B,L,E), as PyTorch has it and as y = x W
    columns   a token is a column: (E,L), as textbooks have it, y = W x; for one example

Dims: B batch, L length, E model width.
"""

import io
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from clearhead.messages import printable, unknown_name
from clearhead.models.config import (
    AttentionConfig,
    LanguageConfig,
    ModelConfig,
    PredictorConfig,
    Seq2SeqConfig,
    VisionConfig,
)
from clearhead.models.factory import build_model
from clearhead.models.presets import preset
from clearhead.models.recorder import TIED, Shape, TensorShape, record
from clearhead.nn.attention import MultiHeadAttention, SingleHeadAttention
from clearhead.validation import check_positive

Conventions = Literal["rows", "columns", "both"]
Config = ModelConfig | AttentionConfig

ATTENTION_LENGTH = 5
"""tokens of an attention layer on its own, which has no context to take a length from"""


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """What one forward pass of a config went through, in order. `shapes["norm"]` is one of its tensors."""

    config: Config | str
    """what was built, or the name of the class of anybody's module"""
    batch: int | None
    """examples; None where inputs of any size were given"""
    tensors: tuple[TensorShape, ...]
    parameters: int
    """numbers that are learned; a table that serves twice counts once"""
    multiply_adds: int
    """of the whole batch: matrix products and convolutions; what works number by number is not counted"""

    def __getitem__(self, name: str) -> TensorShape:
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise unknown_name("tensor", name, [tensor.name for tensor in self.tensors])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        if isinstance(self.config, str):
            return {"config": {"kind": self.config}, **self.numbers()}
        config = {
            name: str(value) if isinstance(value, float) and value in (float("inf"), -float("inf")) else value
            for name, value in asdict(self.config).items()
        }
        return {"config": {"kind": type(self.config).__name__, **config}, **self.numbers()}

    def numbers(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "parameters": self.parameters,
            "multiply_adds": self.multiply_adds,
            "tensors": [asdict(tensor) for tensor in self.tensors],
        }

    def table(self, conventions: Conventions = "both", *, every_block: bool = False, width: int = 120) -> "Group":
        """For rich.print. Blocks that equal the one before are folded into a line unless every_block."""

        return shapes_table(self, conventions, every_block=every_block, width=width)

    def __str__(self) -> str:

        return as_text(self.table())


def shapes(
    config: Config | str, *, batch: int = 1, length: int | None = None, source_length: int | None = None
) -> Shapes:
    """The shapes of a config, or of the preset of that name. Equal to those of any real pass; needs no memory.

    `length` is the sequence's (the target's, where there is a source too), unless given the model's context.
    """
    if isinstance(config, str):
        config = preset(config)
    try:
        inputs = meta_inputs(config, batch, length, source_length)
        with torch.device("meta"):
            model = build(config).eval()
        tensors = record(model, inputs)
    except (RuntimeError, TypeError) as error:
        if "overflow" not in str(error).lower():
            raise
        raise ValueError("sizes must multiply to numbers below 2^61, got larger ones; choose smaller sizes") from None
    return Shapes(
        config=config,
        batch=batch,
        tensors=tuple(tensors),
        parameters=sum(p.numel() for p in model.parameters()),
        multiply_adds=sum(tensor.multiply_adds for tensor in tensors),
    )


def build(config: Config) -> nn.Module:
    if not isinstance(config, AttentionConfig):
        return build_model(config)
    if config.is_single:
        return SingleHeadAttention(config.width, config.query_key_width, config.values_width)
    return MultiHeadAttention(config.width, config.num_heads)


def meta_inputs(config: Config, batch: int, length: int | None, source_length: int | None) -> dict[str, Tensor]:
    """What the model's forward takes, in its order, by the names that the table shows."""
    check_positive(batch=batch)
    if source_length is not None and not isinstance(config, Seq2SeqConfig):
        raise ValueError(f"source_length is for an encoder-decoder, got it for a {type(config).__name__}; use length")
    match config:
        case VisionConfig():
            if length is not None:
                raise ValueError(
                    f"the length of a vision transformer follows from its image, got length={length}; "
                    "change image_size or patch_size instead"
                )
            return {"images": torch.empty(batch, config.in_channels, *config.image_shape, device="meta")}
        case Seq2SeqConfig():
            length = config.context_length if length is None else length
            source_length = length if source_length is None else source_length
            return {"source": meta_ids(batch, source_length), "target": meta_ids(batch, length)}
        case PredictorConfig() | LanguageConfig():
            return {"ids": meta_ids(batch, config.context_length if length is None else length)}
        case AttentionConfig():
            length = ATTENTION_LENGTH if length is None else length
            check_positive(length=length)
            return {"tokens": torch.empty(batch, length, config.width, device="meta")}
    raise TypeError(f"shapes takes a config or the name of a preset, got {type(config)}")


def meta_ids(batch: int, length: int) -> Tensor:
    check_positive(length=length)
    return torch.empty(batch, length, dtype=torch.long, device="meta")


# The shapes of a model as a table for people: a section for each block, equal blocks folded, totals below.


WIDE = 110
"""from this width on there is room for words beside each name"""

LEGEND = {
    "rows": "rows           a token is a row, y = x W: [batch, tokens, width]",
    "columns": "columns        a token is a column, y = W x: [width, tokens] of one example",
    "multiply-adds": "multiply-adds  matrix products and convolutions; elementwise work is not counted",
}

BLOCK = re.compile(r"(.+?\.\d+)\.([^.]+\..+)")
"""blocks.0 and attn.q_proj"""
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
    return Line(label, tensor.operation, tensor.rows, tensor.columns, tensor.parameters, tensor.multiply_adds)


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
