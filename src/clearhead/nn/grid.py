"""Positions of patches, which stand on a grid of rows and columns instead of in a line.

Dims: B batch, P patches (rows * columns), E model width, D head width.
"""

from abc import ABC

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.nn.positions import sinusoidal
from clearhead.nn.rotary import rotary_angles_2d
from clearhead.nn.sizes import check_even, check_waves


def sinusoidal_2d(rows: int, columns: int, width: int, device: torch.device | str | None = None) -> Tensor:
    """Half of the width tells the row, half the column. -> (rows*columns, E)"""
    check_waves(width, 4)
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


class GridPositions(nn.Module, ABC):
    """One way to tell patches (B,P,E) on a grid (rows, columns) where they stand."""

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        return x

    def angles(self, grid: tuple[int, int], device: torch.device) -> Tensor | None:
        """For attention: (P,D/2), or None."""
        return None


class NoGridPositions(GridPositions):
    """A bag of patches: shuffling them changes nothing."""


class SinusoidalGrid(GridPositions):
    """Fixed waves along rows and columns, for any grid."""

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        return x + sinusoidal_2d(*grid, x.shape[-1], x.device).to(x.dtype)


class LearnedGrid(GridPositions):
    """A learned table for one grid, interpolated to any other."""

    def __init__(self, grid: tuple[int, int], width: int):
        super().__init__()
        self.grid = grid
        self.table = nn.Parameter(torch.empty(grid[0] * grid[1], width))
        nn.init.normal_(self.table, std=0.02)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        return x + interpolate(self.table, self.grid, grid)


class RotaryGrid(GridPositions):
    """Turns half of each head by the row, half by the column."""

    def __init__(self, head_width: int):
        super().__init__()
        check_even(head_width, 4)
        self.head_width = head_width

    def angles(self, grid: tuple[int, int], device: torch.device) -> Tensor | None:
        return rotary_angles_2d(*grid, self.head_width, device)
