"""`reverse`: random digits, and the same digits backwards. Dims: B batch, L length."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.data.dataset import Dataset
from clearhead.data.datasets import DataConfig
from clearhead.data.prng import fold_in, random_below, random_bits

N_TRAIN, N_TEST = 50_000, 10_000


@dataclass(frozen=True)
class Reversal:
    """Sequence i of a stream of its own: ids (B,L) -> the reversed ids (B,L). Nothing is stored."""

    n: int
    length: int
    key: int

    def __len__(self) -> int:
        return self.n

    def get_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        ids = digits(self.key, indices, self.length)
        return ids, ids.flip(1)


def digits(key: int, indices: Tensor, length: int) -> Tensor:
    """(B,L) random digits, a sequence for each index."""
    return random_below(10, key, indices[:, None] * length + torch.arange(length))


def load_reverse(config: DataConfig, seed: int) -> Dataset:
    train, validation, test = (
        Reversal(n, config.length, fold_in(seed, "reverse", split)) for split, n in sizes(config).items()
    )
    return Dataset(train, validation, test, classes=tuple("0123456789"), normalize=None)


def sizes(config: DataConfig) -> dict[str, int]:
    """How many sequences are made: validation has its own, so that nothing is set apart."""
    return {"train": config.limit or N_TRAIN, "validation": config.validation, "test": N_TEST}


# `digits`: random digits, and one answer about all of them. Dims: B batch, L length.


Question = Callable[[int, Tensor, int], tuple[Tensor, Tensor]]


def most_common(key: int, indices: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The digit that occurs most often, int64 (B,); of several such digits the smallest."""
    ids = digits(key, indices, length)
    counts = F.one_hot(ids, 10).sum(1)
    return ids, (10 * counts - torch.arange(10)).argmax(1)


def total(key: int, indices: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The sum of the digits, float (B,)."""
    ids = digits(key, indices, length)
    return ids, ids.sum(1).float()


def repeat(key: int, indices: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Does a digit occur twice? float (B,), 1 for yes: half of the sequences, and those differ from the others in one
    digit only, so that there is no easy way to tell."""
    ids = random_bits(key, indices[:, None] * 10 + torch.arange(10)).argsort(dim=1)[:, :length]  # all different
    copied = random_below(length, fold_in(key, "copied"), indices)
    steps = 1 + random_below(length - 1, fold_in(key, "steps"), indices)
    answers = random_below(2, fold_in(key, "answer"), indices)
    target = (copied + steps * answers) % length  # itself, where the answer is no
    return ids.scatter(1, target[:, None], ids.gather(1, copied[:, None])), answers.float()


QUESTIONS: dict[str, Question] = {"most-common": most_common, "repeat": repeat, "sum": total}


@dataclass(frozen=True)
class DigitQuestions:
    """Sequence i of a stream of its own, with the answer to a question: ids (B,L) -> (B,). Nothing is stored."""

    n: int
    length: int
    key: int
    question: str

    def __len__(self) -> int:
        return self.n

    def get_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return QUESTIONS[self.question](self.key, indices, self.length)


def load_digits(config: DataConfig, seed: int) -> Dataset:
    train, validation, test = (
        DigitQuestions(n, config.length, fold_in(seed, "whole", split), config.question)
        for split, n in sizes(config).items()
    )
    return Dataset(train, validation, test, classes=CLASSES[config.question], normalize=None)


CLASSES = {"most-common": tuple("0123456789"), "repeat": ("no repeat", "repeat"), "sum": ()}
