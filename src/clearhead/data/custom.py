"""The user's own data, for `clearhead.fit`: a pair of tensors, a map-style dataset, or an iterable of batches.

Each example of a map-style dataset is loaded with torch's generator seeded by (seed, step, slot), so that random
augmentation that draws from it depends neither on what was loaded before nor on the number of processes. An iterable
can only be read in order: resuming at step i reads i batches first.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from clearhead.data.batches import Batch, Batches
from clearhead.data.dataset import Dataset, Examples, Tree, fold_in, map_tensors, num_examples, tensors_in

Collate = Callable[[list[Any]], Any]
KINDS = "a pair of tensors (inputs, targets), a map-style dataset or an iterable of batches"
PROBED = 8
"""examples that are loaded twice before training, to see whether they are the same"""
HASHED_BYTES = 16 * 2**20
"""of the examples of a tensor whose contents are compared when a run is resumed"""


@dataclass(frozen=True, eq=False)
class TensorExamples:
    """A pair (inputs, targets) of tensors, or of dicts of tensors, whose first dimension is the example."""

    inputs: Tree
    targets: Tree

    def __len__(self) -> int:
        return num_examples(self.inputs)

    def get_batch(self, indices: Tensor) -> tuple[Tree, Tree]:
        if isinstance(self.inputs, Tensor) and isinstance(self.targets, Tensor):
            return self.inputs[indices], self.targets[indices]
        return map_tensors(lambda t: t[indices], self.inputs), map_tensors(lambda t: t[indices], self.targets)

    def digest(self) -> str:
        """The SHA-256 of types, shapes and the values of some examples, at equal distances."""
        digest = hashlib.sha256()
        for tensor in tensors_in((self.inputs, self.targets)):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
            n_hashed = max(1, HASHED_BYTES // max(1, tensor[0].nbytes))
            some = tensor[:: -(-len(tensor) // n_hashed)].detach().cpu().contiguous()
            digest.update(some.reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class MapExamples:
    """A map-style dataset, as torch.utils.data.Dataset: `len(dataset)` and `dataset[i]`."""

    dataset: Any
    collate: Collate
    seed: int
    part: str

    def __len__(self) -> int:
        return len(self.dataset)

    def get_batch(self, indices: Tensor) -> tuple[Tree, Tree]:
        """The same examples in every evaluation, even if loading them draws random numbers."""
        if not len(indices):
            return map_tensors(lambda t: t[:0] if t.dim() else t, self.get_batch(torch.zeros(1, dtype=torch.int64)))
        return self.load(indices.tolist(), [fold_in(self.seed, "custom", self.part, i) for i in indices.tolist()])

    def load(self, indices: list[int], keys: list[int]) -> tuple[Tree, Tree]:
        """A batch of examples, each loaded with torch's generator seeded by its key."""
        with torch.random.fork_rng(devices=[]):
            examples = []
            for index, key in zip(indices, keys, strict=True):
                torch.default_generator.manual_seed(key)
                examples.append(self.dataset[index])
            torch.default_generator.manual_seed(fold_in(keys[0], "collate"))
            return as_pair(self.collate(examples), f"{self.part}_data")


@dataclass(frozen=True, eq=False)
class BatchStream:
    """An iterable of batches, such as a DataLoader. It is read in order."""

    batches: Iterable[Any]
    seed: int
    part: str

    def __len__(self) -> int:
        """The number of batches; 1 if it is unknown."""
        return len(self.batches) if isinstance(self.batches, Sized) else 1

    @property
    def is_iterator(self) -> bool:
        """Whether it can be read only once."""
        return isinstance(self.batches, Iterator)

    def read(self, epoch: int) -> Iterator[tuple[Tree, Tree]]:
        """The batches of an epoch, each drawn with torch's generator seeded by (seed, epoch, number), so that a
        DataLoader shuffles in the same way again."""
        key = fold_in(self.seed, "custom", self.part, epoch)
        with seeded(key):
            iterator = iter(self.batches)
        for number in count():
            with seeded(fold_in(key, number)):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield as_pair(batch, f"{self.part}_data")

    def evaluation_batches(self, rank: int, world_size: int) -> Iterator[Batch]:
        for inputs, targets in self.read(0):
            yield slice_batch(inputs, targets, rank, world_size)

    def get_batch(self, indices: Tensor) -> tuple[Tree, Tree]:
        """Only of the first batch."""
        first = next(self.read(0))
        return map_tensors(lambda t: t[indices[indices < len(t)]] if t.dim() else t, first)


