"""Changing the weights of a head while a model runs, to see what its output owes to them.

with edit(model, "blocks.2.attn", head=1, pattern="uniform"):
    changed = model(images)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.insight.calls import AttentionCall
from clearhead.insight.capture import LOOKED_FOR, captured, paths_of, unknown
from clearhead.insight.look import check_heads

Pattern = Literal["uniform", "zero"] | Tensor | Callable[[Tensor], Tensor]


@contextmanager
def edit(
    model: nn.Module, name: str, head: int | Sequence[int] | None = None, pattern: Pattern = "zero"
) -> Iterator[None]:
    """Inside the block, these heads (all if none is named) have other weights; the other heads are bit-identical.

    "zero": nothing is attended to, so the head says nothing. "uniform": equal shares for all keys that may be seen.
    A tensor that broadcasts to (B,heads,Q,K), or a function from the head's weights of that shape to new ones. They are
    taken as they are: rows need not sum to 1.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"edit needs an nn.Module, got {type(model).__name__}; pass the model itself")
    if isinstance(pattern, str) and pattern not in ("uniform", "zero"):
        raise ValueError(f'pattern must be "uniform", "zero", a tensor or a function, got {pattern!r}; choose one')
    if name.partition("#")[0] not in paths_of(model):
        raise unknown(name, paths_of(model), "module")
    found: list[str] = []

    def receive(place: str, call: AttentionCall, kernel: str, note: str) -> Tensor:
        found.append(place)
        if place != name:
            return call.raw_out
        num_heads = call.arranged(call.raw_out).shape[1]
        heads = check_heads(head, num_heads, name)
        weights = new_weights(call, heads, pattern)
        if call.dropout:
            weights = F.dropout(weights, call.dropout)
        values = call.values(heads)
        return call.with_replaced(heads, weights.to(values.dtype) @ values)

    with captured(model, receive) as capture:
        yield
    if capture.stack.n_passes and name not in found:
        known = sorted(set(found), key=found.index)
        raise unknown(name, known) if known else LookupError(f"no attention was seen; looked for {LOOKED_FOR}")


def new_weights(call: AttentionCall, heads: list[int], pattern: Pattern) -> Tensor:
    """(B,heads,Q,K)"""
    weights = call.weights(heads, slice(None))
    if isinstance(pattern, Tensor):
        new = pattern.to(weights)
    elif callable(pattern):
        new = pattern(weights)
    elif pattern == "zero":
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


# What kind of head is it, and does the model need it?
#
# The first four look at weights (B,H,Q,K) and answer with one number per head (H,), a mean over examples and queries;
# rows that see nothing do not count. `head_importance` asks the model itself.
# Dims: B batch, H heads, Q queries, K keys, L tokens.


def entropy(weights: Tensor) -> Tensor:
    """-sum w log w, in nats: 0 for a head that looks at one key, log K for one that looks at all alike."""
    return mean_of_rows(torch.special.entr(weights).sum(-1), weights)


def distance(weights: Tensor, grid: tuple[int, int] | None = None, *, class_token: bool = False) -> Tensor:
    """How far away a head looks: the mean of |i - j| by weight, or on a grid of patches the straight line between them.

    A class token stands nowhere: with one, the first query and key are left out, and the rest of each row sums to 1.
    """
    if class_token:
        weights = weights[..., 1:, 1:]
    num_queries, num_keys = weights.shape[-2:]
    steps = distances(num_keys, grid).to(weights)
    if num_queries != num_keys:
        raise ValueError(
            f"distance is between tokens of one sequence, got {num_queries} queries and {num_keys} keys; "
            "for cross-attention, see diagonality"
        )
    totals = weights.sum(-1)
    shares = weights / totals.clamp(min=torch.finfo(weights.dtype).tiny)[..., None]
    return mean_of_rows((shares * steps).sum(-1), weights)


def distances(n: int, grid: tuple[int, int] | None = None) -> Tensor:
    """(L,L) between the places 0, 1, 2 ... of a line, or between the cells of a grid, row by row."""
    if grid is None:
        places = torch.arange(n)[:, None].float()
    else:
        if grid[0] * grid[1] != n:
            raise ValueError(
                f"a grid of {grid[0]} x {grid[1]} has {grid[0] * grid[1]} patches, got {n} tokens; "
                "is there a class token? then class_token=True"
            )
        places = torch.cartesian_prod(torch.arange(grid[0]), torch.arange(grid[1])).float()
    return (places[:, None] - places[None]).square().sum(-1).sqrt()


def diagonality(weights: Tensor, within: float = 0.0) -> Tensor:
    """The share of weight on the diagonal, from the first key for the first query to the last for the last.

    `within` counts as many keys beside it as well. With weights.flip(-1) it is the share on the other diagonal, where a
    head that reverses looks.
    """
    num_queries, num_keys = weights.shape[-2:]
    middle = torch.linspace(0, num_keys - 1, num_queries, device=weights.device)
    near = (torch.arange(num_keys, device=weights.device) - middle[:, None]).abs() <= within + 0.5
    return mean_of_rows((weights * near).sum(-1), weights)


def class_token_mass(weights: Tensor, place: int = 0) -> Tensor:
    """The weight that queries give to the class token."""
    return mean_of_rows(weights[..., place], weights)


def mean_of_rows(values: Tensor, weights: Tensor) -> Tensor:
    """(B,H,Q) -> (H,), over the rows that see something."""
    sees = weights.sum(-1) > 0
    return values.where(sees, 0).sum((0, 2)) / sees.sum((0, 2)).clamp(min=1)


@torch.no_grad()
def head_importance(
    model: nn.Module,
    inputs: Tensor | Sequence[Any],
    score: Callable[[Any], Tensor],
    *,
    pattern: Literal["zero", "uniform"] = "zero",
    names: Sequence[str] | None = None,
) -> Tensor:
    """score(output) without a head, minus score(output) with all: (layers, heads), one row for each layer that `look`
    sees, or for each of `names`.

    `score` makes one number of the output: a loss, or a class's logit. `inputs` is what the model takes, a tuple if
    that is more than one. One pass for each head. A layer with fewer heads than others has nan in place of the rest.
    """
    from clearhead.insight.look import look

    args = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    seen = look(model, *args)
    whole = one_number(score(seen.output))
    chosen = list(seen) if names is None else list(names)
    counts = [seen[name].num_heads for name in chosen]
    changes = torch.full((len(chosen), max(counts)), torch.nan)
    for row, (name, num_heads) in enumerate(zip(chosen, counts, strict=True)):
        for head in range(num_heads):
            with edit(model, name, head=head, pattern=pattern):
                changes[row, head] = one_number(score(model(*args))) - whole
    return changes


def one_number(value: Tensor) -> float:
    if not isinstance(value, Tensor) or value.numel() != 1:
        came = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"a score is one number, got {came}; take its mean, score=lambda output: loss(output).mean()")
    return value.item()
