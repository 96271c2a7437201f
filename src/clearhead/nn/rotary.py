"""Positions inside attention: rotary turns queries and keys, ALiBi lowers the scores of far keys.

Both depend on the *distance* of query and key alone, and learn nothing.
Dims: L length, H heads, Q queries, K keys, D head width.
"""

import torch
from torch import Tensor

from clearhead.nn.sizes import check_even


def rotary_angles(places: Tensor, head_width: int, base: float = 10_000.0) -> Tensor:
    """place * base^(-2i/D): one angle for each pair i of a head. places (L,) -> (L,D/2)"""
    check_even(head_width, 2)
    steps = torch.arange(0, head_width, 2, device=places.device, dtype=torch.float32)
    return places[:, None].float() * base ** (-steps / head_width)


def rotary_angles_2d(rows: int, columns: int, head_width: int, device: torch.device | str | None = None) -> Tensor:
    """Half of the pairs turn with the row, half with the column. -> (rows*columns, D/2)"""
    check_even(head_width, 4)
    by_row = rotary_angles(torch.arange(rows, device=device), head_width // 2)
    by_column = rotary_angles(torch.arange(columns, device=device), head_width // 2)
    return torch.cat([by_row.repeat_interleave(columns, dim=0), by_column.repeat(rows, 1)], dim=-1)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turns the pair (x_i, x_{i+D/2}) by angle i: then q·k knows the distance alone. x (...,L,D), angles (L,D/2)"""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def alibi_slopes(n_heads: int, device: torch.device | str | None = None) -> Tensor:
    """2^(-8/H), 2^(-16/H), ... , 2^-8: from a head that looks near to one that looks far. -> (H,)"""
    return 2.0 ** (-8.0 * torch.arange(1, n_heads + 1, device=device) / n_heads)


def alibi(n_heads: int, n_queries: int, n_keys: int, device: torch.device | str | None = None) -> Tensor:
    """-slope * |query place - key place|, to be added to the logits; the queries are the last places. -> (H,Q,K)"""
    query_places = torch.arange(n_keys - n_queries, n_keys, device=device)
    distance = (query_places[:, None] - torch.arange(n_keys, device=device)).abs()
    return -alibi_slopes(n_heads, device)[:, None, None] * distance
