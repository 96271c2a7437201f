"""Which examples are in which batch: a pure function of (seed, step), the same for any number of processes.

Each process takes its slice of the batch. Joined again, the slices are the batch, bit for bit, augmentation included.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.data.augment import augment, blend, partners, shares
from clearhead.data.config import DataConfig
from clearhead.data.dataset import Dataset, Examples, Normalize, lengths_of
from clearhead.data.prng import fold_in, permutation


@dataclass(frozen=True, eq=False)
class Batch:
    """One process's slice of n examples."""

    inputs: Tensor
    targets: Tensor
    targets_b: Tensor | None
    """mixup: the second target (n,)"""
    lam: Tensor | None
    """mixup: the weight of the first target (n,)"""
    num_global: int
    """examples in the whole batch, over all processes"""


class Batches:
    """Training batches by step: each epoch has its own order, and leaves out what does not fill a batch."""

    def __init__(self, data: Dataset, config: DataConfig, batch_size: int, seed: int):
        if not 1 <= batch_size <= len(data.train):
            raise ValueError(
                f"batch_size must be from 1 to the {len(data.train)} training examples, got {batch_size}; "
                "choose a smaller one, or use more examples"
            )
        if config.augmentation.is_on and data.normalize is None:
            raise ValueError(f"augmentation is for images, got it for {config.name}; leave it out")
        self.data, self.augmentation, self.batch_size, self.seed = data, config.augmentation, batch_size, seed
        self.lengths, self.window = lengths_of(data.train), config.window
        self.steps_per_epoch = len(data.train) // batch_size
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def at(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """The slice of batch `step`, counted from the beginning of training, that process `rank` of `world` takes."""
        if world > self.batch_size:
            raise ValueError(
                f"each process needs an example, got batch_size={self.batch_size} for {world} processes; "
                "choose a larger batch"
            )
        epoch, first = step // self.steps_per_epoch, step % self.steps_per_epoch * self.batch_size
        members = self.order_of(epoch)[first : first + self.batch_size]
        places = slice_of(self.batch_size, rank, world)
        if not self.augmentation.mixup:
            return Batch(*self.see(members, places, step), None, None, self.batch_size)
        return self.mixed(members, places, step)

    def order_of(self, epoch: int) -> Tensor:
        if epoch != self._epoch:  # kept for the steps to come, which are mostly of the same epoch
            self._epoch, self._order = epoch, self.shuffled(epoch)
        return self._order

    def shuffled(self, epoch: int) -> Tensor:
        """All examples once; where they differ in length, those of a batch are alike."""
        members = permutation(fold_in(self.seed, "order", epoch), len(self.data.train))
        if self.lengths is None or not self.window:
            return members
        return bucketed(members, self.lengths, self.batch_size, self.window, fold_in(self.seed, "buckets", epoch))

    def padding(self) -> tuple[float, float] | None:
        """The share of padding in the first epoch's tokens, and what it would be with batches of any lengths; None
        where all examples are of one length."""
        if self.lengths is None:
            return None
        any_lengths = permutation(fold_in(self.seed, "order", 0), len(self.data.train))
        shares = [padded_share(members, self.lengths, self.batch_size) for members in (self.order_of(0), any_lengths)]
        return shares[0], shares[1]

    def see(self, members: Tensor, places: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets at some places of the batch, as the model sees them."""
        inputs, targets = self.data.train.get_batch(members[places])
        if self.data.normalize is not None:
            inputs = augment(
                inputs, places, self.augmentation, self.data.normalize, fold_in(self.seed, "augment", step)
            )
        return inputs, targets

    def mixed(self, members: Tensor, places: Tensor, step: int) -> Batch:
        key, n = fold_in(self.seed, "mixup", step), self.batch_size
        partner, share = partners(n, key)[places], shares(n, self.augmentation.mixup, key)[places]
        needed, where = torch.cat([places, partner]).unique(return_inverse=True)  # each image is augmented once
        inputs, targets = self.see(members, needed, step)
        mine, theirs = where.chunk(2)
        return Batch(blend(inputs[mine], inputs[theirs], share), targets[mine], targets[theirs], share, n)


def evaluation_batches(
    examples: Examples, normalize: Normalize | None, batch_size: int, rank: int = 0, world: int = 1
) -> Iterator[Batch]:
    """This process's slices of all examples in their order, never augmented; each example once over all processes.

    Every process gets equally many batches; a slice of the last one may be empty.
    """
    for first in range(0, len(examples), batch_size):
        n = min(batch_size, len(examples) - first)
        inputs, targets = examples.get_batch(first + slice_of(n, rank, world))
        yield Batch(inputs if normalize is None else normalize(inputs), targets, None, None, n)


def slice_of(n: int, rank: int, world: int) -> Tensor:
    """The places out of n that belong to process `rank`; slices differ in length by one at most."""
    if not 0 <= rank < world:
        raise ValueError(f"rank must be from 0 to {world - 1} (world={world}), got {rank}; start it with torchrun")
    return torch.arange(n * rank // world, n * (rank + 1) // world)


# Batches of examples of like length, which need less padding. Dims: N examples, S sides (source, target), B batch.


def bucketed(members: Tensor, lengths: Tensor, batch_size: int, window: int, key: int) -> Tensor:
    """The members (N,) in another order: sorted by length inside each `window` batches, then batch by batch shuffled.

    lengths (N,S) are those of all examples. What does not fill a batch stays where it is, at the end.
    """
    n_batches = len(members) // batch_size
    full, rest = members.split([n_batches * batch_size, len(members) - n_batches * batch_size])
    ordered = [by_length(part, lengths) for part in full.split(min(window, n_batches) * batch_size)]
    batches = torch.cat(ordered).view(n_batches, batch_size)
    return torch.cat([batches[permutation(key, n_batches)].flatten(), rest])


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
