"""What a data set is: examples to train on, to validate on and to test on. Dims: N examples, B batch, C channels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from clearhead.data.prng import fold_in, permutation
from clearhead.data.vocab import IGNORE_INDEX, PAD


class Examples(Protocol):
    """Those of different lengths also have `lengths`, (N,S): how many tokens each side of each example has."""

    def __len__(self) -> int: ...

    def get_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets, which depend on nothing but the indices."""
        ...


def lengths_of(examples: Examples) -> Tensor | None:
    """(N,S), or None where all examples are of one length."""
    return getattr(examples, "lengths", None)


@dataclass(frozen=True)
class Normalize:
    """(pixel / 255 - mean) / std for each channel: uint8 (B,C,H,W) -> float (B,C,H,W)."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        mean, std = (torch.tensor(numbers, device=images.device).view(-1, 1, 1) for numbers in (self.mean, self.std))
        if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] != len(self.mean):
            raise ValueError(
                f"images must be uint8 (B,{len(self.mean)},H,W), got {images.dtype} of shape {tuple(images.shape)}; "
                "convert them first"
            )
        return images.float().sub_(255 * mean).div_(255 * std)

    def undo(self, normal: Tensor) -> Tensor:
        """The inverse, to the nearest uint8: float (B,C,H,W) -> uint8 (B,C,H,W)."""
        mean, std = (torch.tensor(numbers, device=normal.device).view(-1, 1, 1) for numbers in (self.mean, self.std))
        return (normal * std + mean).mul(255).round().clamp(0, 255).to(torch.uint8)


@dataclass(frozen=True)
class Dataset:
    train: Examples
    validation: Examples
    test: Examples
    classes: tuple[str, ...]
    """their names in the order of the targets; () where there are none"""
    normalize: Normalize | None
    """from the uint8 images that the examples are to what a model takes; None where they are that already"""
    vocab: tuple[str, ...] = ()
    """what the ids of the inputs stand for; () where they are no ids, or stand for themselves"""
    files: Mapping[str, str] = field(default_factory=dict)
    """the user's own files that it was read from, and the sha256 of each"""
    skipped: tuple[str, ...] = ()
    """the user's own files that were left out because they could not be read"""
    notes: tuple[str, ...] = ()
    """sentences about the data that the user should read before training"""


@dataclass(frozen=True, eq=False)
class Images:
    """Images in memory: uint8 (N,C,H,W), and the number of each one's class, int64 (N,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def get_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.images[indices], self.labels[indices]


@dataclass(frozen=True, eq=False)
class Subset:
    """Some of the examples: those at `chosen` (n,)."""

    examples: Examples
    chosen: Tensor

    def __len__(self) -> int:
        return len(self.chosen)

    def get_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.examples.get_batch(self.chosen[indices])


def train_val_split(examples: Examples, validation: int, limit: int, seed: int) -> tuple[Examples, Examples]:
    """A part to train on and a part to validate on, without a common example: chosen by the seed, in its order."""
    if validation + max(limit, 1) > len(examples):
        raise ValueError(
            f"there are {len(examples)} training examples, too few for validation={validation} and limit={limit}; "
            "choose fewer"
        )
    chosen = permutation(fold_in(seed, "set apart"), len(examples))
    end = validation + limit if limit else len(examples)
    return Subset(examples, chosen[validation:end]), Subset(examples, chosen[:validation])


# Sequences beside sequences: what an encoder-decoder reads, and what it is to write.
#
# Dims: N examples, B batch, K source tokens, Q target tokens.


@dataclass(frozen=True, eq=False)
class SequencePairs:
    """Source ids (N,K), padded with PAD, and target ids (N,Q), the end mark included, padded with IGNORE_INDEX."""

    sources: Tensor
    targets: Tensor
    lengths: Tensor
    """(N,2): tokens of the source, tokens of the target"""

    @classmethod
    def of(cls, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> "SequencePairs":
        n_sources, n_targets = (torch.tensor(list(map(len, side)), dtype=torch.int64) for side in (sources, targets))
        lengths = torch.stack([n_sources, n_targets], dim=1)
        return cls(pad_sequences(sources, n_sources, PAD), pad_sequences(targets, n_targets, IGNORE_INDEX), lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def get_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """(B,K) and (B,Q), as long as the longest of these."""
        longest = self.lengths[indices].amax(0) if len(indices) else torch.ones(2)
        source, target = longest.int().tolist()
        return self.sources[indices, :source].long(), self.targets[indices, :target].long()


def pad_sequences(sequences: Sequence[Sequence[int]], lengths: Tensor, value: int) -> Tensor:
    """(N, the longest), int32: small, because all of it stays in memory."""
    rows = torch.full((len(lengths), int(lengths.max()) if len(lengths) else 1), value, dtype=torch.int32)
    rows[torch.arange(rows.shape[1]) < lengths[:, None]] = torch.tensor([*chain(*sequences)], dtype=torch.int32)
    return rows
