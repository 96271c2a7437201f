"""Position embeddings: attention alone does not know the order of its tokens.

    sinusoidal   a fixed table, added to the tokens                     Vaswani et al. 2017
    learned      a learned table, added to the tokens
    rotary       rotates queries and keys by their position             RoPE, Su et al. 2021
    ALiBi        subtracts slope * distance from the attention logits   Press et al. 2022

Tables act in `forward`; rotary and ALiBi act inside attention and depend on the distance of query and key alone. The
2-D kinds are for patches on a grid.
Dims: B batch, L length, E model width, H heads, Q queries, K keys, D head width, P patches (rows * columns).
"""

from abc import ABC

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.validation import check_rotary_width, check_sinusoidal_width


class PosEmbed(nn.Module, ABC):
    """A position embedding. `start` is the position of the first token (above 0 with a cache)."""

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """The tokens (B,L,E) with their positions added."""
        return x

    def attention_inputs(self, x: Tensor, start: int = 0) -> tuple[Tensor | None, Tensor | None]:
        """For attention among tokens (B,L,E): rotary_angles (L,D/2) and logit_bias (H,Q,K), or None."""
        return None, None


class NoPosEmbed(PosEmbed):
    """The tokens are a set: attention is permutation-equivariant."""


class SinusoidalPosEmbed(PosEmbed):
    """Fixed sines and cosines, for any length."""

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        positions = torch.arange(start, start + x.shape[-2], device=x.device)
        return x + sinusoidal(positions, x.shape[-1]).to(x.dtype)


class LearnedPosEmbed(PosEmbed):
    """A learned table (context_length,E), one row for each position."""

    def __init__(self, context_length: int, width: int):
        super().__init__()
        self.table = nn.Parameter(torch.empty(context_length, width))
        nn.init.normal_(self.table, std=0.02)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        end = start + x.shape[-2]
        if end > len(self.table):
            raise ValueError(
                f"a sequence must fit the learned position table of {len(self.table)} rows, got length {end}; "
                "shorten it, or build the model with a larger context_length or another pos_embed"
            )
        return x + self.table[start:end]


class RotaryPosEmbed(PosEmbed):
    """Rotates queries and keys by angles proportional to their position."""

    def __init__(self, head_dim: int):
        super().__init__()
        check_rotary_width(head_dim, 2)
        self.head_dim = head_dim

    def attention_inputs(self, x: Tensor, start: int = 0) -> tuple[Tensor | None, Tensor | None]:
        positions = torch.arange(start, start + x.shape[-2], device=x.device)
        return rotary_angles(positions, self.head_dim), None


class AlibiPosEmbed(PosEmbed):
    """Subtracts slope * distance from the logits; each head has its own slope."""

    def __init__(self, num_heads: int):
        super().__init__()
        self.num_heads = num_heads

    def attention_inputs(self, x: Tensor, start: int = 0) -> tuple[Tensor | None, Tensor | None]:
        length = x.shape[-2]
        return None, alibi_bias(self.num_heads, length, start + length, x.device).to(x.dtype)


def sinusoidal(positions: Tensor, width: int) -> Tensor:
    """sin(position / 10000^(2i/E)) in column 2i, cos of the same in column 2i+1. positions (L,) -> (L,E)"""
    check_sinusoidal_width(width, 2)
    steps = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None].float() * 10_000.0 ** (-steps / width)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)


def rotary_angles(positions: Tensor, head_dim: int, base: float = 10_000.0) -> Tensor:
    """position * base^(-2i/D) for each pair i of a head's dimensions. positions (L,) -> (L,D/2)"""
    check_rotary_width(head_dim, 2)
    steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    return positions[:, None].float() * base ** (-steps / head_dim)


def apply_rotary(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates each pair (x_i, x_{i+D/2}) by angle i: q·k depends on the distance only. x (...,L,D), angles (L,D/2)"""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def alibi_slopes(num_heads: int, device: torch.device | str | None = None) -> Tensor:
    """2^(-8/H), 2^(-16/H), ..., 2^-8: the first head attends locally, the last one far. -> (H,)"""
    return 2.0 ** (-8.0 * torch.arange(1, num_heads + 1, device=device) / num_heads)


def alibi_bias(num_heads: int, n_queries: int, n_keys: int, device: torch.device | str | None = None) -> Tensor:
    """-slope * |query position - key position|; the queries are the last of the sequence. -> (H,Q,K)"""
    query_positions = torch.arange(n_keys - n_queries, n_keys, device=device)
    distance = (query_positions[:, None] - torch.arange(n_keys, device=device)).abs()
    return -alibi_slopes(num_heads, device)[:, None, None] * distance


class PosEmbed2d(nn.Module, ABC):
    """A position embedding of patches (B,P,E) on a grid (rows, columns)."""

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        return x

    def rotary_angles(self, grid: tuple[int, int], device: torch.device) -> Tensor | None:
        """For attention: (P,D/2), or None."""
        return None


class NoPosEmbed2d(PosEmbed2d):
    """The patches are a set: shuffling them changes nothing."""


class SinusoidalPosEmbed2d(PosEmbed2d):
    """Fixed sines and cosines of row and column, for any grid."""

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        return x + sinusoidal_2d(*grid, x.shape[-1], x.device).to(x.dtype)


class LearnedPosEmbed2d(PosEmbed2d):
    """A learned table (P,E) for one grid, interpolated to others."""

    def __init__(self, grid: tuple[int, int], width: int):
        super().__init__()
        self.grid = grid
        self.table = nn.Parameter(torch.empty(grid[0] * grid[1], width))
        nn.init.normal_(self.table, std=0.02)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        return x + interpolate(self.table, self.grid, grid)


class RotaryPosEmbed2d(PosEmbed2d):
    """Rotates half of each head by the row and half by the column."""

    def __init__(self, head_dim: int):
        super().__init__()
        check_rotary_width(head_dim, 4)
        self.head_dim = head_dim

    def rotary_angles(self, grid: tuple[int, int], device: torch.device) -> Tensor | None:
        return rotary_angles_2d(*grid, self.head_dim, device)


def sinusoidal_2d(rows: int, columns: int, width: int, device: torch.device | str | None = None) -> Tensor:
    """Half of the width encodes the row, half the column. -> (rows*columns, E)"""
    check_sinusoidal_width(width, 4)
    by_row = sinusoidal(torch.arange(rows, device=device), width // 2)
    by_column = sinusoidal(torch.arange(columns, device=device), width // 2)
    return torch.cat([by_row.repeat_interleave(columns, dim=0), by_column.repeat(rows, 1)], dim=-1)


def rotary_angles_2d(rows: int, columns: int, head_dim: int, device: torch.device | str | None = None) -> Tensor:
    """Half of the pairs rotate with the row, half with the column. -> (rows*columns, D/2)"""
    check_rotary_width(head_dim, 4)
    by_row = rotary_angles(torch.arange(rows, device=device), head_dim // 2)
    by_column = rotary_angles(torch.arange(columns, device=device), head_dim // 2)
    return torch.cat([by_row.repeat_interleave(columns, dim=0), by_column.repeat(rows, 1)], dim=-1)


def interpolate(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """A position table (P,E) resized to another grid, bicubic; for the same grid, the table itself."""
    if old == new:
        return table
    wide = torch.promote_types(table.dtype, torch.float32)  # interpolation does not support half precision
    image = table.T.unflatten(1, old)[None].to(wide)  # (1,E,rows,columns)
    return F.interpolate(image, size=new, mode="bicubic", antialias=True)[0].flatten(1).T.to(table.dtype)
