"""`whole`: random digits, and one answer about all of them. Dims: B batch, L length."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.data.config import DataConfig
from clearhead.data.dataset import DataSet
from clearhead.data.draws import below, bits, key_of
from clearhead.data.reverse import digits, sizes

Question = Callable[[int, Tensor, int], tuple[Tensor, Tensor]]


def commonest(key: int, indices: Tensor, length: int) -> tuple[Tensor, Tensor]:
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
    ids = bits(key, indices[:, None] * 10 + torch.arange(10)).argsort(dim=1)[:, :length]  # all different
    copied = below(length, key_of(key, "copied"), indices)
    steps = 1 + below(length - 1, key_of(key, "steps"), indices)
    answers = below(2, key_of(key, "answer"), indices)
    target = (copied + steps * answers) % length  # itself, where the answer is no
    return ids.scatter(1, target[:, None], ids.gather(1, copied[:, None])), answers.float()


QUESTIONS: dict[str, Question] = {"commonest": commonest, "repeat": repeat, "sum": total}


@dataclass(frozen=True)
class Asked:
    """Sequence i of a stream of its own, with the answer to a question: ids (B,L) -> (B,). Nothing is stored."""

    n: int
    length: int
    key: int
    question: str

    def __len__(self) -> int:
        return self.n

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return QUESTIONS[self.question](self.key, indices, self.length)


def load(config: DataConfig, seed: int) -> DataSet:
    train, validation, test = (
        Asked(n, config.length, key_of(seed, "whole", split), config.question) for split, n in sizes(config).items()
    )
    return DataSet(train, validation, test, classes=CLASSES[config.question], normalise=None)


CLASSES = {"commonest": tuple("0123456789"), "repeat": ("no repeat", "repeat"), "sum": ()}
