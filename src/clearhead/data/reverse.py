"""`reverse`: random digits, and the same digits backwards. Dims: B batch, L length."""

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.data.config import DataConfig
from clearhead.data.dataset import DataSet
from clearhead.data.draws import below, key_of

N_TRAIN, N_TEST = 50_000, 10_000


@dataclass(frozen=True)
class Reversal:
    """Sequence i of a stream of its own: ids (B,L) -> the reversed ids (B,L). Nothing is stored."""

    n: int
    length: int
    key: int

    def __len__(self) -> int:
        return self.n

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        ids = digits(self.key, indices, self.length)
        return ids, ids.flip(1)


def digits(key: int, indices: Tensor, length: int) -> Tensor:
    """(B,L) random digits, a sequence for each index."""
    return below(10, key, indices[:, None] * length + torch.arange(length))


def load(config: DataConfig, seed: int) -> DataSet:
    train, validation, test = (
        Reversal(n, config.length, key_of(seed, "reverse", split)) for split, n in sizes(config).items()
    )
    return DataSet(train, validation, test, classes=tuple("0123456789"), normalise=None)


def sizes(config: DataConfig) -> dict[str, int]:
    """How many sequences are made: validation has its own, so that nothing is set apart."""
    return {"train": config.limit or N_TRAIN, "validation": config.validation, "test": N_TEST}