class MapBatches(Batches):
    """Training batches of a map-style dataset, by step."""

    def load(self, indices: Tensor, slots: Tensor, step: int) -> tuple[Tree, Tree]:
        examples = self.data.train
        assert isinstance(examples, MapExamples)
        keys = [fold_in(self.seed, "custom", step, slot) for slot in slots.tolist()]
        return examples.load(indices[slots].tolist(), keys)

    def is_reproducible(self) -> bool:
        """Whether the first examples are the same if they are loaded twice with torch's generator equally seeded."""
        slots = torch.arange(min(PROBED, self.batch_size))
        a, b = (list(tensors_in(self.load(self.epoch_order(0), slots, 0))) for _ in range(2))
        return len(a) == len(b) and all(map(torch.equal, a, b))


class StreamBatches(Batches):
    """Training batches of an iterable. Asking for batch i reads all batches before it."""

    def __init__(self, data: Dataset, steps: int, seed: int):
        """`steps` is the length of an epoch if that of the iterable is unknown."""
        stream = data.train
        assert isinstance(stream, BatchStream)
        self.stream, self.data, self.seed, self.lengths = stream, data, seed, None
        self.has_length = isinstance(stream.batches, Sized)
        self.steps_per_epoch = len(stream) if self.has_length else steps
        if self.steps_per_epoch < 1:
            raise ValueError(
                f"train_data must have at least one batch, got {type(stream.batches).__name__} without any"
            )
        self._step, self._epoch, self._current = -1, -1, (torch.empty(0), torch.empty(0))
        self._reader: Iterator[tuple[Tree, Tree]] = iter(())
        self.batch_size = num_examples(self.read(0)[0])

    def at(self, step: int, rank: int = 0, world_size: int = 1) -> Batch:
        inputs, targets = self.read(step)
        if (n := num_examples(inputs)) < world_size:
            raise ValueError(f"a batch needs an example for each of the {world_size} processes, got {n} at step {step}")
        return slice_batch(inputs, targets, rank, world_size)

    def read(self, step: int) -> tuple[Tree, Tree]:
        if step < self._step:
            self.start_epoch(0)
        if self.has_length and step // self.steps_per_epoch != self._epoch:
            self.start_epoch(step // self.steps_per_epoch)
        while self._step < step:
            self.advance(step)
        return self._current

    def start_epoch(self, epoch: int) -> None:
        if self.stream.is_iterator and self._step >= 0:
            raise ValueError(
                f"train_data is an iterator, which can be read only once, and ended after {self._step + 1} batches; "
                f"pass an iterable that can be read again, such as a DataLoader, or steps={self._step + 1}"
            )
        self._epoch, self._reader = epoch, self.stream.read(epoch)
        if self.has_length or epoch == 0:
            self._step = epoch * self.steps_per_epoch - 1

    def advance(self, step: int) -> None:
        batch = next(self._reader, None)
        if batch is None and self.has_length and self._epoch >= 0:
            raise ValueError(
                f"train_data has a length of {self.steps_per_epoch} batches, but ended after "
                f"{(self._step + 1) % self.steps_per_epoch}"
            )
        if batch is None:
            self.start_epoch(self._epoch + 1)
            batch = next(self._reader, None)
        if batch is None:
            raise ValueError(f"train_data has no batch for step {step + 1}: the iterable is empty")
        self._step, self._current = self._step + 1, batch

    def padding(self) -> None:
        return None


def user_dataset(parts: Mapping[str, Any], seed: int, collate: Collate | None) -> Dataset:
    """The data set of the parts "train", "val" and "test", of which the last two may be None."""
    if parts["train"] is None:
        raise ValueError(f"train_data must be {KINDS}, got None")
    train, val, test = (user_examples(parts[part], part, seed, collate) for part in ("train", "val", "test"))
    named = {"train_data": train, "val_data": val, "test_data": test}
    digests = {name: part.digest() for name, part in named.items() if isinstance(part, TensorExamples) and len(part)}
    return Dataset(train, val, test, classes=(), normalize=None, files=digests)


def user_examples(data: Any, part: str, seed: int, collate: Collate | None) -> Examples:
    """The examples of `train_data`, `val_data` or `test_data`; none if it is None."""
    name = f"{part}_data"
    if data is None:
        return TensorExamples(torch.empty(0), torch.empty(0))
    if type(data) is TensorDataset and len(data.tensors) == 2 and collate is None:
        data = data.tensors
    if isinstance(data, tuple):
        data = tuple(torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in data)
        if not is_tensor_pair(data):
            got = " and ".join(type(part).__name__ for part in data[:3])
            raise ValueError(f"{name} must be {KINDS}, got a tuple of {len(data)}: {got}")
    if is_tensor_pair(data):
        if collate is not None and part == "train":
            raise ValueError(f"collate has no effect on a pair of tensors, got {name} of tensors; remove collate=")
        return tensor_examples(data[0], data[1], name)
    if isinstance(data, IterableDataset):
        raise ValueError(f"{name} is an IterableDataset of examples; pass DataLoader({name}, batch_size=...)")
    if isinstance(data, str | bytes | Mapping | Tensor | type):
        raise ValueError(f"{name} must be {KINDS}, got {type(data).__name__}")
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return MapExamples(data, collate or default_collate, seed, part)
    if not isinstance(data, Iterable):
        raise ValueError(f"{name} must be {KINDS}, got {type(data).__name__}")
    if collate is not None and part == "train":
        raise ValueError(f"collate makes batches of examples, got {name}, which already consists of batches")
    stream = BatchStream(data, seed, part)
    if stream.is_iterator and part != "train":
        raise ValueError(f"{name} is an iterator, which can be read only once; pass a list of examples or a DataLoader")
    return stream


def tensor_examples(inputs: Tree, targets: Tree, name: str) -> TensorExamples:
    lengths = {len(tensor) if tensor.dim() else 0 for tensor in tensors_in((inputs, targets))}
    if len(lengths) != 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_in((inputs, targets)))
        raise ValueError(f"the tensors of {name} must have the same first dimension, the examples, got {shapes}")
    return TensorExamples(inputs, targets)


