"""Batches of examples of like length, which need less padding. Dims: N examples, S sides (source, target), B batch."""

import torch
from torch import Tensor

from clearhead.data.draws import order


def bucketed(members: Tensor, lengths: Tensor, batch_size: int, window: int, key: int) -> Tensor:
    """The members (N,) in another order: sorted by length inside each `window` batches, then batch by batch shuffled.

    lengths (N,S) are those of all examples. What does not fill a batch stays where it is, at the end.
    """
    n_batches = len(members) // batch_size
    full, rest = members.split([n_batches * batch_size, len(members) - n_batches * batch_size])
    ordered = [by_length(part, lengths) for part in full.split(min(window, n_batches) * batch_size)]
    batches = torch.cat(ordered).view(n_batches, batch_size)
    return torch.cat([batches[order(key, n_batches)].flatten(), rest])


def by_length(members: Tensor, lengths: Tensor) -> Tensor:
    """By the first side, equal ones by the second; examples of equal lengths stay in their order."""
    for side in reversed(range(lengths.shape[1])):
        members = members[lengths[members, side].argsort(stable=True)]
    return members


def padded_share(members: Tensor, lengths: Tensor, batch_size: int) -> float:
    """The share of all tokens that is padding, when each batch is as long as its longest example on each side."""
    batches = lengths[members[: len(members) // batch_size * batch_size]].unflatten(0, (-1, batch_size))
    real, all_tokens = int(batches.sum()), int(batches.amax(1).sum()) * batch_size
    return 1 - real / all_tokens
