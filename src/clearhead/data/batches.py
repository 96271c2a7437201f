"""Training and evaluation batches, and the augmentation of images. A batch is a pure function of (seed, step).

Unlike a DataLoader, `Batches` has no state to save: resuming at step i means asking for batch i. Each process gets its
slice of the batch; concatenated, the slices equal the batch bit for bit for any number of processes. This includes the
augmentation (crop, flip, cutout, mixup): the random numbers of an image depend on a key and on its slot in the batch.
Dims: N examples, S sides (source, target), B batch, C channels, H height, W width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.data import TTA, Augmentation
from clearhead.data.dataset import Dataset, Examples, Normalize, Tree, fold_in, lengths_of, permutation, random_below

NO_AUGMENTATION = Augmentation()


@dataclass(frozen=True, eq=False)
class Batch:
    """The n examples of one process."""

    inputs: Tree
    """a tensor (n,...); with `clearhead.fit`, any nested structure of tensors"""
    targets: Tree
    targets_b: Tensor | None
    """mixup: the second target (n,)"""
    lam: Tensor | None
    """mixup: the weight of the first target (n,)"""
    num_global: int
    """examples in the batch over all processes"""


@runtime_checkable
class OwnBatches(Protocol):
    """Examples that come in batches of their own."""

    def evaluation_batches(self, rank: int, world_size: int) -> Iterator[Batch]: ...


class Batches:
    """Training batches by step. Every epoch is shuffled anew; the last incomplete batch is dropped."""

    def __init__(
        self,
        data: Dataset,
        batch_size: int,
        seed: int,
        *,
        augmentation: Augmentation = NO_AUGMENTATION,
        window: int = 0,
    ):
        """`window`: sort examples by length within this many batches, to pad less; 0 disables."""
        if not 1 <= batch_size <= len(data.train):
            raise ValueError(
                f"batch_size must be from 1 to the {len(data.train)} training examples, got {batch_size}; "
                "choose a smaller batch_size"
            )
        if augmentation.is_on and data.normalize is None:
            raise ValueError(f"augmentation needs images, got {augmentation}")
        self.data, self.augmentation, self.batch_size, self.seed = data, augmentation, batch_size, seed
        self.lengths, self.window = lengths_of(data.train), window
        self.steps_per_epoch = len(data.train) // batch_size
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def at(self, step: int, rank: int = 0, world_size: int = 1) -> Batch:
        """The slice of batch `step` for process `rank`. Steps count from the beginning of training."""
        if world_size > self.batch_size:
            raise ValueError(
                f"batch_size must be at least the number of processes, "
                f"got batch_size={self.batch_size} for {world_size} processes"
            )
        epoch, first = step // self.steps_per_epoch, step % self.steps_per_epoch * self.batch_size
        indices = self.epoch_order(epoch)[first : first + self.batch_size]
        slots = slice_for_rank(self.batch_size, rank, world_size)
        if not self.augmentation.mixup:
            return Batch(*self.load(indices, slots, step), None, None, self.batch_size)
        return self.load_mixup(indices, slots, step)

    def epoch_order(self, epoch: int) -> Tensor:
        if epoch != self._epoch:  # cached: consecutive steps share an epoch
            self._epoch, self._order = epoch, self.shuffle(epoch)
        return self._order

    def shuffle(self, epoch: int) -> Tensor:
        """All indices in random order, bucketed by length if the examples have different lengths."""
        indices = permutation(fold_in(self.seed, "order", epoch), len(self.data.train))
        if self.lengths is None or not self.window:
            return indices
        return bucket_by_length(
            indices, self.lengths, self.batch_size, self.window, fold_in(self.seed, "buckets", epoch)
        )

    def padding(self) -> tuple[float, float] | None:
        """The fraction of padding tokens of epoch 0, with and without bucketing; None if all lengths are equal."""
        if self.lengths is None:
            return None
        unbucketed = permutation(fold_in(self.seed, "order", 0), len(self.data.train))
        with_buckets, without = (
            padding_fraction(order, self.lengths, self.batch_size) for order in (self.epoch_order(0), unbucketed)
        )
        return with_buckets, without

    def load(self, indices: Tensor, slots: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Augmented inputs and targets at some slots of the batch. `indices` (B,) are those of the full batch."""
        inputs, targets = self.data.train.get_batch(indices[slots])
        if self.data.normalize is not None:
            inputs = augment(inputs, slots, self.augmentation, self.data.normalize, fold_in(self.seed, "augment", step))
        return inputs, targets

    def load_mixup(self, indices: Tensor, slots: Tensor, step: int) -> Batch:
        key, n = fold_in(self.seed, "mixup", step), self.batch_size
        perm, lam = mixup_perm(n, key)[slots], mixup_lam(n, self.augmentation.mixup, key)[slots]
        unique, inverse = torch.cat([slots, perm]).unique(return_inverse=True)  # each image is augmented once
        inputs, targets = self.load(indices, unique, step)
        a, b = inverse.chunk(2)
        return Batch(mixup(inputs[a], inputs[b], lam), targets[a], targets[b], lam, n)


