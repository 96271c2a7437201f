"""Data sets of sequences: `reverse` and `digits`, `text` and `words`, and `pronounce`.

`reverse` and `digits` have random digits, and their reversal or the answer to a question about them. They are generated
from their index by a counter-based generator and are not stored.

`text` cuts windows of a fixed length out of a text file: tokens (B,L) -> the next tokens (B,L). The end of the text, at
most a tenth of it, is held out for validation; there is no test set.

`words` has single words, letter by letter, between BOS and EOS: those words of the embedded dictionary that consist of
the letters a to z, or the lines of the user's own `file`. They are split by their spelling, as in `pronounce`.

`pronounce` has words and their phones, from the embedded CMU dictionary or the user's own. No word is in two splits,
and the split depends on the spelling alone, not on the seed or the order of the file. In the embedded dictionary, one
word in twenty is in the test set, and of the others those with the smallest hashes are held out for validation. With
the user's own files, `train_file` is split into training and validation in the same way, and `test_file`, if given, is
the test set. Each pronunciation of a word is an example.

Dims: N words, B batch, L length.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.data import DictionaryOptions, Level
from clearhead.data.dataset import Dataset, SequencePairs, fold_in, random_below, random_bits
from clearhead.data.vocab import (
    BOS,
    EOS,
    Pronunciations,
    Vocabulary,
    letters_in,
    load_word_list,
    phones_in,
    read_cmudict,
    read_dictionary,
    read_text,
    split_test,
    split_validation,
    text_vocab,
)

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


def load_pronounce(config: DictionaryOptions) -> Dataset:
    words, test_words = read_dictionaries(config)
    letters = Vocabulary.with_special_tokens(letters_in(words))
    phones = Vocabulary.with_special_tokens(phones_in(words))
    if config.test_file:
        check_vocab(test_words, letters, phones, config.test_file)
    splits = split_words(words, test_words, config)
    train, validation, test = (encode_pairs(split, letters, phones) for split in splits.values())
    return Dataset(train, validation, test, classes=phones.tokens, normalize=None, vocab=letters.tokens)


def check_vocab(words: Pronunciations, letters: Vocabulary, phones: Vocabulary, file: object) -> None:
    """Raises LookupError if a word of the file has a letter or a phone that is not in the vocabularies."""
    try:
        for word, variants in words.items():
            letters.encode(word)
            for variant in variants:
                phones.encode(variant)
    except LookupError as error:
        raise LookupError(f"{file}: {error}") from None


def load_splits(config: DictionaryOptions) -> dict[str, Pronunciations]:
    """The words of each split: train, validation, test."""
    return split_words(*read_dictionaries(config), config)


def split_words(
    words: Pronunciations, test_words: Pronunciations, config: DictionaryOptions
) -> dict[str, Pronunciations]:
    train, validation = split_validation((word for word in words if word not in test_words), config.validation)
    train = train[: config.limit] if config.limit else train
    return {
        "train": {word: words[word] for word in train},
        "validation": {word: words[word] for word in validation},
        "test": test_words,
    }


def read_dictionaries(config: DictionaryOptions) -> tuple[Pronunciations, Pronunciations]:
    """The words that define the vocabularies, and the test words, which may be among them."""
    if config.train_file:
        test_words = read_dictionary(config.test_file, stress=config.stress) if config.test_file else {}
        return read_dictionary(config.train_file, stress=config.stress), test_words
    if config.test_file:
        return read_cmudict(stress=config.stress), read_dictionary(config.test_file, stress=config.stress)
    words = read_cmudict(stress=config.stress)
    _, test = split_test(words)
    return words, {word: words[word] for word in test}


def encode_pairs(words: Pronunciations, letters: Vocabulary, phones: Vocabulary) -> SequencePairs:
    """One example for each pronunciation of each word: letter ids -> phone ids and EOS."""
    examples = [(word, variant) for word, variants in words.items() for variant in variants]
    sources = [letters.encode(word) for word, _ in examples]
    return SequencePairs.of(sources, [[*phones.encode(variant), EOS] for _, variant in examples])
