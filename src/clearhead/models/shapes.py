"""Model summary: every tensor of a forward pass with its shape, parameters and multiply-adds.

The model is built on the meta device, where tensors have shapes but no values; an ordinary forward pass runs, and
models/recorder.py records its tensors. Shapes are given in two conventions:

    rows      tokens as rows, (B,L,E), as in PyTorch: y = x W
    columns   tokens as columns, (E,L), as in many textbooks: y = W x; for a single example

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

from clearhead.messages import html_table, printable, unknown_name
from clearhead.models.config import (
    AttentionConfig,
    LanguageConfig,
    ModelConfig,
    PredictorConfig,
    Seq2SeqConfig,
    VisionConfig,
    build_model,
)
from clearhead.models.presets import preset
from clearhead.models.recorder import TIED, Shape, TensorShape, record
from clearhead.nn.attention import MultiHeadAttention, SingleHeadAttention
from clearhead.validation import check_positive

Conventions = Literal["rows", "columns", "both"]
Config = ModelConfig | AttentionConfig

ATTENTION_LENGTH = 5
"""the default length for a single attention layer, which has no context length"""


@dataclass(frozen=True, kw_only=True, repr=False)
class Shapes:
    """The tensors of one forward pass, in order of execution. Index it by name: `shapes["norm"]`."""

    config: Config | str
    """the config of the model, or the class name of a user's module"""
    batch: int | None
    """the batch size; None if the sizes of the inputs were given"""
    tensors: tuple[TensorShape, ...]
    parameters: int
    """the number of parameters; tied weights are counted once"""
    multiply_adds: int
    """of matrix products and convolutions, for the whole batch; elementwise operations are not counted"""

    def __getitem__(self, name: str) -> TensorShape:
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise unknown_name("tensor", name, [tensor.name for tensor in self.tensors])

    def to_dict(self) -> dict[str, Any]:
        """Data for JSON."""
        if isinstance(self.config, str):
            return {"config": {"kind": self.config}, **self.totals()}
        config = {
            name: str(value) if isinstance(value, float) and value in (float("inf"), -float("inf")) else value
            for name, value in asdict(self.config).items()
        }
        return {"config": {"kind": type(self.config).__name__, **config}, **self.totals()}

    def totals(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "parameters": self.parameters,
            "multiply_adds": self.multiply_adds,
            "tensors": [asdict(tensor) for tensor in self.tensors],
        }

    def table(self, conventions: Conventions = "both", *, every_block: bool = False, width: int = 120) -> "Group":
        """A rich table. Consecutive equal blocks are folded into one line unless `every_block` is True."""
        return shapes_table(self, conventions, every_block=every_block, width=width)

    def __str__(self) -> str:
        return as_text(self.table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        header = ["Tensor", "Operation", "Shape", "Param #", "Mult-adds"]
        rows = [
            (line.label, line.operation, brackets(line.rows), count(line.parameters), count(line.multiply_adds))
            for line in block_lines(self.tensors, every_block=False)
        ]
        return html_table(header, rows, footer="\n".join(total_lines(self)), right={3, 4})


def shapes(
    config: Config | str, *, batch: int = 1, length: int | None = None, source_length: int | None = None
) -> Shapes:
    """The shapes of a model, given its config or the name of a preset, without allocating memory for its tensors.

    `length` is the sequence length, or the target length of an encoder-decoder (default: the context length).
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
        raise ValueError("the model is too large: tensor sizes must be below 2^61") from None
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
    """The arguments of the model's forward, in order, by the names that the table shows."""
    check_positive(batch=batch)
    if source_length is not None and not isinstance(config, Seq2SeqConfig):
        raise ValueError(f"source_length applies to encoder-decoders only, got a {type(config).__name__}; use length")
    match config:
        case VisionConfig():
            if length is not None:
                raise ValueError(
                    f"the length of a vision transformer follows from image_size and patch_size, got length={length}"
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
    raise TypeError(f"shapes needs a config or the name of a preset, got {type(config).__name__}")


def meta_ids(batch: int, length: int) -> Tensor:
    check_positive(length=length)
    return torch.empty(batch, length, dtype=torch.long, device="meta")


WIDE = 110
"""the width from which on the table has a column for operations"""

LEGEND = {
    "rows": "rows       tokens as rows, y = x W: [batch, tokens, width]",
    "columns": "columns    tokens as columns, y = W x: [width, tokens], for one example",
    "mult-adds": "mult-adds  of matrix products and convolutions; elementwise operations are not counted",
}

BLOCK = re.compile(r"(.+?\.\d+)\.([^.]+\..+)")
"""blocks.0 and attn.q_proj"""
NUMBERED = re.compile(r"(.+?\.\d+)\.")


@dataclass(frozen=True)
class Line:
    label: str
    operation: str = ""
    rows: Shape = ()
    columns: Shape = ()
    parameters: int = 0
    multiply_adds: int = 0
    style: str = ""


def shapes_table(shapes: "Shapes", conventions: "Conventions", *, every_block: bool, width: int) -> Group:
    shown = ["rows", "columns"] if conventions == "both" else [conventions]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("Tensor", overflow="fold")
    if width >= WIDE:
        table.add_column("Operation", overflow="fold")
    for name in shown:
        table.add_column("Shape" if len(shown) == 1 else f"Shape ({name})", no_wrap=True)
    table.add_column("Param #", justify="right", no_wrap=True)
    table.add_column("Mult-adds", justify="right", no_wrap=True)

    for line in block_lines(shapes.tensors, every_block):
        is_tied = line.operation.startswith(TIED)
        cells = [line.label, line.operation] if width >= WIDE else [line.label + f" ({line.operation})" * is_tied]
        cells += [brackets(getattr(line, name)) for name in shown]
        cells += ["tied" if is_tied else count(line.parameters), count(line.multiply_adds)]
        table.add_row(*(Text(printable(cell)) for cell in cells), style=line.style)
    legend = [Text(LEGEND[name], style="dim") for name in (*shown, "mult-adds")]
    return Group(table, Text(), *(Text(line, style="bold") for line in total_lines(shapes)), Text(), *legend)


def total_lines(shapes: "Shapes") -> list[str]:
    batch = "for these inputs" if shapes.batch is None else f"for batch size {shapes.batch}"
    return [f"Total params: {shapes.parameters:,}", f"Total mult-adds: {shapes.multiply_adds:,} {batch}"]


def block_lines(tensors: Sequence[TensorShape], every_block: bool) -> Iterator[Line]:
    """A line for each tensor, indented below the name of its block; equal blocks share one line."""
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
    """The block that a tensor belongs to. A single layer of an nn.Sequential is no block: it has no submodules."""
    match = NUMBERED.match(tensor.name)
    return match[1] if match and match[1] in names else ""


def tensor_line(tensor: TensorShape, block: str) -> Line:
    label = f" {tensor.name.removeprefix(block + '.')}" if block else tensor.name
    return Line(label, tensor.operation, tensor.rows, tensor.columns, tensor.parameters, tensor.multiply_adds)


def folded_line(blocks: Sequence[str], like: Sequence[Line]) -> Iterator[Line]:
    if blocks:
        last = "" if len(blocks) == 1 else f"-{blocks[-1].rpartition('.')[2]}"
        yield Line(
            f"{blocks[0]}{last}: same as above",
            parameters=len(blocks) * sum(line.parameters for line in like),
            multiply_adds=len(blocks) * sum(line.multiply_adds for line in like),
            style="bold",
        )


def brackets(shape: Shape) -> str:
    return f"[{','.join(map(str, shape))}]" if shape else ""


def count(n: int) -> str:
    """In full if that is readable, otherwise with four significant digits."""
    if n < 10_000_000:
        return f"{n:,}" if n else ""
    for unit, size in (("M", 10**6), ("G", 10**9), ("T", 10**12), ("P", 10**15)):
        if n < 1000 * size:
            return f"{n / size:.4g} {unit}"
    return f"{n:.3e}"


def as_text(table: Group, width: int = 120) -> str:
    """The table as plain text."""
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, highlight=False, force_jupyter=False).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())
