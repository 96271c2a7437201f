"""One attention call as the model computed it, with everything needed to compute its weights later.

`SDPACall` is a call of scaled_dot_product_attention: it keeps queries, keys, values and the mask, and computes weights
on demand, for the requested heads and rows. `SoftmaxCall` is a softmax whose result multiplied values: it keeps the
weights that the model computed, and a `Layout` that names the axes, because models write `weights @ values` in many
orders.

Regardless of the model's own shapes, weights are (B,H,Q,K), values (B,H,K,Dv) and the output (B,H,Q,Dv).
Dims: B batch, H heads, Q queries, K keys, D width of queries and keys, Dv width of values.
"""

import math
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Protocol

import torch
from torch import Tensor

from clearhead.nn.attention import in_float32, repeat_kv_heads, softargmax

Rows = slice | Tensor


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
    alias: Tensor = field(init=False)
    """the output, with the shape that it had when it was recorded"""
    versions: tuple[int | None, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "alias", self.raw_out.detach())
        object.__setattr__(self, "versions", versions_of(self.raw_q, self.raw_k, self.raw_v, self.mask, self.raw_out))

    def check(self, *names: str) -> None:
        check_versions(self, ("raw_q", "raw_k", "raw_v", "mask", "raw_out"), self.versions, names)

    @property
    def q(self) -> Tensor:
        self.check("raw_q")
        return to_4d(with_heads(self.raw_q))

    @property
    def k(self) -> Tensor:
        self.check("raw_k")
        return repeat_kv_heads(to_4d(with_heads(self.raw_k)), self.q.shape[1])

    @property
    def v(self) -> Tensor:
        self.check("raw_v")
        return repeat_kv_heads(to_4d(with_heads(self.raw_v)), self.q.shape[1])

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
        mask = self.mask_for(heads, rows)
        if mask is None:
            return scores.softmax(-1).to(q.dtype)
        if mask.dtype == torch.bool:
            return softargmax(scores, where=mask).to(q.dtype)
        scores = scores + mask
        return softargmax(scores, where=scores > -math.inf).to(q.dtype)

    def values(self, heads: list[int]) -> Tensor:
        self.check("raw_v")
        return select_heads(to_4d(with_heads(self.raw_v)), heads, self.q.shape[1])

    def mask_for(self, heads: list[int], rows: Rows) -> Tensor | None:
        """A bool or additive mask that broadcasts to (B,heads,rows,K)."""
        num_queries, num_keys = self.raw_q.shape[-2], self.num_keys
        if self.is_causal:  # the kernel aligns the first query with the first key
            positions = torch.arange(num_queries, device=self.raw_q.device)[rows]
            return torch.arange(num_keys, device=self.raw_q.device) <= positions[:, None]
        if self.mask is None:
            return None
        mask = with_heads(self.mask[(None,) * max(0, self.raw_q.dim() - self.mask.dim())])
        if mask.dim() > 4:
            mask = mask.expand(*self.raw_q.shape[:-3], *mask.shape[-3:])
        mask = to_4d(mask)
        mask = mask if mask.shape[1] == 1 else select_heads(mask, heads, mask.shape[1])
        return mask if mask.shape[-2] == 1 else mask[:, :, rows]

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


@dataclass(frozen=True)
class Layout:
    """One letter for each axis of weights, values and output.

    The product sums over the keys. Of the axes other than queries, keys and widths, the last one is the heads and those
    before it are the batch; a single one is the batch. Without a query axis there is one query; several widths are
    flattened into one, and without any the width is 1.
    """

    weights: str
    values: str
    out: str
    keys: str
    queries: str
    """one letter, or none"""
    merged_heads: int = 0
    """the number of heads in the first axis, where batch and heads are merged; 0 if they are not"""

    @property
    def widths(self) -> str:
        """The axes that only values have. Of several, those before the queries are a batch that shares its weights."""
        own = "".join(letter for letter in self.values if letter not in self.weights)
        if len(own) < 2 or not self.queries:
            return own
        return "".join(letter for letter in own if self.out.find(letter) > self.out.find(self.queries)) or own[-1]

    @property
    def batch_axes(self) -> str:
        """Batch and heads."""
        own = "".join(letter for letter in self.weights if letter not in self.keys + self.queries)
        return "".join(letter for letter in self.values if letter not in self.weights + self.widths) + own

    def arrange_weights(self, weights: Tensor, out: Tensor) -> Tensor:
        x = self.arrange(weights, self.weights, self.queries + self.keys, out)
        return to_4d(with_heads(x if self.queries else x.unsqueeze(-2), self.merged_heads))

    def arrange_values(self, values: Tensor, out: Tensor) -> Tensor:
        x = self.arrange(values, self.values, self.keys + self.widths, out)
        return to_4d(with_heads(self.with_one_width(x), self.merged_heads))

    def arrange_out(self, out: Tensor) -> Tensor:
        x = self.arrange(out, self.out, self.queries + self.widths, out)
        return to_4d(with_heads(self.with_one_width(self.with_queries(x)), self.merged_heads))

    def arrange(self, x: Tensor, letters: str, last: str, out: Tensor) -> Tensor:
        """x as (batch_axes, last); a batch axis that x lacks, or that has size 1 in x, is expanded."""
        missing = [letter for letter in self.batch_axes if letter not in letters]
        x = x[(None,) * len(missing)] if missing else x
        x = permute(x, "".join(missing) + letters, self.batch_axes + last)
        batch_shape = [out.shape[self.out.index(letter)] for letter in self.batch_axes]
        if list(x.shape[: len(batch_shape)]) != batch_shape:
            x = x.expand(*batch_shape, *x.shape[len(batch_shape) :])
        return x

    def with_queries(self, x: Tensor) -> Tensor:
        return x if self.queries else x.unsqueeze(x.dim() - len(self.widths))

    def with_one_width(self, x: Tensor) -> Tensor:
        if len(self.widths) == 1:
            return x
        return x.flatten(-len(self.widths)) if self.widths else x.unsqueeze(-1)

    def head_view(self, out: Tensor) -> Tensor:
        """The output as (...,H,Q,*widths). It is a view: writing to it changes the output."""
        x = self.with_queries(permute(out, self.out, self.batch_axes + self.queries + self.widths))
        num_last = 1 + len(self.widths)
        if self.merged_heads:
            return x.unflatten(-1 - num_last, (-1, self.merged_heads))
        return x.unsqueeze(-1 - num_last) if x.dim() < 3 + len(self.widths) else x


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

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", versions_of(self.raw_weights, self.raw_values, self.raw_out))
        object.__setattr__(self, "alias", self.raw_out.detach())

    def check(self, *names: str) -> None:
        check_versions(self, ("raw_weights", "raw_values", "raw_out"), self.versions, names)

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


