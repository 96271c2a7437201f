"""Which axis is which, where weights multiply values; and everything brought to (B,H,Q,K), (B,H,K,D), (B,H,Q,D).

Models write `weights @ values` in many orders: (B,H,Q,K), batch and heads joined, tokens as columns, einsum. A Layout
has one letter for each axis of weights, values and output; the axis over which the product sums is that of the keys.
Of the axes that remain, the last is the heads and those before it are the batch; a single one is the batch.
Dims: B batch, H heads, Q queries, K keys, D width of values.
"""

from dataclasses import dataclass
from string import ascii_uppercase

from torch import Tensor


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
