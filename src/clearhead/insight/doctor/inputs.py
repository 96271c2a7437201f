"""What a module is fed: ids, features or images, drawn at random, and other ones in their place.

Dims: B batch, L length, E width, C channels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

MANY = 1000
"""more different ids than that add nothing"""
SIDES = (32, 28, 64, 224)
"""of images, in pixels"""


class ModelInput(Protocol):
    def draw(self, n_examples: int, length: int, generator: torch.Generator) -> Tensor:
        """(B,L) ids, (B,L,E) features or (B,C,side,side) images, of float64 unless whole numbers."""
        ...

    def others(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """As many, each different from the one in x."""
        ...

    def describe(self, shape: str) -> str: ...


@dataclass(frozen=True)
class TokenIds:
    """Whole numbers below n; not 0 nor the padding id if there are others, since these may mean "nothing here"."""

    n: int
    padding: int | None = None

    @property
    def allowed(self) -> Tensor:
        real = [i for i in range(min(self.n, MANY)) if i not in (0, self.padding)]
        return torch.tensor(real if len(real) > 1 else range(self.n))

    def draw(self, n_examples: int, length: int, generator: torch.Generator) -> Tensor:
        allowed = self.allowed
        return allowed[torch.randint(len(allowed), (n_examples, length), generator=generator)]

    def others(self, x: Tensor, generator: torch.Generator) -> Tensor:
        allowed = self.allowed
        steps = torch.randint(1, len(allowed), x.shape, generator=generator)
        return allowed[(torch.searchsorted(allowed, x.contiguous()) + steps) % len(allowed)]

    def describe(self, shape: str) -> str:
        return f"ids {shape} below {self.n}"


@dataclass(frozen=True)
class FeatureInput:
    width: int

    def draw(self, n_examples: int, length: int, generator: torch.Generator) -> Tensor:
        return torch.randn(n_examples, length, self.width, generator=generator, dtype=torch.float64)

    def others(self, x: Tensor, generator: torch.Generator) -> Tensor:
        return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)

    def describe(self, shape: str) -> str:
        return f"features {shape[:-1]},{self.width})"


@dataclass(frozen=True)
class ImageInput:
    channels: int
    side: int

    def draw(self, n_examples: int, length: int, generator: torch.Generator) -> Tensor:
        size = (n_examples, self.channels, self.side, self.side)
        return torch.randn(size, generator=generator, dtype=torch.float64)

    def others(self, x: Tensor, generator: torch.Generator) -> Tensor:
        return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)

    def describe(self, shape: str) -> str:
        return f"images of {self.channels} x {self.side} x {self.side}"


@dataclass(frozen=True)
class ExampleInput:
    """One token for each example, without an axis of its own: (B,) ids, (B,E) features."""

    token: TokenIds | FeatureInput

    def draw(self, n_examples: int, length: int, generator: torch.Generator) -> Tensor:
        return self.token.draw(n_examples, 1, generator)[:, 0]

    def others(self, x: Tensor, generator: torch.Generator) -> Tensor:
        return self.token.others(x[:, None], generator)[:, 0]

    def describe(self, shape: str) -> str:
        return f"{self.token.describe(shape)}, one for each example"


def inputs_for(model: nn.Module, width: int | None) -> Iterator[ModelInput]:
    """What it may take, the likeliest first."""
    if width is not None:
        yield FeatureInput(width)
        return
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module.num_embeddings > 1]
    sizes = [table.num_embeddings for table in tables]
    for n in dict.fromkeys([*sizes[:1], min(sizes)] if sizes else []):
        large = [table for table in tables if table.num_embeddings >= n and table.padding_idx is not None]
        yield TokenIds(n, next((table.padding_idx for table in large), None))
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    if not convolutions:
        yield from map(FeatureInput, widths_of(model) or [8])
    for channels in [convolutions[0].in_channels] if convolutions else [3, 1]:
        yield from (ImageInput(channels, side) for side in SIDES)


def widths_of(model: nn.Module, most: int = 8) -> list[int]:
    """How many numbers a token may have: what the first layers take."""
    sizes = [size for parameter in model.parameters() if parameter.dim() == 2 for size in reversed(parameter.shape)]
    norms = [module.normalized_shape[-1] for module in model.modules() if isinstance(module, nn.LayerNorm)]
    return list(dict.fromkeys(sizes + norms))[:most]


def lengths_of(model: nn.Module, length: int, most: int = 3) -> list[int]:
    """How long a sequence may have to be: `length`, or as long as what is added to it, (1,L,E)."""
    kept = [*model.parameters(), *model.buffers()]
    fixed = [x.shape[1] for x in kept if x.dim() == 3 and x.shape[0] == 1 and 1 < x.shape[1] <= 512]
    square = [x.shape[-1] for x in model.buffers() if x.dim() >= 2 and 1 < x.shape[-1] == x.shape[-2] <= 512]
    shorter = [n for n in (*fixed, *square) if n < length]
    return list(dict.fromkeys([length, *shorter, *fixed, *square, 4]))[: most + 1]
