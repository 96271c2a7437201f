"""Changing the weights of a head while a model runs, to see what its output owes to them.

with edit(model, "blocks.2.attn", head=1, to="uniform"):
    changed = model(images)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.insight.addresses import paths_of, unknown
from clearhead.insight.calls import Call
from clearhead.insight.capture import LOOKED_FOR, captured
from clearhead.insight.seen import check_heads

New = Literal["uniform", "zero"] | Tensor | Callable[[Tensor], Tensor]


@contextmanager
def edit(model: nn.Module, address: str, head: int | Sequence[int] | None = None, to: New = "zero") -> Iterator[None]:
    """Inside the block, these heads (all if none is named) have other weights; the other heads are bit-identical.

    "zero": nothing is attended to, so the head says nothing. "uniform": equal shares for all keys that may be seen.
    A tensor that broadcasts to (B,heads,Q,K), or a function from the head's weights of that shape to new ones. They are
    taken as they are: rows need not sum to 1.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"edit needs an nn.Module, got {type(model).__name__}; pass the model itself")
    if isinstance(to, str) and to not in ("uniform", "zero"):
        raise ValueError(f'to must be "uniform", "zero", a tensor or a function, got {to!r}; choose one')
    if address.partition("#")[0] not in paths_of(model):
        raise unknown(address, paths_of(model), "module")
    found: list[str] = []

    def receive(place: str, call: Call, kernel: str, note: str) -> Tensor:
        found.append(place)
        if place != address:
            return call.raw_out
        n_heads = call.arranged(call.raw_out).shape[1]
        heads = check_heads(head, n_heads, address)
        weights = new_weights(call, heads, to)
        if call.dropout:
            weights = F.dropout(weights, call.dropout)
        values = call.values(heads)
        return call.with_replaced(heads, weights.to(values.dtype) @ values)

    with captured(model, receive) as capture:
        yield
    if capture.places.n_passes and address not in found:
        known = sorted(set(found), key=found.index)
        raise unknown(address, known) if known else LookupError(f"no attention was seen; looked for {LOOKED_FOR}")


def new_weights(call: Call, heads: list[int], to: New) -> Tensor:
    """(B,heads,Q,K)"""
    weights = call.weights(heads, slice(None))
    if isinstance(to, Tensor):
        new = to.to(weights)
    elif callable(to):
        new = to(weights)
    elif to == "zero":
        new = torch.zeros_like(weights)
    else:
        allowed = call.allowed(heads).to(weights.dtype).expand_as(weights)
        new = allowed / allowed.sum(-1, keepdim=True).clamp(min=1)
    try:
        return new.expand_as(weights)
    except RuntimeError:
        raise ValueError(
            f"new weights must broadcast to (B,heads,Q,K) = {tuple(weights.shape)}, got {tuple(new.shape)}; "
            "give one row for each query and one number for each key"
        ) from None
