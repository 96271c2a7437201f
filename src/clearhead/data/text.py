"""`text` and `words`: data for language models, tokens (B,L) -> the next tokens (B,L).

`text` cuts windows of a fixed length out of a text file. The end of the text, at most a tenth of it, is held out for
validation; there is no test set.

`words` has single words, letter by letter, between BOS and EOS: those words of the embedded dictionary that consist of
the letters a to z, or the lines of the user's own `file`. They are split by their spelling, as in `pronounce`.

Dims: N words, B batch, L length.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from clearhead.data.dataset import Dataset, SequencePairs
from clearhead.data.options import Level
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

VALIDATION_EVERY = 10
"""at most one character in this many is held out"""


@dataclass(frozen=True, eq=False)
class Windows:
    """Window i starts at token `stride` * i: tokens (B,L) -> the same window shifted by one token (B,L)."""

    ids: Tensor
    length: int
    stride: int
    n: int

    def __len__(self) -> int:
        return self.n

    def get_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        windows = self.ids[indices[:, None] * self.stride + torch.arange(self.length + 1)].long()
        return windows[:, :-1], windows[:, 1:]


def load_text(file: str, level: Level, length: int, validation: int, limit: int) -> Dataset:
    chunks = read_text(file, level)
    vocab = text_vocab(chunks, level)
    ids = encode_text(chunks, vocab)
    max_held_out = len(ids) - len(ids) * (VALIDATION_EVERY - 1) // VALIDATION_EVERY
    n_held_out = min(validation * length + 1, max_held_out) if validation else 0
    train_ids, val_ids = ids[: len(ids) - n_held_out], ids[len(ids) - n_held_out :]
    n_train, n_val = len(train_ids) - length, (n_held_out - 1) // length if n_held_out else 0
    if n_train < 1 or (validation and n_val < 1):
        required = (VALIDATION_EVERY if validation else 1) * length + 1
        raise ValueError(
            f"a text must have at least {required} characters for length={length}, got {len(ids)} in {file}"
        )
    train = Windows(train_ids, length, 1, min(n_train, limit or n_train))
    held_out, test = Windows(val_ids, length, length, n_val), Windows(val_ids, length, length, 0)
    return Dataset(train, held_out, test, classes=vocab, normalize=None, vocab=vocab)


def encode_text(chunks: list[str], vocab: tuple[str, ...]) -> Tensor:
    """The ids of all characters, in the smallest integer type that holds them; vectorized for long texts.

    Empties the list, so that the text and its ids are never both in memory.
    """
    code_points = np.array([ord(token) for token in vocab], dtype=np.uint32)
    dtype = np.min_scalar_type(-len(vocab)) if len(vocab) > 256 else np.uint8  # torch cannot index uint16
    ids, start = torch.from_numpy(np.empty(sum(map(len, chunks)), dtype)), 0
    chunks.reverse()
    while chunks:
        codes = np.frombuffer(chunks.pop().encode("utf-32-le"), dtype=np.uint32)
        ids[start : start + len(codes)] = torch.from_numpy(np.searchsorted(code_points, codes))
        start += len(codes)
    return ids


@dataclass(frozen=True, eq=False)
class Words:
    """Word i: BOS and its letters (B,L) -> its letters and EOS (B,L)."""

    pairs: SequencePairs

    @property
    def lengths(self) -> Tensor:
        """(N,1): inputs and targets have the same length"""
        return self.pairs.lengths[:, :1]

    def __len__(self) -> int:
        return len(self.pairs)

    def get_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.pairs.get_batch(indices)


def load_words(file: str, validation: int, limit: int) -> Dataset:
    words = load_word_list(file)
    train_words, test_words = split_test(words)
    train_words, val_words = split_validation(train_words, validation)
    train_words = train_words[:limit] if limit else train_words
    vocab = Vocabulary.with_special_tokens(letters_in(words))
    train, held_out, test = (encode_words(split, vocab) for split in (train_words, val_words, test_words))
    return Dataset(train, held_out, test, classes=vocab.tokens, normalize=None, vocab=vocab.tokens)


def encode_words(words: Iterable[str], vocab: Vocabulary) -> Words:
    ids = [vocab.encode(word) for word in words]
    return Words(SequencePairs.of([[BOS, *word] for word in ids], [[*word, EOS] for word in ids]))
