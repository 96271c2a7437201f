"""One attention call as the model computed it, with everything needed to compute its weights later.

`SDPACall` is a call of scaled_dot_product_attention: it keeps queries, keys, values and the mask, and computes weights
on demand, for the requested heads and rows. `SoftmaxCall` is a softmax whose result multiplied values: it keeps the
weights that the model computed, and a `Layout` that names the axes, because models write `weights @ values` in many
orders.

Regardless of the model's own shapes, weights are (B,H,Q,K), values (B,H,K,Dv) and the output (B,H,Q,Dv).
Dims: B batch, H heads, Q queries, K keys, D width of queries and keys, Dv width of values.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Protocol

import torch
from torch import Tensor

from clearhead.insight.axes import Layout, to_4d, with_heads
from clearhead.nn.attention import in_float32, repeat_kv_heads, softargmax

Rows = slice | Tensor
ScoreMod = Callable[..., Tensor]


class AttentionCall(Protocol):
    @property
    def q(self) -> Tensor | None: ...

    @property
    def k(self) -> Tensor | None: ...

    @property
    def v(self) -> Tensor: ...

    @property
    def raw_out(self) -> Tensor:
        """The output in the model's own shape."""

    @property
    def alias(self) -> Tensor:
        """The output with the shape that it had when it was recorded; its values may have changed."""

    @property
    def dropout(self) -> float: ...

    @property
    def is_stale(self) -> bool:
        """Whether one of the tensors changed in place after it was recorded."""

    def check(self, *names: str) -> None:
        """An error if one of these tensors changed in place after it was recorded."""

    @property
    def num_keys(self) -> int: ...

    def arrange_out(self, raw_out: Tensor) -> Tensor:
        """The output, or its gradient, from the model's own shape to (B,H,Q,Dv)."""

    def weights(self, heads: list[int], rows: Rows) -> Tensor:
        """(B,heads,rows,K), before dropout."""

    def values(self, heads: list[int]) -> Tensor:
        """(B,heads,K,Dv)"""

    def allowed(self, heads: list[int]) -> Tensor:
        """True where a query may attend; broadcasts to (B,heads,Q,K)."""

    def replace_heads(self, heads: list[int], new: Tensor) -> Tensor:
        """The output in the model's own shape, with these heads replaced by new (B,heads,Q,Dv)."""


