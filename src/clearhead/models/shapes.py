"""Every tensor of a model: its shape in two conventions, its parameters, its multiply-adds.

Nothing is calculated by hand: the model is built on the meta device, where tensors have shapes but no numbers, an
ordinary forward pass runs, and models/recorder.py writes down what goes by.

    rows      a token is a row: (B,L,E), as PyTorch has it and as y = x W
    columns   a token is a column: (E,L), as textbooks have it, y = W x; for one example

Dims: B batch, L length, E model width.
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from clearhead.messages import unknown_name
from clearhead.models.config import (
    AttentionConfig,
    LanguageConfig,
    ModelConfig,
    PredictorConfig,
    Seq2SeqConfig,
    VisionConfig,
    check_positive,
)
from clearhead.models.factory import build_model
from clearhead.models.presets import preset
from clearhead.models.recorder import TensorShape, record
from clearhead.nn.attention import MultiHeadAttention, SingleHeadAttention

if TYPE_CHECKING:
    from rich.console import Group

Conventions = Literal["rows", "columns", "both"]
Config = ModelConfig | AttentionConfig

ATTENTION_LENGTH = 5
"""tokens of an attention layer on its own, which has no context to take a length from"""


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """What one forward pass of a config went through, in order. `shapes["encoder.norm"]` is one of its tensors."""

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
        from clearhead.models.shapes_table import shapes_table

        return shapes_table(self, conventions, every_block=every_block, width=width)

    def __str__(self) -> str:
        from clearhead.models.shapes_table import as_text

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
    return MultiHeadAttention(config.width, config.n_heads)


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
            return {"images": torch.empty(batch, config.channels, *config.image_shape, device="meta")}
        case Seq2SeqConfig():
            length = config.context if length is None else length
            source_length = length if source_length is None else source_length
            return {"source": meta_ids(batch, source_length), "target": meta_ids(batch, length)}
        case PredictorConfig() | LanguageConfig():
            return {"ids": meta_ids(batch, config.context if length is None else length)}
        case AttentionConfig():
            length = ATTENTION_LENGTH if length is None else length
            check_positive(length=length)
            return {"tokens": torch.empty(batch, length, config.width, device="meta")}
    raise TypeError(f"shapes takes a config or the name of a preset, got {type(config)}")


def meta_ids(batch: int, length: int) -> Tensor:
    check_positive(length=length)
    return torch.empty(batch, length, dtype=torch.long, device="meta")
