"""Which axis is which, where weights multiply values; and everything brought to (B,H,Q,K), (B,H,K,D), (B,H,Q,D).

Models write `weights @ values` in many orders: (B,H,Q,K), batch and heads joined, tokens as columns, einsum. A Layout
has one letter for each axis of weights, values and output; the axis over which the product sums is that of the keys.
Of the axes that remain, the last is the heads and those before it are the batch; a single one is the batch.
Dims: B batch, H heads, Q queries, K keys, D width of values.
"""

import math
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Protocol

import torch
from torch import Tensor

from clearhead.nn.attention import in_float32, softargmax


@dataclass(frozen=True)
class Layout:
    weights: str
    values: str
    out: str
    keys: str
    queries: str
    n_joined: int = 0
    """how many heads the first axis holds beside the batch, where the two are joined; 0 if they are not"""

    @property
    def others(self) -> str:
        return "".join(letter for letter in self.weights if letter not in self.keys + self.queries)

    @property
    def width(self) -> str:
        return next(letter for letter in self.values if letter not in self.weights)

    def of_weights(self, weights: Tensor, out: Tensor) -> Tensor:
        return self.arranged(weights, self.weights, self.queries + self.keys, out)

    def of_values(self, values: Tensor, out: Tensor) -> Tensor:
        return self.arranged(values, self.values, self.keys + self.width, out)

    def of_out(self, out: Tensor) -> Tensor:
        return self.arranged(out, self.out, self.queries + self.width, out)

    def arranged(self, x: Tensor, letters: str, last: str, out: Tensor) -> Tensor:
        """x with the axes (others, last), as (B,H,...); an axis that x lacks, or has once for all, is repeated."""
        absent = [letter for letter in self.others if letter not in letters]
        x = x[(None,) * len(absent)] if absent else x
        x = permuted(x, "".join(absent) + letters, self.others + last)
        lead = [out.shape[self.out.index(letter)] for letter in self.others]
        if list(x.shape[:-2]) != lead:
            x = x.expand(*lead, *x.shape[-2:])
        return four_axes(with_heads(x, self.n_joined))

    def heads_of(self, out: Tensor) -> Tensor:
        """A view of the output as (..., H, Q, D): what is written there is written into it."""
        return with_heads(permuted(out, self.out, self.others + self.queries + self.width), self.n_joined)


def permuted(x: Tensor, letters: str, wanted: str) -> Tensor:
    return x if letters == wanted else x.permute([letters.index(letter) for letter in wanted])


def with_heads(x: Tensor, n_joined: int = 0) -> Tensor:
    """(..., L, D) -> (..., H, L, D): one head where no axis is left for heads."""
    if n_joined:
        return x.unflatten(-3, (-1, n_joined))
    return x.unsqueeze(-3) if x.dim() < 4 else x


def four_axes(x: Tensor) -> Tensor:
    """(..., H, L, D) -> (B,H,L,D). A tensor that has that shape is returned itself, with its place in the graph."""
    return x if x.dim() == 4 else x.reshape(-1, *x.shape[-3:])


def matmul_layout(n_weights: int, n_values: int, weights_first: bool, n_joined: int = 0) -> Layout | None:
    """weights @ values, or values @ weights where tokens are columns; the numbers of their axes, at least 2 each."""
    if min(n_weights, n_values) < 2:
        return None
    batch = ascii_uppercase[: max(n_weights, n_values) - 2]
    mine, theirs = batch[len(batch) - n_weights + 2 :], batch[len(batch) - n_values + 2 :]
    if weights_first:
        return checked(Layout(mine + "qk", theirs + "kd", batch + "qd", "k", "q", n_joined))
    return checked(Layout(mine + "kq", theirs + "dk", batch + "dq", "k", "q", n_joined))


def einsum_layout(equation: str, first: bool, n_weights: int, n_values: int) -> Layout | None:
    """einsum of two tensors, of which the weights are the first or the second; None if it is no weighted sum."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != 2 or not arrow:
        return None
    weights, values = terms if first else terms[::-1]
    weights, values = unfolded(weights, n_weights), unfolded(values, n_values)
    hidden = max(weights, values, key=lambda term: sum(letter in DOTS for letter in term))
    out = out.replace("...", "".join(letter for letter in hidden if letter in DOTS))
    summed = [letter for letter in weights if letter in values and letter not in out]
    queries = [letter for letter in weights if letter in out and letter not in values]
    if len(summed) != 1 or not queries:
        return None
    return checked(Layout(weights, values, out, summed[0], queries[-1]))


DOTS = "αβγδεζηθ"
"""letters for the axes behind an ellipsis, from the last one on"""


def unfolded(term: str, n_axes: int) -> str:
    n_hidden = n_axes - len(term.replace("...", ""))
    return term.replace("...", DOTS[:n_hidden][::-1])


def checked(layout: Layout) -> Layout | None:
    """None unless every axis is used as in a weighted sum: one width, nothing summed but the keys, no letter twice."""
    widths = [letter for letter in layout.values if letter not in layout.weights]
    expected = layout.others + layout.queries + "".join(widths)
    is_sum = len(widths) == 1 and sorted(expected) == sorted(layout.out)
    is_clear = all(len(set(term)) == len(term) for term in (layout.weights, layout.values, layout.out))
    return layout if is_sum and is_clear else None


# One attention as a model computed it, with what it takes to show any of its weights afterwards.
#
# `Fused` is a call of the kernel: it keeps queries, keys, values and the mask, and weights are computed when asked,
# for
# the heads and rows asked. `Written` is a softmax whose result multiplied values: the model made its weights itself.
# Dims: B batch, H heads, Q queries, K keys, D width of queries and keys, Dv of values.


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
        """The output as the model got it, in the model's own shape."""

    @property
    def dropout(self) -> float: ...

    @property
    def num_keys(self) -> int: ...

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
class SDPACall:
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
    def num_keys(self) -> int:
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
        num_queries, num_keys = self.raw_q.shape[-2], self.num_keys
        if self.is_causal:  # the kernel aligns it at the first key
            places = torch.arange(num_queries, device=self.raw_q.device)[rows]
            return torch.arange(num_keys, device=self.raw_q.device) <= places[:, None]
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
class SoftmaxCall:
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
    def num_keys(self) -> int:
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


def of_heads(x: Tensor, heads: list[int], num_heads: int) -> Tensor:
    """(B,H,...) -> (B,heads,...). Where x has fewer heads than num_heads, each serves a group. One head is a view."""
    group = max(1, num_heads // x.shape[1]) if num_heads >= x.shape[1] else 1
    own = [head // group for head in heads]
    if own == list(range(x.shape[1])):
        return x
    return x[:, own[0] : own[0] + 1] if len(own) == 1 else x[:, own]


def repeated(x: Tensor, num_heads: int) -> Tensor:
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], 1)


def write(view: Tensor, heads: list[int], new: Tensor) -> None:
    """new (B,heads,Q,D) into (..., H,Q,D), in place."""
    view[..., heads, :, :] = new.to(view.dtype).reshape(*view.shape[:-3], len(heads), *view.shape[-2:])