def versions_of(*tensors: Tensor | None) -> tuple[int | None, ...]:
    """How often each tensor was changed in place; None for an inference tensor, which does not count it."""
    return tuple(None if x is None or x.is_inference() else x._version for x in tensors)


def check_versions(
    call: object, fields: tuple[str, ...], versions: tuple[int | None, ...], names: tuple[str, ...]
) -> None:
    """A tensor that was changed in place after it was recorded is an error, not another number."""
    for name, version in zip(fields, versions, strict=True):
        x = getattr(call, name)
        if name in names and version is not None and x._version != version:
            raise RuntimeError(
                f"the {name.removeprefix('raw_')} of this attention call changed in place after it was recorded, "
                "so that it is no longer the tensor that the model used"
            )


def matmul_layout(weights_dim: int, values_dim: int, weights_first: bool, merged_heads: int = 0) -> Layout | None:
    """The layout of weights @ values, or of values @ weights where tokens are columns."""
    if min(weights_dim, values_dim) < 2:
        return None
    batch = ascii_uppercase[: max(weights_dim, values_dim) - 2]
    weights, values = batch[len(batch) - weights_dim + 2 :], batch[len(batch) - values_dim + 2 :]
    if weights_first:
        return validated(Layout(weights + "qk", values + "kd", batch + "qd", "k", "q", merged_heads))
    return validated(Layout(weights + "kq", values + "dk", batch + "dq", "k", "q", merged_heads))


def einsum_layout(equation: str, weights_first: bool, weights_dim: int, values_dim: int) -> Layout | None:
    """The layout of an einsum of weights and values, or None if it is no weighted sum."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != 2 or not arrow:
        return None
    weights, values = terms if weights_first else terms[::-1]
    weights, values = expand_ellipsis(weights, weights_dim), expand_ellipsis(values, values_dim)
    longer = max(weights, values, key=lambda term: sum(letter in ELLIPSIS_LETTERS for letter in term))
    out = out.replace("...", "".join(letter for letter in longer if letter in ELLIPSIS_LETTERS))
    summed = [letter for letter in weights if letter in values and letter not in out]
    queries = [letter for letter in weights if letter in out and letter not in values]
    if len(summed) != 1:
        return None
    return validated(Layout(weights, values, out, summed[0], queries[-1] if queries else ""))


ELLIPSIS_LETTERS = "αβγδεζηθ"
"""letters for the axes of an ellipsis, from the last axis to the first"""


def expand_ellipsis(term: str, dim: int) -> str:
    num_hidden = dim - len(term.replace("...", ""))
    return term.replace("...", ELLIPSIS_LETTERS[:num_hidden][::-1])


def validated(layout: Layout) -> Layout | None:
    """The layout if it is a weighted sum over keys only, without a repeated letter; otherwise None."""
    expected = layout.batch_axes + layout.queries + layout.widths
    is_weighted_sum = sorted(expected) == sorted(layout.out) and layout.keys in layout.values
    has_unique_letters = all(len(set(term)) == len(term) for term in (layout.weights, layout.values, layout.out))
    return layout if is_weighted_sum and has_unique_letters else None


def permute(x: Tensor, letters: str, order: str) -> Tensor:
    return x if letters == order else x.permute([letters.index(letter) for letter in order])


def with_heads(x: Tensor, merged_heads: int = 0) -> Tensor:
    """(...,L,D) -> (...,H,L,D): the merged heads, or a single head if x has fewer than four axes."""
    if merged_heads:
        return x.unflatten(-3, (-1, merged_heads))
    return x.unsqueeze(-3) if x.dim() < 4 else x


def to_4d(x: Tensor) -> Tensor:
    """(...,H,L,D) -> (B,H,L,D). A tensor of four axes is returned itself, so that autograd still knows it."""
    return x if x.dim() == 4 else x.reshape(-1, *x.shape[-3:])


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
    index = (..., heads, *(slice(None),) * num_last)
    view[index] = new.to(view.dtype).reshape(shape)
