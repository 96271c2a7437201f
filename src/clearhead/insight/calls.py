"""One attention as a model computed it, with what it takes to show any of its weights afterwards.

`Fused` is a call of the kernel: it keeps queries, keys, values and the mask, and weights are computed when asked, for
the heads and rows asked. `Written` is a softmax whose result multiplied values: the model made its weights itself.
Dims: B batch, H heads, Q queries, K keys, D width of queries and keys, Dv of values.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from clearhead.insight.layout import Layout, four_axes, with_heads
from clearhead.nn.attention import in_float32
from clearhead.nn.softargmax import softargmax

Rows = slice | Tensor


class Call(Protocol):
    @property
    def q(self) -> Tensor | None: ...

    @property
    def k(self) -> Tensor | None: ...

    @property
    def v(self) -> Tensor: ...

    @property
    def raw_out(self) -> Tensor:
        """The output as the model got it, in the model's own shape."""

    @property
    def dropout(self) -> float: ...

    @property
    def n_keys(self) -> int: ...

    def arranged(self, like_out: Tensor) -> Tensor:
        """The output, or its gradient, from the model's own shape to (B,H,Q,Dv)."""

    def weights(self, heads: list[int], rows: Rows) -> Tensor:
        """(B,heads,rows,K), before dropout."""

    def values(self, heads: list[int]) -> Tensor:
        """(B,heads,K,Dv)"""

    def allowed(self, heads: list[int]) -> Tensor:
        """True where a query may attend; to (B,heads,Q,K)"""

    def with_replaced(self, heads: list[int], new: Tensor) -> Tensor:
        """The output in the model's own shape, these heads replaced by new (B,heads,Q,Dv), all others as they are."""


@dataclass(frozen=True, eq=False)
class Fused:
    """A call of scaled_dot_product_attention; q (..., H,Q,D), k and v may have fewer heads, each for a group."""

    raw_q: Tensor
    raw_k: Tensor
    raw_v: Tensor
    mask: Tensor | None
    dropout: float
    is_causal: bool
    scale: float
    raw_out: Tensor

    @property
    def q(self) -> Tensor:
        return four_axes(with_heads(self.raw_q))

    @property
    def k(self) -> Tensor:
        return repeated(four_axes(with_heads(self.raw_k)), self.q.shape[1])

    @property
    def v(self) -> Tensor:
        return repeated(four_axes(with_heads(self.raw_v)), self.q.shape[1])

    @property
    def n_keys(self) -> int:
        return self.raw_k.shape[-2]

    def arranged(self, like_out: Tensor) -> Tensor:
        return four_axes(with_heads(like_out))

    def weights(self, heads: list[int], rows: Rows) -> Tensor:
        q = of_heads(self.q, heads, len(heads))[:, :, rows]
        k = of_heads(four_axes(with_heads(self.raw_k)), heads, self.q.shape[1])
        scores = self.scale * (in_float32(q) @ in_float32(k).transpose(-2, -1))
        mask = self.mask_of(heads, rows)
        if mask is None:
            return scores.softmax(-1).to(q.dtype)
        if mask.dtype == torch.bool:
            return softargmax(scores, where=mask).to(q.dtype)
        scores = scores + mask
        return softargmax(scores, where=scores > -math.inf).to(q.dtype)

    def values(self, heads: list[int]) -> Tensor:
        return of_heads(four_axes(with_heads(self.raw_v)), heads, self.q.shape[1])

    def mask_of(self, heads: list[int], rows: Rows) -> Tensor | None:
        """To (B,heads,rows,K): bool, or numbers that are added."""
        n_queries, n_keys = self.raw_q.shape[-2], self.n_keys
        if self.is_causal:  # the kernel aligns it at the first key
            places = torch.arange(n_queries, device=self.raw_q.device)[rows]
            return torch.arange(n_keys, device=self.raw_q.device) <= places[:, None]
        if self.mask is None:
            return None
        mask = with_heads(self.mask[(None,) * max(0, self.raw_q.dim() - self.mask.dim())])
        if mask.dim() > 4:
            mask = mask.expand(*self.raw_q.shape[:-3], *mask.shape[-3:])
        mask = four_axes(mask)
        mask = mask if mask.shape[1] == 1 else of_heads(mask, heads, mask.shape[1])
        return mask if mask.shape[-2] == 1 else mask[:, :, rows]

    def allowed(self, heads: list[int]) -> Tensor:
        mask = self.mask_of(heads, slice(None))
        if mask is None:
            return torch.ones((), dtype=torch.bool, device=self.raw_q.device)
        # masks of numbers say no with -inf, or with the lowest number of some dtype
        return mask if mask.dtype == torch.bool else mask > torch.finfo(torch.float16).min

    def with_replaced(self, heads: list[int], new: Tensor) -> Tensor:
        out = self.raw_out.clone()
        write(with_heads(out), heads, new)
        return out


@dataclass(frozen=True, eq=False)
class Written:
    """A softmax that multiplied values; both as the model had them, and which axis of them is which."""

    raw_weights: Tensor
    raw_values: Tensor
    layout: Layout
    dropout: float
    raw_out: Tensor
    q: Tensor | None = None
    k: Tensor | None = None

    @property
    def v(self) -> Tensor:
        return self.layout.of_values(self.raw_values, self.raw_out)

    @property
    def n_keys(self) -> int:
        return self.raw_weights.shape[self.layout.weights.index(self.layout.keys)]

    def arranged(self, like_out: Tensor) -> Tensor:
        return self.layout.of_out(like_out)

    def weights(self, heads: list[int], rows: Rows) -> Tensor:
        weights = self.layout.of_weights(self.raw_weights, self.raw_out)
        return of_heads(weights, heads, weights.shape[1])[:, :, rows]

    def values(self, heads: list[int]) -> Tensor:
        return of_heads(self.v, heads, self.v.shape[1])

    def allowed(self, heads: list[int]) -> Tensor:
        """What weighs exactly nothing counts as masked: the model does not say what it did before its softmax."""
        return self.weights(heads, slice(None)) > 0

    def with_replaced(self, heads: list[int], new: Tensor) -> Tensor:
        out = self.raw_out.clone()
        write(self.layout.heads_of(out), heads, new)
        return out


def of_heads(x: Tensor, heads: list[int], n_heads: int) -> Tensor:
    """(B,H,...) -> (B,heads,...). Where x has fewer heads than n_heads, each serves a group. One head is a view."""
    group = max(1, n_heads // x.shape[1]) if n_heads >= x.shape[1] else 1
    own = [head // group for head in heads]
    if own == list(range(x.shape[1])):
        return x
    return x[:, own[0] : own[0] + 1] if len(own) == 1 else x[:, own]


def repeated(x: Tensor, n_heads: int) -> Tensor:
    return x if x.shape[1] == n_heads else x.repeat_interleave(n_heads // x.shape[1], 1)


def write(view: Tensor, heads: list[int], new: Tensor) -> None:
    """new (B,heads,Q,D) into (..., H,Q,D), in place."""
    view[..., heads, :, :] = new.to(view.dtype).reshape(*view.shape[:-3], len(heads), *view.shape[-2:])