@dataclass(frozen=True, eq=False)
class SDPACall:
    """A call of scaled_dot_product_attention. raw_q is (...,H,Q,D); raw_k and raw_v may have one head per group."""

    raw_q: Tensor
    raw_k: Tensor
    raw_v: Tensor
    mask: Tensor | None
    dropout: float
    is_causal: bool
    scale: float
    raw_out: Tensor
    score_mod: ScoreMod | None = None
    """of flex_attention: (score, batch, head, query, key) -> score"""
    mask_mod: ScoreMod | None = None
    """of flex_attention: (batch, head, query, key) -> whether the query may attend"""
    alias: Tensor = field(init=False)
    """the output, with the shape that it had when it was recorded"""
    versions: tuple[int | None, ...] = field(init=False)

    FIELDS = "raw_q", "raw_k", "raw_v", "mask", "raw_out"

    def __post_init__(self) -> None:
        remember_versions(self, self.FIELDS)

    @property
    def is_stale(self) -> bool:
        return bool(changed_fields(self, self.FIELDS))

    def check(self, *names: str) -> None:
        check_unchanged(self, names)

    @property
    def q(self) -> Tensor:
        self.check("raw_q")
        return to_4d(with_heads(self.raw_q))

    @property
    def k(self) -> Tensor:
        self.check("raw_k")
        return repeat_kv_heads(to_4d(with_heads(self.raw_k)), self.num_heads)

    @property
    def v(self) -> Tensor:
        self.check("raw_v")
        return repeat_kv_heads(to_4d(with_heads(self.raw_v)), self.num_heads)

    @property
    def num_heads(self) -> int:
        return self.arrange_out(self.alias).shape[1]

    @property
    def num_keys(self) -> int:
        return self.raw_k.shape[-2]

    def arrange_out(self, raw_out: Tensor) -> Tensor:
        return to_4d(with_heads(raw_out))

    def weights(self, heads: list[int], rows: Rows) -> Tensor:
        self.check("raw_q", "raw_k", "mask")
        q = select_heads(self.q, heads, len(heads))[:, :, rows]
        k = select_heads(to_4d(with_heads(self.raw_k)), heads, self.q.shape[1])
        scores = self.scale * (in_float32(q) @ in_float32(k).transpose(-2, -1))
        if self.score_mod is not None:
            scores = apply_mod(self.score_mod, self.indices(heads, rows), scores)
        mask = self.mask_for(heads, rows)
        if mask is None:
            return scores.softmax(-1).to(q.dtype)
        if mask.dtype == torch.bool:
            return softargmax(scores, where=mask).to(q.dtype)
        scores = scores + mask
        return softargmax(scores, where=scores > -math.inf).to(q.dtype)

    def values(self, heads: list[int]) -> Tensor:
        self.check("raw_v")
        return select_heads(to_4d(with_heads(self.raw_v)), heads, self.num_heads)

    def mask_for(self, heads: list[int], rows: Rows) -> Tensor | None:
        """A bool or additive mask that broadcasts to (B,heads,rows,K)."""
        num_queries, num_keys = self.raw_q.shape[-2], self.num_keys
        if self.is_causal:  # the kernel aligns the first query with the first key
            positions = torch.arange(num_queries, device=self.raw_q.device)[rows]
            return torch.arange(num_keys, device=self.raw_q.device) <= positions[:, None]
        if self.mask_mod is not None:
            return apply_mod(self.mask_mod, self.indices(heads, rows))
        if self.mask is None:
            return None
        mask = with_heads(self.mask[(None,) * max(0, self.raw_q.dim() - self.mask.dim())])
        if mask.dim() > 4:
            mask = mask.expand(*self.raw_q.shape[:-3], *mask.shape[-3:])
        mask = to_4d(mask)
        mask = mask if mask.shape[1] == 1 else select_heads(mask, heads, mask.shape[1])
        return mask if mask.shape[-2] == 1 else mask[:, :, rows]

    def indices(self, heads: list[int], rows: Rows) -> list[Tensor]:
        """Of batch, heads, queries and keys."""
        device, queries = self.raw_q.device, torch.arange(self.raw_q.shape[-2], device=self.raw_q.device)
        batch, keys = torch.arange(len(self.q), device=device), torch.arange(self.num_keys, device=device)
        return [batch, torch.tensor(heads, device=device), queries[rows], keys]

    def allowed(self, heads: list[int]) -> Tensor:
        mask = self.mask_for(heads, slice(None))
        if mask is None:
            return torch.ones((), dtype=torch.bool, device=self.raw_q.device)
        # additive masks use -inf, or the lowest number of some dtype
        return mask if mask.dtype == torch.bool else mask > torch.finfo(torch.float16).min

    def replace_heads(self, heads: list[int], new: Tensor) -> Tensor:
        out = self.raw_out.clone()
        write_heads(with_heads(out), heads, new)
        return out


@dataclass(frozen=True, eq=False)
class SoftmaxCall:
    """A softmax whose result multiplied values, both in the model's own layout."""

    raw_weights: Tensor
    raw_values: Tensor
    layout: Layout
    dropout: float
    raw_out: Tensor
    q: Tensor | None = None
    k: Tensor | None = None
    kept_axis: int | None = None
    """the axis of the output that a sum with keepdim=True left with size 1"""
    alias: Tensor = field(init=False)
    """the output, with the shape that it had when it was recorded"""
    versions: tuple[int | None, ...] = field(init=False)

    FIELDS = "raw_weights", "raw_values", "raw_out"

    def __post_init__(self) -> None:
        remember_versions(self, self.FIELDS)

    @property
    def is_stale(self) -> bool:
        return bool(changed_fields(self, self.FIELDS))

    def check(self, *names: str) -> None:
        check_unchanged(self, names)

    @property
    def v(self) -> Tensor:
        self.check("raw_values")
        return self.layout.arrange_values(self.raw_values, self.without_kept_axis(self.alias))

    @property
    def num_keys(self) -> int:
        return self.raw_weights.shape[self.layout.weights.index(self.layout.keys)]

    def without_kept_axis(self, raw_out: Tensor) -> Tensor:
        return raw_out if self.kept_axis is None else raw_out.squeeze(self.kept_axis)

    def arrange_out(self, raw_out: Tensor) -> Tensor:
        return self.layout.arrange_out(self.without_kept_axis(raw_out))

    def weights(self, heads: list[int], rows: Rows) -> Tensor:
        self.check("raw_weights")
        weights = self.layout.arrange_weights(self.raw_weights, self.without_kept_axis(self.alias))
        return select_heads(weights, heads, weights.shape[1])[:, :, rows]

    def values(self, heads: list[int]) -> Tensor:
        return select_heads(self.v, heads, self.v.shape[1])

    def allowed(self, heads: list[int]) -> Tensor:
        """A weight of exactly 0 counts as masked: how the model masked its scores is not known."""
        return self.weights(heads, slice(None)) > 0

    def replace_heads(self, heads: list[int], new: Tensor) -> Tensor:
        out = self.raw_out.clone()
        view = self.without_kept_axis(out)
        write_heads(self.layout.head_view(view), heads, new, self.layout.widths)
        return out


