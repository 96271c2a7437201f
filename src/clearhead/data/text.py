"""`text`: a file's text, and what comes next in it, for windows of a fixed length.

The end of the text, at most a tenth of it, is read to validate; nothing is left for a test. Dims: B batch, L length.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from clearhead.data.dataset import Dataset, SequencePairs
from clearhead.data.datasets import DataConfig
from clearhead.data.vocab import (
    BOS,
    EOS,
    Vocabulary,
    letters_in,
    load_word_list,
    read_text,
    split_test,
    split_validation,
    text_vocab,
)

SHARE = 10
"""one character in so many validates at most"""


@dataclass(frozen=True, eq=False)
class Windows:
    """Window i begins `stride` * i tokens into the text: tokens (B,L) -> the tokens one place later (B,L)."""

    ids: Tensor
    length: int
    stride: int
    n: int

    def __len__(self) -> int:
        return self.n

    def get_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.ids[indices[:, None] * self.stride + torch.arange(self.length + 1)].long()
        return seen[:, :-1], seen[:, 1:]


def load_text(config: DataConfig, seed: int) -> Dataset:
    text = read_text(config.file, config.level)
    symbols = text_vocab(text, config.level)
    ids, length = ids_of(text, symbols), config.length
    n_held = min(config.validation * length + 1, len(ids) - len(ids) * (SHARE - 1) // SHARE) if config.validation else 0
    learned, held = ids[: len(ids) - n_held], ids[len(ids) - n_held :]
    n_learned, n_windows = len(learned) - length, (n_held - 1) // length if n_held else 0
    if n_learned < 1 or (config.validation and n_windows < 1):
        least = (SHARE if config.validation else 1) * length + 1
        raise ValueError(
            f"a text must have {least} characters or more for windows of {length}, got {len(ids)} "
            f"in {config.file}; choose a longer text or a smaller length"
        )
    train = Windows(learned, length, 1, min(n_learned, config.limit or n_learned))
    validation, test = Windows(held, length, length, n_windows), Windows(held, length, length, 0)
    return Dataset(train, validation, test, classes=symbols, normalize=None, vocab=symbols)


def ids_of(text: list[str], symbols: tuple[str, ...]) -> Tensor:
    """One for each character of all pieces, in the smallest type that holds them; quick, for texts of many millions.
    Empties the list, so that the text and its ids are not both in memory."""
    known = np.array([ord(symbol) for symbol in symbols], dtype=np.uint32)
    kind = np.min_scalar_type(-len(symbols)) if len(symbols) > 256 else np.uint8  # torch cannot index uint16
    ids, at = torch.from_numpy(np.empty(sum(map(len, text)), kind)), 0
    text.reverse()
    while text:
        codes = np.frombuffer(text.pop().encode("utf-32-le"), dtype=np.uint32)
        ids[at : at + len(codes)] = torch.from_numpy(np.searchsorted(known, codes))
        at += len(codes)
    return ids


# `words`: words letter by letter, each between a begin and an end mark, for a model that invents others.
#
# The words of the embedded dictionary that are written with the letters a to z, or the lines of the user's own
# `file`.
# Parts are chosen by the digest of a word, as those of `pronounce` are. Dims: N words, B batch, L tokens.


@dataclass(frozen=True, eq=False)
class Words:
    """Word i: the begin mark and its letters (B,L) -> its letters and the end mark (B,L)."""

    pairs: SequencePairs

    @property
    def lengths(self) -> Tensor:
        """(N,1): each token is read, and one is written after it"""
        return self.pairs.lengths[:, :1]

    def __len__(self) -> int:
        return len(self.pairs)

    def get_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.pairs.get_batch(indices)


def load_words(config: DataConfig, seed: int) -> Dataset:
    known = load_word_list(config.file)
    learned, tested = split_test(known)
    learned, held = split_validation(learned, config.validation)
    learned = learned[: config.limit] if config.limit else learned
    letters = Vocabulary.with_special_tokens(letters_in(known))
    train, validation, test = (spelled(part, letters) for part in (learned, held, tested))
    return Dataset(train, validation, test, classes=letters.tokens, normalize=None, vocab=letters.tokens)


def spelled(words: Iterable[str], letters: Vocabulary) -> Words:
    ids = [letters.encode(word) for word in words]
    return Words(SequencePairs.of([[BOS, *word] for word in ids], [[*word, EOS] for word in ids]))