def evaluation_batches(
    examples: Examples, normalize: Normalize | None, batch_size: int, rank: int = 0, world_size: int = 1
) -> Iterator[Batch]:
    """This process's slices of all examples, in order and without augmentation.

    Each example is in the slice of exactly one process. Every process gets the same number of batches, but its slice of
    the last batch may be empty.
    """
    if isinstance(examples, OwnBatches):
        yield from examples.evaluation_batches(rank, world_size)
        return
    for first in range(0, len(examples), batch_size):
        n = min(batch_size, len(examples) - first)
        inputs, targets = examples.get_batch(first + slice_for_rank(n, rank, world_size))
        yield Batch(inputs if normalize is None else normalize(inputs), targets, None, None, n)


def slice_for_rank(n: int, rank: int, world_size: int) -> Tensor:
    """The slots 0 to n - 1 that belong to process `rank`; slice lengths differ by at most one."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to {world_size - 1} (world_size={world_size}), got {rank}")
    return torch.arange(n * rank // world_size, n * (rank + 1) // world_size)


def bucket_by_length(indices: Tensor, lengths: Tensor, batch_size: int, window: int, key: int) -> Tensor:
    """Reorder indices (N,) to reduce padding: sort within windows of `window` batches by length, shuffle the batches.

    lengths (N,S) are those of all examples. Indices that do not fill a batch stay at the end.
    """
    n_batches = len(indices) // batch_size
    full, rest = indices.split([n_batches * batch_size, len(indices) - n_batches * batch_size])
    ordered = [sort_by_length(chunk, lengths) for chunk in full.split(min(window, n_batches) * batch_size)]
    batches = torch.cat(ordered).view(n_batches, batch_size)
    return torch.cat([batches[permutation(key, n_batches)].flatten(), rest])


def sort_by_length(indices: Tensor, lengths: Tensor) -> Tensor:
    """Stable sort by the length of the source, then of the target."""
    for side in reversed(range(lengths.shape[1])):
        indices = indices[lengths[indices, side].argsort(stable=True)]
    return indices


def padding_fraction(indices: Tensor, lengths: Tensor, batch_size: int) -> float:
    """The fraction of padding tokens if each side of a batch is padded to its longest example."""
    batches = lengths[indices[: len(indices) // batch_size * batch_size]].unflatten(0, (-1, batch_size))
    n_real, n_tokens = int(batches.sum()), int(batches.amax(1).sum()) * batch_size
    return 1 - n_real / n_tokens


def augment(images: Tensor, slots: Tensor, config: Augmentation, normalize: Normalize, key: int) -> Tensor:
    """uint8 (B,C,H,W) at slots (B,) of a batch -> float (B,C,H,W): cropped, flipped, normalized, cut out."""
    height, width = images.shape[2:]
    if config.crop:
        top, left = (random_below(2 * config.crop + 1, fold_in(key, "crop", side), slots) for side in ("top", "left"))
        images = crop(images, config.crop, top, left)
    if config.flip:
        images = flip(images, random_below(2, fold_in(key, "flip"), slots).bool())
    normalized = normalize(images)
    if config.cutout:
        y, x = (
            random_below(height, fold_in(key, "cutout y"), slots),
            random_below(width, fold_in(key, "cutout x"), slots),
        )
        normalized = cutout(normalized, config.cutout, y, x)
    return normalized


def crop(images: Tensor, padding: int, top: Tensor, left: Tensor) -> Tensor:
    """Pads images with `padding` black pixels and crops them to their size at (top, left), each (B,)."""
    B, C, H, W = images.shape
    padded = F.pad(images, (padding,) * 4)
    _, _, rows, columns = padded.shape
    # Each row of a crop is contiguous in memory; gathering such rows is faster than indexing pixels.
    corners = torch.arange(B * C).view(B, C) * (rows * columns) + (top * columns + left)[:, None]
    starts = corners[:, :, None] + torch.arange(H) * columns
    return padded.view(-1).unfold(0, W, 1).index_select(0, starts.view(-1)).view(B, C, H, W)


def flip(images: Tensor, is_flipped: Tensor) -> Tensor:
    """Mirrors images horizontally where is_flipped (B,) is True."""
    return torch.where(is_flipped[:, None, None, None], images.flip(-1), images)


def cutout(images: Tensor, side: int, y: Tensor, x: Tensor) -> Tensor:
    """Sets a square around (y, x), each (B,), to 0, the mean; it may extend beyond the image."""
    H, W = images.shape[2:]
    rows, columns = torch.arange(H) - y[:, None] + side // 2, torch.arange(W) - x[:, None] + side // 2
    is_row, is_column = (rows >= 0) & (rows < side), (columns >= 0) & (columns < side)
    return images.masked_fill((is_row[:, :, None] & is_column[:, None, :])[:, None], 0.0)


def mixup_perm(n: int, key: int) -> Tensor:
    """The slot that each of the n slots is mixed with: a random permutation."""
    return permutation(fold_in(key, "partners"), n)


def mixup_lam(n: int, alpha: float, key: int) -> Tensor:
    """The weight of each of the n first images: float (n,) from Beta(alpha, alpha)."""
    lam = np.random.Generator(np.random.Philox(key=fold_in(key, "shares"))).beta(alpha, alpha, n)
    return torch.from_numpy(lam).float()


def mixup(images: Tensor, images_b: Tensor, lam: Tensor) -> Tensor:
    """lam * images + (1 - lam) * images_b, with lam (B,)."""
    return torch.lerp(images_b, images, lam[:, None, None, None])


TTA_DESCRIPTIONS: dict[TTA, str] = {
    "none": "",
    "flip": "mean over each image and its mirror image",
    "shift": "mean over each image, two copies shifted by a pixel, and their mirror images",
}


def tta_note(tta: TTA) -> str:
    """The note printed after an accuracy with test-time augmentation; "" without."""
    return f" ({TTA_DESCRIPTIONS[tta]})" if TTA_DESCRIPTIONS[tta] else ""


def tta_views(images: Tensor, tta: TTA) -> list[Tensor]:
    """(B,C,H,W) -> 1, 2 or 6 views of the same shape, beginning with the images themselves."""
    views = [images]
    if tta == "shift":
        padded = F.pad(images, (1,) * 4, mode="reflect")
        views += [padded[:, :, :-2, :-2], padded[:, :, 2:, 2:]]
    if tta != "none":
        views += [view.flip(-1) for view in views]
    return views


def tta_mean(predict: Callable[[Tensor], Tensor], images: Tensor, tta: TTA) -> Tensor:
    """The mean of `predict` over all views of the images."""
    if tta == "none":
        return predict(images)
    return torch.stack([predict(view) for view in tta_views(images, tta)]).mean(0)
