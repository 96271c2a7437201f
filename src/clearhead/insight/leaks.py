"""Leak tests for any model: change future tokens or padding, and find outputs that change but must not.

A model that sees future tokens reaches a low loss but is useless; the output of one that sees padding depends on the
length of the other examples in the batch.
The model must be in eval() mode. The random state is preserved, and no gradients are recorded.
Shapes: B batch, L length, Q outputs, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from clearhead.insight.doctor.module_under_test import output_change

LogitsFn = Callable[[Tensor], Tensor]
"""ids (B,L) -> logits (B,Q,V)"""


@dataclass(frozen=True)
class Leak:
    """An output that changed, and the token that changed it."""

    kind: Literal["future", "padding"]
    example: int
    output: int
    """position of the output"""
    token: int
    """position of the token"""
    change: float
    """largest change of a logit"""
    token_example: int
    """example of the token: another one if the examples of a batch are mixed"""

    def __str__(self) -> str:
        kind = "token" if self.kind == "future" else "padding token"
        other = f" of example {self.token_example}" if self.token_example != self.example else ""
        later = "later " if self.kind == "future" and not other else ""
        return (
            f"output {self.output} of example {self.example} changes by {self.change:.3g} "
            f"when the {later}{kind} {self.token}{other} changes"
        )


@torch.no_grad()
def future_leak(logits_fn: LogitsFn, ids: Tensor, vocab_size: int) -> Leak | None:
    """A leak from a later token to an earlier output, or None. Logits must be (B,L,V).

    Every position is changed once, in one of the examples, which takes about L / B forward passes.
    """
    other = different_ids(ids, vocab_size)
    before = deterministic_logits(logits_fn, ids)
    batch_size, length = ids.shape
    if before.shape[1] != length:
        raise ValueError(
            f"logits must be (B,L,V) with one output for each of the {length} tokens, got {tuple(before.shape)}"
        )
    positions = torch.arange(length, device=ids.device)
    for first in range(1, length, batch_size):
        changed = first + torch.arange(batch_size, device=ids.device)[:, None]  # one position per example
        is_changed = positions == changed
        change = output_change(before, logits_fn(torch.where(is_changed, other, ids)))
        change = change.where(positions < changed, 0.0)
        if change.any():
            return locate_leak("future", logits_fn, ids, other, before, change, is_changed)
    return None


@torch.no_grad()
def padding_leak(
    logits_fn: LogitsFn, ids: Tensor, lengths: Tensor, vocab_size: int, *, output_lengths: Tensor | None = None
) -> Leak | None:
    """A leak from the padding after an example's length (B,) to one of its outputs, or None. Three forward passes.

    Outputs at padding positions are ignored. If outputs have other positions than ids (a decoder's outputs and a padded
    source), output_lengths gives the number of outputs per example. For logits (B,V), every output counts.
    """
    other = different_ids(ids, vocab_size)
    before = deterministic_logits(logits_fn, ids)
    is_changed = is_padding(lengths, ids.shape[1], ids.device)
    change = output_change(before, logits_fn(torch.where(is_changed, other, ids)))
    if before.dim() > 2:
        output_lengths = lengths if output_lengths is None else output_lengths
        change = change.masked_fill(is_padding(output_lengths, change.shape[1], ids.device), 0.0)
    return locate_leak("padding", logits_fn, ids, other, before, change, is_changed) if change.any() else None


def is_padding(lengths: Tensor, length: int, device: torch.device) -> Tensor:
    """(B,L): True at the positions after each length."""
    return torch.arange(length, device=device) >= lengths.to(device)[:, None]


def different_ids(ids: Tensor, vocab_size: int) -> Tensor:
    """A different id in place of each one, the same in every call."""
    if ids.dim() != 2 or ids.is_floating_point():
        raise ValueError(f"ids must be integers (B,L), got {ids.dtype} {tuple(ids.shape)}")
    if vocab_size < 2:
        raise ValueError(f"vocab_size must be at least 2, got {vocab_size}")
    steps = torch.randint(1, vocab_size, ids.shape, generator=torch.Generator().manual_seed(0))
    return (ids + steps.to(ids)) % vocab_size


def deterministic_logits(logits_fn: LogitsFn, ids: Tensor) -> Tensor:
    first, second = logits_fn(ids), logits_fn(ids)
    if output_change(first, second).any():
        raise ValueError("two calls with the same ids return different logits; call model.eval() to disable dropout")
    return first


def locate_leak(
    kind: Literal["future", "padding"],
    logits_fn: LogitsFn,
    ids: Tensor,
    other: Tensor,
    before: Tensor,
    change: Tensor,
    is_changed: Tensor,
) -> Leak:
    """The output that changed most, and the single token that changes it: one more forward pass per suspect."""
    example, output = divmod(int(change.argmax()), change.shape[1])
    changed: list[list[int]] = is_changed.nonzero().tolist()
    suspects = sorted(((row, token) for row, token in changed), key=lambda position: (position[0] != example, position))
    for row, token in suspects:
        modified = ids.clone()
        modified[row, token] = other[row, token]
        amount = output_change(before, logits_fn(modified))[example, output].item()
        if amount:
            return Leak(kind, example, output, token, amount, row)
    row, token = suspects[0]  # no token changes it alone
    return Leak(kind, example, output, token, change.max().item(), row)