def is_tensor_pair(data: Any) -> bool:
    """(inputs, targets), each a tensor or a dict of tensors."""
    return isinstance(data, tuple | list) and len(data) == 2 and all(map(is_tensors, data))


def is_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return len(value) > 0 and all(isinstance(tensor, Tensor) for tensor in value.values())
    return isinstance(value, Tensor) and value.dim() > 0


def user_batches(data: Dataset, batch_size: int, epochs: int, steps: int, seed: int) -> Batches:
    match data.train:
        case BatchStream(batches=batches):
            if epochs and not isinstance(batches, Sized):
                raise ValueError(
                    f"epochs needs the number of batches, got a {type(batches).__name__} without a length; pass steps="
                )
            return StreamBatches(data, steps, seed)
        case MapExamples():
            return MapBatches(data, batch_size, seed)
        case _:
            return Batches(data, batch_size, seed)


def as_pair(batch: Any, name: str) -> tuple[Tree, Tree]:
    """(inputs, targets) of a batch: a pair, or a dict with "labels", as Hugging Face has it."""
    if isinstance(batch, Mapping) and "labels" in batch:
        return {key: value for key, value in batch.items() if key != "labels"}, batch["labels"]
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise ValueError(
            f'an example of {name} must be a pair (inputs, targets), or a dict with "labels", got a '
            f"{type(batch).__name__}{size}"
        )
    return batch[0], batch[1]


def slice_batch(inputs: Tree, targets: Tree, rank: int, world_size: int) -> Batch:
    n = num_examples(inputs)
    part = slice(n * rank // world_size, n * (rank + 1) // world_size)

    def of_rank(tensor: Tensor) -> Tensor:
        return tensor[part] if tensor.dim() and len(tensor) == n else tensor

    if world_size > 1:
        inputs, targets = map_tensors(of_rank, inputs), map_tensors(of_rank, targets)
    return Batch(inputs, targets, None, None, n)


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """Seed torch's CPU generator inside this context, and restore its state on exit."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key)
        yield
