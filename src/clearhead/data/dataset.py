"""A data set is three map-style collections of examples (train, validation, test) with class names and normalization.

`Examples` is like torch.utils.data.Dataset, except that `get_batch` loads a batch of examples at once.

Splits, order and augmentation draw from counter-based (stateless) pseudo-random numbers: number i of a stream is
splitmix64(key, i). Any part of a stream can be computed alone, in any order, on any machine and by any number of
processes.

Dims: N examples, B batch, C channels, K source tokens, Q target tokens, S sides (source, target).
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from clearhead.data.vocab import IGNORE_INDEX, PAD

Tree = Any
"""a tensor, or nested tuples, lists and dicts of tensors; other values in them are passed on unchanged"""
GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
ALL = (1 << 64) - 1


def map_tensors(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """The tree with each tensor replaced by function(tensor)."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        values = [map_tensors(function, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree


def tensors_in(tree: Tree) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping | tuple | list):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from tensors_in(value)


def num_examples(tree: Tree) -> int:
    """The size of the first dimension of the first tensor."""
    return next((len(tensor) for tensor in tensors_in(tree) if tensor.dim()), 0)


class Examples(Protocol):
    """Examples by index. Sequences may also have `lengths` (N,S), the number of tokens of each side."""

    def __len__(self) -> int: ...

    def get_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets: a pure function of the indices (B,)."""
        ...


def lengths_of(examples: Examples) -> Tensor | None:
    """(N,S), or None if all examples have the same length."""
    return getattr(examples, "lengths", None)


@dataclass(frozen=True)
class Normalize:
    """(pixel / 255 - mean) / std per channel: uint8 (B,C,H,W) -> float (B,C,H,W)."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        mean, std = (torch.tensor(numbers, device=images.device).view(-1, 1, 1) for numbers in (self.mean, self.std))
        if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] != len(self.mean):
            raise ValueError(
                f"images must be uint8 (B,{len(self.mean)},H,W), got {images.dtype} of shape {tuple(images.shape)}"
            )
        return images.float().sub_(255 * mean).div_(255 * std)

    def undo(self, normalized: Tensor) -> Tensor:
        """The inverse, rounded: float (B,C,H,W) -> uint8 (B,C,H,W)."""
        mean, std = (
            torch.tensor(numbers, device=normalized.device).view(-1, 1, 1) for numbers in (self.mean, self.std)
        )
        return (normalized * std + mean).mul(255).round().clamp(0, 255).to(torch.uint8)


@dataclass(frozen=True)
class Dataset:
    train: Examples
    validation: Examples
    test: Examples
    classes: tuple[str, ...]
    """class names, indexed by target; () if there are none"""
    normalize: Normalize | None
    """from uint8 images to model inputs; None if the examples are not images"""
    vocab: tuple[str, ...] = ()
    """tokens, indexed by input id; () if the inputs are not token ids"""
    files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 digests of the user's own files, by path"""
    skipped: tuple[str, ...] = ()
    """the user's own files that could not be read and were skipped"""
    notes: tuple[str, ...] = ()
    """sentences to print before training"""

    def tensors(self, split: Literal["train", "validation", "test"]) -> tuple[Tensor, Tensor]:
        """All inputs and targets of a split, images normalized: data for `clearhead.fit`."""
        if split not in ("train", "validation", "test"):
            raise ValueError(f"split must be 'train', 'validation' or 'test', got {split!r:.60}")
        examples: Examples = getattr(self, split)
        inputs, targets = examples.get_batch(torch.arange(len(examples)))
        return (self.normalize(inputs) if self.normalize else inputs), targets


@dataclass(frozen=True, eq=False)
class Images:
    """Images in memory: uint8 (N,C,H,W), and labels int64 (N,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def get_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.images[indices], self.labels[indices]


@dataclass(frozen=True, eq=False)
class Subset:
    """The examples at `indices` (n,), as torch.utils.data.Subset."""

    examples: Examples
    indices: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def get_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.examples.get_batch(self.indices[indices])


def train_val_split(examples: Examples, validation: int, limit: int, seed: int) -> tuple[Examples, Examples]:
    """Disjoint random subsets for training and validation; `limit` = 0 uses all remaining examples for training."""
    if validation + max(limit, 1) > len(examples):
        raise ValueError(
            f"validation={validation} and limit={limit} need more than the {len(examples)} training examples"
        )
    shuffled = permutation(fold_in(seed, "set apart"), len(examples))
    end = validation + limit if limit else len(examples)
    return Subset(examples, shuffled[validation:end]), Subset(examples, shuffled[:validation])


@dataclass(frozen=True, eq=False)
class SequencePairs:
    """Source ids (N,K), padded with PAD, and target ids (N,Q), ending with EOS, padded with IGNORE_INDEX."""

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
        """Sources (B,K) and targets (B,Q), truncated to the longest sequence of the batch."""
        longest = self.lengths[indices].amax(0) if len(indices) else torch.ones(2)
        source, target = longest.int().tolist()
        return self.sources[indices, :source].long(), self.targets[indices, :target].long()


def pad_sequences(sequences: Sequence[Sequence[int]], lengths: Tensor, value: int) -> Tensor:
    """(N, longest), int32 to save memory."""
    rows = torch.full((len(lengths), int(lengths.max()) if len(lengths) else 1), value, dtype=torch.int32)
    rows[torch.arange(rows.shape[1]) < lengths[:, None]] = torch.tensor([*chain(*sequences)], dtype=torch.int32)
    return rows


def fold_in(*parts: int | str) -> int:
    """A key derived from parts such as (seed, "crop", epoch, step); different parts give independent streams."""
    key = 0
    for part in parts:
        number = part if isinstance(part, int) else zlib.crc32(part.encode(errors="surrogateescape")) << 32
        key = mix_one(key + GOLDEN + mix_one(number & ALL))
    return key


def mix_one(x: int) -> int:
    """The finalizer of splitmix64; `mix` does the same to a tensor."""
    x &= ALL
    x = ((x ^ (x >> 30)) * MULTIPLIERS[0]) & ALL
    x = ((x ^ (x >> 27)) * MULTIPLIERS[1]) & ALL
    return x ^ (x >> 31)


def random_bits(key: int, counters: Tensor) -> Tensor:
    """64 random bits per counter, as int64."""
    return mix(counters * signed(GOLDEN) + signed(key))


def random_below(n: int | Tensor, key: int, counters: Tensor) -> Tensor:
    """An integer from 0 to n - 1 per counter; n may be a tensor."""
    return shifted(random_bits(key, counters), 1) % n


def permutation(key: int, n: int) -> Tensor:
    """A random permutation of 0 to n - 1."""
    return random_bits(key, torch.arange(n)).argsort(stable=True)


def mix(x: Tensor) -> Tensor:
    x = (x ^ shifted(x, 30)) * signed(MULTIPLIERS[0])
    x = (x ^ shifted(x, 27)) * signed(MULTIPLIERS[1])
    return x ^ shifted(x, 31)


def shifted(x: Tensor, n: int) -> Tensor:
    """Logical right shift by n bits; torch's >> is arithmetic."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def signed(x: int) -> int:
    """The same 64 bits as a signed integer."""
    return x - (1 << 64) if x >> 63 else x
