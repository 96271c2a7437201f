"""`reverse` and `digits`: random digits, and their reversal or the answer to a question about them.

Sequences are generated from their index by a counter-based generator and are not stored. Dims: B batch, L length.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.data.dataset import Dataset
from clearhead.data.prng import fold_in, random_below, random_bits

N_TRAIN, N_TEST = 50_000, 10_000


@dataclass(frozen=True)
class Reversal:
    """Sequence i of the stream `key`: ids (B,L) -> the reversed ids (B,L)."""

    n: int
    length: int
    key: int

    def __len__(self) -> int:
        return self.n

    def get_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        ids = random_digits(self.key, indices, self.length)
        return ids, ids.flip(1)


def random_digits(key: int, indices: Tensor, length: int) -> Tensor:
    """One sequence of random digits per index, (B,L)."""
    return random_below(10, key, indices[:, None] * length + torch.arange(length))


def load_reverse(length: int, validation: int, limit: int, seed: int) -> Dataset:
    train, held_out, test = (
        Reversal(n, length, fold_in(seed, "reverse", split)) for split, n in split_sizes(validation, limit).items()
    )
    return Dataset(train, held_out, test, classes=tuple("0123456789"), normalize=None)


def split_sizes(validation: int, limit: int) -> dict[str, int]:
    """Number of sequences per split. Each split has its own stream, so nothing has to be held out."""
    return {"train": limit or N_TRAIN, "validation": validation, "test": N_TEST}


def most_common(key: int, indices: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Sequences (B,L) and the most common digit, int64 (B,); the smallest one in case of a tie."""
    ids = random_digits(key, indices, length)
    counts = F.one_hot(ids, 10).sum(1)
    return ids, (10 * counts - torch.arange(10)).argmax(1)


def digit_sum(key: int, indices: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Sequences (B,L) and the sum of the digits, float (B,)."""
    ids = random_digits(key, indices, length)
    return ids, ids.sum(1).float()


def repeat(key: int, indices: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Sequences (B,L) and whether a digit occurs twice, float (B,).

    Half of the sequences have a repeated digit. They differ from the others in one digit only, so that simple
    statistics do not reveal the answer.
    """
    ids = random_bits(key, indices[:, None] * 10 + torch.arange(10)).argsort(dim=1)[:, :length]  # all different
    copied = random_below(length, fold_in(key, "copied"), indices)
    steps = 1 + random_below(length - 1, fold_in(key, "steps"), indices)
    answers = random_below(2, fold_in(key, "answer"), indices)
    target = (copied + steps * answers) % length  # the digit itself if the answer is no
    return ids.scatter(1, target[:, None], ids.gather(1, copied[:, None])), answers.float()


QUESTIONS: dict[str, Callable[[int, Tensor, int], tuple[Tensor, Tensor]]] = {
    "most-common": most_common,
    "repeat": repeat,
    "sum": digit_sum,
}
CLASSES = {"most-common": tuple("0123456789"), "repeat": ("no repeat", "repeat"), "sum": ()}


@dataclass(frozen=True)
class DigitQuestions:
    """Sequence i of the stream `key`: ids (B,L) -> the answer to a question about them (B,)."""

    n: int
    length: int
    key: int
    question: str

    def __len__(self) -> int:
        return self.n

    def get_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return QUESTIONS[self.question](self.key, indices, self.length)


def load_digits(question: str, length: int, validation: int, limit: int, seed: int) -> Dataset:
    train, held_out, test = (
        DigitQuestions(n, length, fold_in(seed, "whole", split), question)
        for split, n in split_sizes(validation, limit).items()
    )
    return Dataset(train, held_out, test, classes=CLASSES[question], normalize=None)