def apply_mod(mod: ScoreMod, indices: list[Tensor], scores: Tensor | None = None) -> Tensor:
    """A score or mask function of flex_attention, which takes single numbers, for all indices: (B,H,Q,K)."""
    first = () if scores is None else (0,)
    for axis in (3, 2, 1, 0):
        mod = torch.vmap(mod, in_dims=(*first, *(0 if i == axis else None for i in range(4))))
    return mod(*(() if scores is None else (scores,)), *indices)


def remember_versions(call: SDPACall | SoftmaxCall, names: tuple[str, ...]) -> None:
    """Note how often each tensor was changed in place. Inference tensors do not count it, so they are copied."""
    if call.raw_out.is_inference():
        for name in names:
            x = getattr(call, name)
            object.__setattr__(call, name, x if x is None or not x.is_inference() else x.clone())
    tensors = [getattr(call, name) for name in names]
    versions = [None if x is None or x.is_inference() else x._version for x in tensors]
    object.__setattr__(call, "versions", tuple(versions))
    object.__setattr__(call, "alias", call.raw_out.detach())


def changed_fields(call: SDPACall | SoftmaxCall, names: Sequence[str]) -> list[str]:
    """Those of the tensors that were changed in place after they were recorded."""
    versions = zip(call.FIELDS, call.versions, strict=True)
    return [n for n, version in versions if n in names and version is not None and getattr(call, n)._version != version]


def check_unchanged(call: SDPACall | SoftmaxCall, names: Sequence[str]) -> None:
    """A tensor that was changed in place after it was recorded is an error, not another number."""
    for name in changed_fields(call, names):
        raise RuntimeError(
            f"the {name.removeprefix('raw_')} of this attention call changed in place after it was recorded, "
            "so that it is no longer the tensor that the model used"
        )


def select_heads(x: Tensor, heads: list[int], num_heads: int) -> Tensor:
    """(B,H,...) -> (B,heads,...). If x has fewer heads than num_heads, each serves a group. One head is a view."""
    group = max(1, num_heads // x.shape[1]) if num_heads >= x.shape[1] else 1
    indices = [head // group for head in heads]
    if indices == list(range(x.shape[1])):
        return x
    return x[:, indices[0] : indices[0] + 1] if len(indices) == 1 else x[:, indices]


def write_heads(view: Tensor, heads: list[int], new: Tensor, widths: str = "d") -> None:
    """Write new (B,heads,Q,D) into (...,H,Q,*widths), in place."""
    num_last = 1 + len(widths)
    shape = (*view.shape[: -1 - num_last], len(heads), *view.shape[view.dim() - num_last :])
    index: tuple[Any, ...] = (..., heads, *(slice(None),) * num_last)
    view[index] = new.to(view.dtype).reshape(shape)


def check_heads(head: int | Sequence[int] | None, num_heads: int, name: str) -> list[int]:
    if head is None:
        return list(range(num_heads))
    heads = [int(head)] if isinstance(head, Integral) else [int(index) for index in head]  # type: ignore[union-attr]
    for index in heads:
        if not 0 <= index < num_heads:
            raise LookupError(f"head must be {index_range(num_heads)} for {name!r}, got {index}")
    return heads


def check_rows(rows: Sequence[int] | slice | None, num_queries: int, name: str) -> list[int]:
    if rows is None or isinstance(rows, slice):
        return list(range(num_queries)[rows or slice(None)])
    rows = [int(rows)] if isinstance(rows, Integral) else [int(row) for row in rows]
    for row in rows:
        if not -num_queries <= row < num_queries:
            raise LookupError(f"rows are queries and must be {index_range(num_queries)} for {name!r}, got {row}")
    return [row % num_queries for row in rows]


def index_range(size: int) -> str:
    return f"from 0 to {size - 1}" if size > 1 else "0" if size else "empty"


def as_slice(indices: Tensor) -> Rows:
    """Consecutive indices as a slice, so that indexing returns a view."""
    if len(indices) and bool((indices.diff() == 1).all()):
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return indices
