"""Positions: what tells a token where it stands, since attention alone cannot.

A `Positions` part may act in two places: `forward` adds a table to the tokens (sinusoidal, learned), `inside` gives
attention its angles (rotary) or its bias (ALiBi). Each kind does one of the two; `NoPositions` neither.
Dims: B batch, L length, E model width, H heads, Q queries, K keys, D head width.
"""

from abc import ABC

import torch
from torch import Tensor, nn

from clearhead.nn.rotary import alibi, rotary_angles
from clearhead.nn.sizes import check_even, check_waves


def sinusoidal(places: Tensor, width: int) -> Tensor:
    """sin(place / 10000^(2i/E)) in the even columns, cos of the same in the odd ones. places (L,) -> (L,E)"""
    check_waves(width, 2)
    steps = torch.arange(0, width, 2, device=places.device, dtype=torch.float32)
    angles = places[:, None].float() * 10_000.0 ** (-steps / width)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)


class Positions(nn.Module, ABC):
    """One way to tell tokens where they stand; `start` is the place of the first (above 0 with a cache)."""

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """The tokens (B,L,E) with their places added."""
        return x

    def inside(self, x: Tensor, start: int = 0) -> tuple[Tensor | None, Tensor | None]:
        """For attention among tokens (B,L,E): angles (L,D/2) and logit_bias (H,Q,K), or None."""
        return None, None


class NoPositions(Positions):
    """A set, not a sequence: every order of the tokens is the same."""


class SinusoidalPositions(Positions):
    """The fixed waves of 2017, for any length."""

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        places = torch.arange(start, start + x.shape[-2], device=x.device)
        return x + sinusoidal(places, x.shape[-1]).to(x.dtype)


class LearnedPositions(Positions):
    """A table (context,E) with one learned row for each place, and no row beyond its end."""

    def __init__(self, context: int, width: int):
        super().__init__()
        self.table = nn.Parameter(torch.empty(context, width))
        nn.init.normal_(self.table, std=0.02)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        end = start + x.shape[-2]
        if end > len(self.table):
            raise ValueError(
                f"a sequence must fit the learned position table of {len(self.table)} rows, got length {end}; "
                "shorten it, build the model with a larger context, or use sinusoidal or rotary positions"
            )
        return x + self.table[start:end]


class RotaryPositions(Positions):
    """Turns queries and keys by an angle that grows with their place: scores then know the distance."""

    def __init__(self, head_width: int):
        super().__init__()
        check_even(head_width, 2)
        self.head_width = head_width

    def inside(self, x: Tensor, start: int = 0) -> tuple[Tensor | None, Tensor | None]:
        places = torch.arange(start, start + x.shape[-2], device=x.device)
        return rotary_angles(places, self.head_width), None


class AlibiPositions(Positions):
    """Lowers each logit by slope * distance; one slope for each head."""

    def __init__(self, n_heads: int):
        super().__init__()
        self.n_heads = n_heads

    def inside(self, x: Tensor, start: int = 0) -> tuple[Tensor | None, Tensor | None]:
        length = x.shape[-2]
        return None, alibi(self.n_heads, length, start + length, x.device).to(x.dtype)
