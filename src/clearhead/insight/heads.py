"""Edit attention heads during a forward pass, and measure what each head does.

    with edit(model, "blocks.2.attn", head=1, pattern="uniform"):
        changed = model(images)

`entropy`, `distance`, `diagonality` and `class_token_mass` describe weights (B,H,Q,K) by one number per head (H,), a
mean over examples and queries; rows without any visible key are left out. `head_importance` edits each head in turn.
Dims: B batch, H heads, Q queries, K keys, L tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.insight.calls import AttentionCall, check_heads
from clearhead.insight.capture import LOOKED_FOR, capture_attention, module_names, unknown_name
from clearhead.insight.trace import look

Pattern = Literal["uniform", "zero"] | Tensor | Callable[[Tensor], Tensor]


@contextmanager
def edit(
    model: nn.Module, name: str, head: int | Sequence[int] | None = None, pattern: Pattern = "zero"
) -> Iterator[None]:
    """Inside the block, the weights of some heads (default: all) of one layer are replaced; others stay bit-identical.

    "zero" removes the output of the head; "uniform" gives equal weights to all keys that may be seen. A tensor must
    broadcast to (B,heads,Q,K), and a function maps weights of that shape to new ones; neither is
    normalized, so rows need not sum to 1.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"edit needs an nn.Module, got {type(model).__name__}")
    if isinstance(pattern, str) and pattern not in ("uniform", "zero"):
        raise ValueError(f'pattern must be "uniform", "zero", a tensor or a function, got {pattern!r}')
    if name.partition("#")[0] not in module_names(model):
        raise unknown_name(name, module_names(model), "module")
    captured: list[str] = []

    def receive(call_name: str, call: AttentionCall, kernel: str, note: str) -> Tensor:
        captured.append(call_name)
        if call_name != name:
            return call.raw_out
        num_heads = call.arrange_out(call.raw_out).shape[1]
        heads = check_heads(head, num_heads, name)
        weights = new_weights(call, heads, pattern)
        if call.dropout:
            weights = F.dropout(weights, call.dropout)
        values = call.values(heads)
        return call.replace_heads(heads, weights.to(values.dtype) @ values)

    with capture_attention(model, receive) as capture:
        yield
    if capture.stack.num_passes and name not in captured:
        known = sorted(set(captured), key=captured.index)
        raise unknown_name(name, known) if known else LookupError(f"no attention was found; looked for {LOOKED_FOR}")


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
            f"new weights must broadcast to (B,heads,Q,K) = {tuple(weights.shape)}, got {tuple(new.shape)}"
        ) from None


@torch.no_grad()
def head_importance(
    model: nn.Module,
    inputs: Tensor | Sequence[Any],
    score: Callable[[Any], Tensor],
    *,
    pattern: Literal["zero", "uniform"] = "zero",
    names: Sequence[str] | None = None,
) -> Tensor:
    """score(output with the head edited) - score(output) for every head: (layers, heads), one pass for each head.

    A row for each layer that `look` finds, or for each of `names`. `score` maps the output to one number, such as a
    loss or a logit. `inputs` is a tensor, or a tuple of the model's arguments. Layers with fewer heads are padded with
    NaN.
    """
    args = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    trace = look(model, *args)
    baseline = to_number(score(trace.output))
    layers = list(trace) if names is None else list(names)
    head_counts = [trace[name].num_heads for name in layers]
    changes = torch.full((len(layers), max(head_counts)), torch.nan)
    for row, (name, num_heads) in enumerate(zip(layers, head_counts, strict=True)):
        for head in range(num_heads):
            with edit(model, name, head=head, pattern=pattern):
                changes[row, head] = to_number(score(model(*args))) - baseline
    return changes


def to_number(score: Tensor) -> float:
    if not isinstance(score, Tensor) or score.numel() != 1:
        received = f"a tensor of shape {tuple(score.shape)}" if isinstance(score, Tensor) else repr(score)
        raise ValueError(
            f"score must return a single number, got {received}; try score=lambda output: loss(output).mean()"
        )
    return score.item()


def entropy(weights: Tensor) -> Tensor:
    """-sum(w log w) in nats: 0 if a head attends to a single key, log K if it attends to all keys equally."""
    return mean_of_rows(torch.special.entr(weights).sum(-1), weights)


def distance(weights: Tensor, grid: tuple[int, int] | None = None, *, class_token: bool = False) -> Tensor:
    """The mean attention distance: |i - j| weighted by attention, or the Euclidean distance of patches on a grid.

    A class token has no position: with one, the first query and key are left out and the rows are normalized again.
    """
    if class_token:
        weights = weights[..., 1:, 1:]
    num_queries, num_keys = weights.shape[-2:]
    pairwise = pairwise_distances(num_keys, grid).to(weights)
    if num_queries != num_keys:
        raise ValueError(
            f"distance needs as many queries as keys, got {num_queries} queries and {num_keys} keys; "
            "for cross-attention, see diagonality"
        )
    normalized = weights / weights.sum(-1).clamp(min=torch.finfo(weights.dtype).tiny)[..., None]
    return mean_of_rows((normalized * pairwise).sum(-1), weights)


def pairwise_distances(length: int, grid: tuple[int, int] | None = None) -> Tensor:
    """(L,L) between the positions of a sequence, or between the cells of a grid, in row-major order."""
    if grid is None:
        positions = torch.arange(length)[:, None].float()
    else:
        if grid[0] * grid[1] != length:
            raise ValueError(
                f"a grid of {grid[0]} x {grid[1]} has {grid[0] * grid[1]} patches, got {length} tokens; "
                "if there is a class token, pass class_token=True"
            )
        positions = torch.cartesian_prod(torch.arange(grid[0]), torch.arange(grid[1])).float()
    return (positions[:, None] - positions[None]).square().sum(-1).sqrt()


def diagonality(weights: Tensor, within: float = 0.0) -> Tensor:
    """The weight on the diagonal, from the first query and key to the last, and on `within` keys on either side of it.

    diagonality(weights.flip(-1)) is the weight on the antidiagonal, where a head attends that reverses a sequence.
    """
    num_queries, num_keys = weights.shape[-2:]
    middle = torch.linspace(0, num_keys - 1, num_queries, device=weights.device)
    is_near = (torch.arange(num_keys, device=weights.device) - middle[:, None]).abs() <= within + 0.5
    return mean_of_rows((weights * is_near).sum(-1), weights)


def class_token_mass(weights: Tensor, index: int = 0) -> Tensor:
    """The weight that queries give to the class token."""
    return mean_of_rows(weights[..., index], weights)


def mean_of_rows(values: Tensor, weights: Tensor) -> Tensor:
    """(B,H,Q) -> (H,), the mean over the rows with any weight."""
    has_weight = weights.sum(-1) > 0
    return values.where(has_weight, 0).sum((0, 2)) / has_weight.sum((0, 2)).clamp(min=1)
