"""What was seen of a forward pass: the attention of each layer, by its name.

Dims: B batch, H heads, Q queries, K keys, D width of queries and keys, Dv of values.
"""

from collections.abc import ItemsView, Iterator, KeysView, Sequence, ValuesView
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clearhead.insight.calls import AttentionCall, Rows
from clearhead.insight.capture import LOOKED_FOR, captured, listed, unknown

PIECE = 2**20
"""how many weights are computed at a time"""


@dataclass(frozen=True, eq=False, repr=False)
class AttentionRecord:
    """One attention. Its weights are computed when asked, for the heads and rows asked."""

    name: str
    kernel: str
    """sdpa, softmax, or nn.MultiheadAttention"""
    note: str
    """what was different for this pass, and whether there was dropout"""
    call: AttentionCall

    @property
    def q(self) -> Tensor | None:
        """(B,H,Q,D); None where the model wrote its own softmax"""
        return self.call.q

    @property
    def k(self) -> Tensor | None:
        """(B,H,K,D), with a head for each head of the queries; None where the model wrote its own softmax"""
        return self.call.k

    @property
    def v(self) -> Tensor:
        """(B,H,K,Dv)"""
        return self.call.v

    @property
    def out(self) -> Tensor:
        """(B,H,Q,Dv): what the model really got, before heads are joined. `gradient` is its gradient."""
        return self.call.arranged(self.call.raw_out)

    @property
    def batch(self) -> int:
        return self.out.shape[0]

    @property
    def num_heads(self) -> int:
        return self.out.shape[1]

    @property
    def num_queries(self) -> int:
        return self.out.shape[2]

    @property
    def num_keys(self) -> int:
        return self.call.num_keys

    def weights(self, head: int | Sequence[int] | None = None, rows: Sequence[int] | slice | None = None) -> Tensor:
        """(B,H,Q,K), or only some heads and queries of it; the weights before dropout."""
        heads = check_heads(head, self.num_heads, self.name)
        places = torch.tensor(check_rows(rows, self.num_queries, self.name), dtype=torch.long)
        n_rows = max(1, PIECE // max(1, self.batch * len(heads) * self.num_keys))
        if len(places) <= n_rows:
            return self.call.weights(heads, slice_of(places))
        return torch.cat([self.call.weights(heads, slice_of(piece)) for piece in places.split(n_rows)], dim=2)

    def gradient(self, score: Tensor) -> Tensor:
        """d score / d out (B,H,Q,Dv), for a pass that was seen with gradients on. Its product with vᵀ is d weights."""
        (gradient,) = torch.autograd.grad(score, self.call.raw_out, retain_graph=True)
        return self.call.arranged(gradient)

    def verify(self) -> float:
        """The largest difference between weights @ v and what the model got; nan where either is no number."""
        largest, heads, out = self.out.new_zeros(()), list(range(self.num_heads)), self.out
        n_rows = max(1, PIECE // max(1, self.batch * self.num_heads * self.num_keys))
        with torch.no_grad():
            values = self.call.values(heads)
            for start in range(0, self.num_queries, n_rows):
                rows = slice(start, start + n_rows)
                difference = self.call.weights(heads, rows).to(values.dtype) @ values - out[:, :, rows]
                if difference.numel():
                    largest = torch.maximum(largest, difference.abs().amax())  # of a nan and a number, nan
        return largest.item()

    def __repr__(self) -> str:
        what = f"{self.num_heads} heads, {self.num_queries} x {self.num_keys}"
        return f"{self.name}: {self.kernel}, {what}" + (f" ({self.note})" if self.note else "")


class AttentionTrace:
    """The attention of one forward pass, by name, in the order in which it happened; and the model's output."""

    def __init__(self, output: Any, records: dict[str, AttentionRecord], names: Sequence[str]):
        self.output, self.records, self.names = output, records, list(names)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[str]:
        return iter(self.records)

    def keys(self) -> KeysView[str]:
        return self.records.keys()

    def values(self) -> ValuesView[AttentionRecord]:
        return self.records.values()

    def items(self) -> ItemsView[str, AttentionRecord]:
        return self.records.items()

    def __contains__(self, name: object) -> bool:
        return name in self.records

    def __getitem__(self, name: str) -> AttentionRecord:
        if name in self.records:
            return self.records[name]
        if name in self.names:
            raise LookupError(f"{name!r} was not kept, only {listed(list(self.records))}; look with keep=[{name!r}]")
        raise unknown(name, self.records)

    def verify(self) -> dict[str, float]:
        """The largest |weights @ v - what the model got| of each layer. Layers with dropout are left out."""
        return {name: layer.verify() for name, layer in self.records.items() if not layer.call.dropout}

    def __repr__(self) -> str:
        head = ["name", "kernel", "heads", "queries x keys", "note"]
        lines = [
            [layer.name, layer.kernel, str(layer.num_heads), f"{layer.num_queries} x {layer.num_keys}", layer.note]
            for layer in self.records.values()
        ]
        n_left = len(self.names) - len(self.records)
        ending = [f"and {n_left} more, not kept"] if n_left else []
        return "\n".join([*aligned([head, *lines]), *ending])


def aligned(table: list[list[str]]) -> list[str]:
    """Words to the left, numbers to the right."""
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    to_right = {2, 3}
    cells = [
        [x.rjust(w) if i in to_right else x.ljust(w) for i, (x, w) in enumerate(zip(line, widths, strict=True))]
        for line in table
    ]
    return ["  ".join(line).rstrip() for line in cells]


def check_heads(head: int | Sequence[int] | None, num_heads: int, name: str) -> list[int]:
    if head is None:
        return list(range(num_heads))
    heads = [int(head)] if isinstance(head, Integral) else [int(one) for one in head]  # type: ignore[union-attr]
    for one in heads:
        if not 0 <= one < num_heads:
            raise LookupError(f"no head {one} at {name!r}; its heads are {spelled(num_heads)}")
    return heads


def check_rows(rows: Sequence[int] | slice | None, num_queries: int, name: str) -> list[int]:
    if rows is None or isinstance(rows, slice):
        return list(range(num_queries)[rows or slice(None)])
    rows = [int(rows)] if isinstance(rows, Integral) else [int(row) for row in rows]
    for row in rows:
        if not -num_queries <= row < num_queries:
            raise LookupError(f"no row {row} at {name!r}; a row is a query, and its queries are {spelled(num_queries)}")
    return [row % num_queries for row in rows]


def spelled(n: int) -> str:
    return f"0 to {n - 1}" if n > 1 else "0 alone" if n else "none"


def slice_of(places: Tensor) -> Rows:
    """Neighbouring places as a slice, which makes a view."""
    if len(places) and bool((places.diff() == 1).all()):
        return slice(int(places[0]), int(places[-1]) + 1)
    return places


# Looking inside any PyTorch model: one ordinary forward pass, and the attention of every layer and head.
#
# seen = look(model, images)
# seen.output                                       # what the model answered
# seen                                              # a table: name, kernel, heads, queries x keys
# seen["blocks.3.attn"].weights(head=1, rows=[0])   # (B,1,1,K): computed only now, only this
# seen.verify()                                     # largest |weights @ v - what the kernel returned| per layer


def look(
    model: nn.Module, *args: Any, keep: Literal["all", "last"] | Sequence[str] = "all", **kwargs: Any
) -> AttentionTrace:
    """model(*args, **kwargs), and what its attention did. The model, its output and its gradients are as without it.

    `keep` says of which layers the tensors are kept: "all", the "last", or a list of names.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"look needs an nn.Module and its inputs, got {type(model).__name__}; pass the model itself")
    if isinstance(keep, str) and keep not in ("all", "last"):
        raise ValueError(f'keep must be "all", "last" or a list of names, got {keep!r}; try keep=[{keep!r}]')
    names: list[str] = []
    records: dict[str, AttentionRecord] = {}

    def receive(name: str, call: AttentionCall, kernel: str, note: str) -> Tensor:
        if keep == "last":
            records.clear()
        if isinstance(keep, str) or name in keep:
            records[name] = AttentionRecord(name, kernel, note, call)
        names.append(name)
        return call.raw_out

    with captured(model, receive):
        output = model(*args, **kwargs)
    if not names:
        raise LookupError(f"no attention was seen in {type(model).__name__}; looked for {LOOKED_FOR}")
    for name in () if isinstance(keep, str) else keep:
        if name not in names:
            raise unknown(name, names)
    return AttentionTrace(output, records, names)
