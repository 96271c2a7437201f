"""Positions: what tells a token where it stands, since attention alone cannot.

A `Positions` part may act in two places: `forward` adds a table to the tokens (sinusoidal, learned), `inside` gives
attention its angles (rotary) or its bias (ALiBi). Each kind does one of the two; `NoPositions` neither.
Dims: B batch, L length, E model width, H heads, Q queries, K keys, D head width.
"""

from abc import ABC

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.validation import check_rotary_width, check_sinusoidal_width


def sinusoidal(places: Tensor, width: int) -> Tensor:
    """sin(place / 10000^(2i/E)) in the even columns, cos of the same in the odd ones. places (L,) -> (L,E)"""
    check_sinusoidal_width(width, 2)
    steps = torch.arange(0, width, 2, device=places.device, dtype=torch.float32)
    angles = places[:, None].float() * 10_000.0 ** (-steps / width)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)


class PosEmbed(nn.Module, ABC):
    """One way to tell tokens where they stand; `start` is the place of the first (above 0 with a cache)."""

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """The tokens (B,L,E) with their places added."""
        return x

    def inside(self, x: Tensor, start: int = 0) -> tuple[Tensor | None, Tensor | None]:
        """For attention among tokens (B,L,E): angles (L,D/2) and logit_bias (H,Q,K), or None."""
        return None, None


class NoPosEmbed(PosEmbed):
    """A set, not a sequence: every order of the tokens is the same."""


class SinusoidalPosEmbed(PosEmbed):
    """The fixed waves of 2017, for any length."""

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        places = torch.arange(start, start + x.shape[-2], device=x.device)
        return x + sinusoidal(places, x.shape[-1]).to(x.dtype)


class LearnedPosEmbed(PosEmbed):
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


class RotaryPosEmbed(PosEmbed):
    """Turns queries and keys by an angle that grows with their place: scores then know the distance."""

    def __init__(self, head_dim: int):
        super().__init__()
        check_rotary_width(head_dim, 2)
        self.head_dim = head_dim

    def inside(self, x: Tensor, start: int = 0) -> tuple[Tensor | None, Tensor | None]:
        places = torch.arange(start, start + x.shape[-2], device=x.device)
        return rotary_angles(places, self.head_dim), None


class AlibiPosEmbed(PosEmbed):
    """Lowers each logit by slope * distance; one slope for each head."""

    def __init__(self, num_heads: int):
        super().__init__()
        self.num_heads = num_heads

    def inside(self, x: Tensor, start: int = 0) -> tuple[Tensor | None, Tensor | None]:
        length = x.shape[-2]
        return None, alibi_bias(self.num_heads, length, start + length, x.device).to(x.dtype)


# Positions inside attention: rotary turns queries and keys, ALiBi lowers the scores of far keys.
#
# Both depend on the *distance* of query and key alone, and learn nothing.
# Dims: L length, H heads, Q queries, K keys, D head width.


def rotary_angles(places: Tensor, head_dim: int, base: float = 10_000.0) -> Tensor:
    """place * base^(-2i/D): one angle for each pair i of a head. places (L,) -> (L,D/2)"""
    check_rotary_width(head_dim, 2)
    steps = torch.arange(0, head_dim, 2, device=places.device, dtype=torch.float32)
    return places[:, None].float() * base ** (-steps / head_dim)


def rotary_angles_2d(rows: int, columns: int, head_dim: int, device: torch.device | str | None = None) -> Tensor:
    """Half of the pairs turn with the row, half with the column. -> (rows*columns, D/2)"""
    check_rotary_width(head_dim, 4)
    by_row = rotary_angles(torch.arange(rows, device=device), head_dim // 2)
    by_column = rotary_angles(torch.arange(columns, device=device), head_dim // 2)
    return torch.cat([by_row.repeat_interleave(columns, dim=0), by_column.repeat(rows, 1)], dim=-1)


def apply_rotary(x: Tensor, angles: Tensor) -> Tensor:
    """Turns the pair (x_i, x_{i+D/2}) by angle i: then q·k knows the distance alone. x (...,L,D), angles (L,D/2)"""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def alibi_slopes(num_heads: int, device: torch.device | str | None = None) -> Tensor:
    """2^(-8/H), 2^(-16/H), ... , 2^-8: from a head that looks near to one that looks far. -> (H,)"""
    return 2.0 ** (-8.0 * torch.arange(1, num_heads + 1, device=device) / num_heads)


def alibi_bias(num_heads: int, n_queries: int, n_keys: int, device: torch.device | str | None = None) -> Tensor:
    """-slope * |query place - key place|, to be added to the logits; the queries are the last places. -> (H,Q,K)"""
    query_places = torch.arange(n_keys - n_queries, n_keys, device=device)
    distance = (query_places[:, None] - torch.arange(n_keys, device=device)).abs()
    return -alibi_slopes(num_heads, device)[:, None, None] * distance


# Positions of patches, which stand on a grid of rows and columns instead of in a line.
#
# Dims: B batch, P patches (rows * columns), E model width, D head width.


def sinusoidal_2d(rows: int, columns: int, width: int, device: torch.device | str | None = None) -> Tensor:
    """Half of the width tells the row, half the column. -> (rows*columns, E)"""
    check_sinusoidal_width(width, 4)
    by_row = sinusoidal(torch.arange(rows, device=device), width // 2)
    by_column = sinusoidal(torch.arange(columns, device=device), width // 2)
    return torch.cat([by_row.repeat_interleave(columns, dim=0), by_column.repeat(rows, 1)], dim=-1)


def interpolate(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """A position table (P,E) for another grid, by bicubic interpolation; for the same grid, the table itself."""
    if old == new:
        return table
    wide = torch.promote_types(table.dtype, torch.float32)  # half precision has no interpolation
    image = table.T.unflatten(1, old)[None].to(wide)  # (1,E,rows,columns)
    return F.interpolate(image, size=new, mode="bicubic", antialias=True)[0].flatten(1).T.to(table.dtype)


class PosEmbed2d(nn.Module, ABC):
    """One way to tell patches (B,P,E) on a grid (rows, columns) where they stand."""

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        return x

    def angles(self, grid: tuple[int, int], device: torch.device) -> Tensor | None:
        """For attention: (P,D/2), or None."""
        return None


class NoPosEmbed2d(PosEmbed2d):
    """A bag of patches: shuffling them changes nothing."""


class SinusoidalPosEmbed2d(PosEmbed2d):
    """Fixed waves along rows and columns, for any grid."""

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        return x + sinusoidal_2d(*grid, x.shape[-1], x.device).to(x.dtype)


class LearnedPosEmbed2d(PosEmbed2d):
    """A learned table for one grid, interpolated to any other."""

    def __init__(self, grid: tuple[int, int], width: int):
        super().__init__()
        self.grid = grid
        self.table = nn.Parameter(torch.empty(grid[0] * grid[1], width))
        nn.init.normal_(self.table, std=0.02)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        return x + interpolate(self.table, self.grid, grid)


class RotaryPosEmbed2d(PosEmbed2d):
    """Turns half of each head by the row, half by the column."""

    def __init__(self, head_dim: int):
        super().__init__()
        check_rotary_width(head_dim, 4)
        self.head_dim = head_dim

    def angles(self, grid: tuple[int, int], device: torch.device) -> Tensor | None:
        return rotary_angles_2d(*grid, self.head_dim, device)
