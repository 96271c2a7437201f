"""Does an output know what it must not? Change the future, or the padding, and see whether it moves.

A model that sees the answer scores well and learns nothing; one that sees its padding answers differently in another
batch. Both are found from outside, whatever the model is. Random state is not touched, gradients are not kept; the
model must be in its evaluation stage. Dims: B batch, L length, Q outputs, V vocabulary.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LogitsOf = Callable[[Tensor], Tensor]
"""ids (B,L) -> logits (B,Q,V)"""

ROUNDINGS = 4
"""a number has moved if it differs by more than so many roundings of the largest one: a mask leaves exact zeros"""

FILLED = 1e6
"""a number that is so many times larger than all that moved was filled in (-1e9 for what is not allowed)"""


@dataclass(frozen=True)
class Leak:
    """An output that moved, and the token that moved it. str() is the sentence that names the two."""

    kind: Literal["future", "padding"]
    example: int
    output: int
    """the place of the output that moved"""
    changed: int
    """the place of the token that was changed"""
    by: float
    """the largest change of a logit"""
    changed_example: int
    """the example of the token that was changed: the same, unless examples of a batch see each other"""

    def __str__(self) -> str:
        what = "token" if self.kind == "future" else "padding"
        other = f" of example {self.changed_example}" if self.changed_example != self.example else ""
        where = "" if other or self.kind == "padding" else ", after it,"
        return (
            f"output {self.output} of example {self.example} moves by {self.by:.3g} "
            f"when the {what} at place {self.changed}{other}{where} is changed"
        )


@torch.no_grad()
def future_leak(logits_of: LogitsOf, ids: Tensor, n_ids: int) -> Leak | None:
    """The leak from a later token to an earlier output, or None. Each place is changed once, in one of the examples.

    That takes about L / B passes. Logits must be (B,L,V): output i may depend on the tokens up to place i.
    """
    other = other_ids(ids, n_ids)
    before = same_twice(logits_of, ids)
    n_examples, length = ids.shape
    if before.shape[1] != length:
        raise ValueError(
            f"to look for a leak of the future, logits must be (B,L,V) with an output for each of the {length} tokens, "
            f"got {tuple(before.shape)}; pass what a decoder answers"
        )
    here = torch.arange(length, device=ids.device)
    for first in range(1, length, n_examples):
        places = first + torch.arange(n_examples, device=ids.device)[:, None]  # one for each example
        changes = here == places
        moved = movement(before, logits_of(torch.where(changes, other, ids)))
        moved = moved.where(here < places, 0.0)
        if moved.any():
            return named("future", logits_of, ids, other, before, moved, changes)
    return None


@torch.no_grad()
def padding_leak(
    logits_of: LogitsOf, ids: Tensor, lengths: Tensor, n_ids: int, *, output_lengths: Tensor | None = None
) -> Leak | None:
    """The leak from what lies behind an example's length (B,) to one of its outputs, or None. Three passes.

    Outputs behind the length don't count. Where outputs have places of their own (a decoder's, while the source is
    padded), output_lengths says how many of each example count. Logits may be (B,V) too: then all count.
    """
    other = other_ids(ids, n_ids)
    before = same_twice(logits_of, ids)
    changes = behind(lengths, ids.shape[1], ids.device)
    counted = lengths if output_lengths is None else output_lengths
    moved = movement(before, logits_of(torch.where(changes, other, ids)))
    if before.dim() > 2:
        moved = moved.masked_fill(behind(counted, moved.shape[1], ids.device), 0.0)
    return named("padding", logits_of, ids, other, before, moved, changes) if moved.any() else None


def behind(lengths: Tensor, length: int, device: torch.device) -> Tensor:
    """(B,L): True at the places behind each length."""
    return torch.arange(length, device=device) >= lengths.to(device)[:, None]


def other_ids(ids: Tensor, n_ids: int) -> Tensor:
    """Another id for each, the same ones each time."""
    if ids.dim() != 2 or ids.is_floating_point():
        raise ValueError(f"ids must be whole numbers (B,L), got {ids.dtype} {tuple(ids.shape)}; pass a batch of tokens")
    if n_ids < 2:
        raise ValueError(f"to change a token there must be another one, got n_ids={n_ids}; pass the vocabulary's size")
    steps = torch.randint(1, n_ids, ids.shape, generator=torch.Generator().manual_seed(0))
    return (ids + steps.to(ids)) % n_ids


def same_twice(logits_of: LogitsOf, ids: Tensor) -> Tensor:
    """The logits, which must not depend on chance."""
    first, second = logits_of(ids), logits_of(ids)
    if movement(first, second).any():
        raise ValueError(
            "a leak can be seen only where the same tokens give the same logits, got two different answers; "
            "call model.eval() first, so that nothing is dropped at random"
        )
    return first


def movement(before: Tensor, after: Tensor, roundings: float = ROUNDINGS) -> Tensor:
    """How far each output moved, (B,Q,...) -> (B,Q), or (B,V) -> (B,1): its largest change; 0 for roundings alone.

    NaN in both is no movement; in one of them it is an infinite one.
    """
    if before.dim() < 3:
        before, after = before[:, None], after[:, None]
    finite = before.isfinite() & after.isfinite()
    apart = (after - before).abs().masked_fill(~finite, torch.inf)
    apart = apart.masked_fill((before == after) | (before.isnan() & after.isnan()), 0.0)
    apart, size = apart.flatten(2), torch.maximum(before.abs(), after.abs()).where(finite, 0.0).flatten(2)
    if not apart.any():
        return apart.amax(-1)
    most = FILLED * size[apart > 0].max()
    least = roundings * torch.finfo(before.dtype).eps * size[size <= most].max()
    return apart.where(apart > least, 0.0).amax(-1)


def named(
    kind: Literal["future", "padding"],
    logits_of: LogitsOf,
    ids: Tensor,
    other: Tensor,
    before: Tensor,
    moved: Tensor,
    changes: Tensor,
) -> Leak:
    """The output that moved most, and the single change that moves it. More passes, but there is a fault already."""
    example, output = divmod(int(moved.argmax()), moved.shape[1])
    suspects = own_first(changes, example)
    for place in suspects:
        changed = ids.clone()
        changed[place] = other[place]
        by = movement(before, logits_of(changed))[example, output].item()
        if by:
            return Leak(kind, example, output, place[1], by, place[0])
    return Leak(kind, example, output, suspects[0][1], moved.max().item(), suspects[0][0])  # only together


def own_first(changes: Tensor, example: int) -> list[tuple[int, int]]:
    """All changed places as (example, place), those of this example before the others."""
    places: Iterable[list[int]] = changes.nonzero().tolist()
    return sorted(((row, place) for row, place in places), key=lambda at: (at[0] != example, at))
