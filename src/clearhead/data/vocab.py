"""Symbols as ids: what letters, phones and characters are to a model. Does not import torch."""

import gzip
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from itertools import takewhile
from pathlib import Path

from clearhead.data.datasets import Level
from clearhead.data.user_files import MAX_SYMBOLS, MAX_TEXT_BYTES, read_chunks, read_lines, read_text_chunks

PAD, BOS, EOS = 0, 1, 2
"""ids that stand for no symbol: the rest of a short source; before the first token of a target; after its last"""
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
"""their names, in the order of the ids"""
IGNORE_INDEX = -100
"""what targets are padded with: no answer is asked for there"""
MOST_SHOWN = 120
"""characters of a list of symbols that fit into a message"""


@dataclass(frozen=True)
class Vocabulary:
    """All symbols in the order of their ids."""

    tokens: tuple[str, ...]

    @classmethod
    def with_special_tokens(cls, symbols: Iterable[str]) -> "Vocabulary":
        """The three marks, and then the symbols, sorted."""
        return cls((*SPECIAL_TOKENS, *sorted(set(symbols))))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def token_to_id(self) -> dict[str, int]:
        return {symbol: i for i, symbol in enumerate(self.tokens)}

    @property
    def has_special_tokens(self) -> bool:
        return self.tokens[: len(SPECIAL_TOKENS)] == SPECIAL_TOKENS

    def encode(self, symbols: Sequence[str]) -> list[int]:
        """An id for each symbol; of a text, for each of its characters."""
        try:
            return [self.token_to_id[symbol] for symbol in symbols]
        except KeyError:
            known = self.tokens[len(SPECIAL_TOKENS) :] if self.has_special_tokens else self.tokens
            unknown = next(symbol for symbol in symbols if symbol not in self.token_to_id)
            raise LookupError(
                f"a symbol is one of those learnt, {shown(known)}, got {unknown!r} in {shown(symbols)}; "
                "write it another way"
            ) from None

    def decode(self, ids: Iterable[int]) -> list[str]:
        """The symbols up to the end mark; other marks are left out."""
        if not self.has_special_tokens:
            return [self.tokens[i] for i in ids]
        written = takewhile(lambda i: i != EOS, ids)
        return [self.tokens[i] for i in written if i >= len(SPECIAL_TOKENS)]


def shown(symbols: Sequence[str]) -> str:
    """Characters side by side, names with blanks between them; the first of very many."""
    text = repr("".join(symbols)) if all(len(symbol) == 1 for symbol in symbols) else " ".join(symbols)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


# A text as symbols: its characters, or the bytes of its UTF-8. Does not import torch.
#
# A byte is written as the character of that number, so that both kinds are read in the same way.


BYTES = tuple(map(chr, range(256)))
OTHERWISE = "convert it, or learn it with level=byte"


def read_text(file: str, level: Level) -> list[str]:
    """All of a file of at most MAX_TEXT_BYTES, in pieces, one character for each token."""
    if level == "byte":
        pieces = [data.decode("latin-1") for data in read_chunks(file, MAX_TEXT_BYTES)]
    else:
        pieces = read_text_chunks(file, MAX_TEXT_BYTES, OTHERWISE)
    n = len(set().union(*pieces))
    if n < 2:
        raise ValueError(f"a text must have two different characters or more, got {n} in {file}; choose another")
    if n > MAX_SYMBOLS:
        raise ValueError(f"a text may have {MAX_SYMBOLS:,} different characters, got {n:,} in {file}; try level=byte")
    return pieces


def text_vocab(text: Iterable[str], level: Level) -> tuple[str, ...]:
    """What the ids stand for: all bytes, or the characters that occur, in their order."""
    return BYTES if level == "byte" else tuple(sorted(set().union(*text)))


def text_to_tokens(text: str, level: Level) -> str:
    """What a user has typed, one character for each token; bytes that are no UTF-8 are those bytes."""
    return text.encode(errors="surrogateescape").decode("latin-1") if level == "byte" else text


def tokens_to_text(symbols: str, level: Level) -> str:
    """The other way; bytes that are no UTF-8 become a question mark in a diamond."""
    return symbols.encode("latin-1").decode(errors="replace") if level == "byte" else symbols


# Pronouncing dictionaries: a word and its phones on each line. Does not import torch.
#
# Two forms are read, line by line: the CMU dictionary's, `word(2) W ER1 D # a remark`, and `WORD<tab>W ER D`.
# Spelling is
# taken in lower case; word(2) is another pronunciation of word. The CMU dictionary is embedded in the package:
# 135,166 entries by Carnegie Mellon University, files/cmudict/LICENCE.txt.


Pronunciations = Mapping[str, tuple[tuple[str, ...], ...]]
"""each word, with its different pronunciations in the order of the file"""

DIGEST = "81917843c7f44ce2b094ac63873c2c7a4cf802040792c455ba3ca406891c3d22"
VARIANT = re.compile(r"(?<=.)\(\d+\)$")
REMARK = re.compile(r"(^|\s)#.*|^;;;.*")
PHONES = re.compile(r"[A-Z]+[012]?( [A-Z]+[012]?)*")
NO_STRESS = str.maketrans("", "", "012")
MAX_WORD_LENGTH = 100
"""letters of a word, and phones: a longer line is no entry"""
TEST_SHARE = 20
"""one word in so many is for the test"""


def read_dictionary(path: str | Path, *, stress: bool) -> Pronunciations:
    """The user's own dictionary."""
    words = grouped(entries(read_lines(path), str(path), stress=stress))
    if not words:
        raise ValueError(f"a dictionary has a word and its phones in each line, got none in {path}; name another file")
    return words


@cache
def embedded(*, stress: bool) -> Pronunciations:
    """The CMU dictionary; read once for each process."""
    data = gzip.decompress(files("clearhead.data").joinpath("files", "cmudict", "cmudict.dict.gz").read_bytes())
    if hashlib.sha256(data).hexdigest() != DIGEST:
        raise ValueError("cmudict.dict must be as its makers published it, got other bytes; install clearhead again")
    return grouped(entries(data.decode().split("\n"), "cmudict.dict", stress=stress))


def entries(lines: Iterable[str], name: str, *, stress: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Word and phones of each line that has any."""
    for number, line in enumerate(lines, start=1):
        kept = REMARK.sub("", line).rstrip()
        if not (parts := kept.split()):
            continue
        word, written = VARIANT.sub("", parts[0]).lower(), " ".join(parts[1:])
        phones = written.upper()
        is_one_case = written in (phones, written.lower())  # else it is two words, or phones that capitals tell apart
        is_one_word = "\t" not in kept or kept.partition("\t")[0].strip() == parts[0]
        if (
            not (PHONES.fullmatch(phones) and is_one_case and is_one_word)
            or max(len(word), len(parts) - 1) > MAX_WORD_LENGTH
        ):
            raise ValueError(
                f"a line has a word and its phones, as in 'word W ER1 D', got {line[:60]!r} "
                f"in line {number} of {name}; correct or remove it"
            )
        yield word, tuple((phones if stress else phones.translate(NO_STRESS)).split())


def grouped(found: Iterable[tuple[str, tuple[str, ...]]]) -> Pronunciations:
    """By word; without stress, pronunciations that differ in nothing else are one."""
    words: dict[str, dict[tuple[str, ...], None]] = {}
    for word, phones in found:
        words.setdefault(word, {})[phones] = None
    return {word: tuple(each) for word, each in words.items()}


def letters_in(words: Iterable[str]) -> list[str]:
    return sorted({letter for word in words for letter in word})


def phones_in(words: Pronunciations) -> list[str]:
    return sorted({phone for each in words.values() for phones in each for phone in phones})


def digest_of(word: str) -> int:
    """sha256 of the word in UTF-8, as one large number: what decides which part a word is in."""
    return int.from_bytes(hashlib.sha256(word.encode()).digest(), "big")


def apart(words: Iterable[str], n: int) -> tuple[list[str], list[str]]:
    """The rest, and the n words whose digests are the smallest, both in the order of their digests."""
    ordered = sorted(words, key=digest_of)
    if n >= len(ordered):
        way = f"try validation={len(ordered) // 10}, or more words" if ordered else "add words that are not in the test"
        raise ValueError(
            f"there must be words to learn beside those of the test and validation={n}, got {len(ordered)}; {way}"
        )
    return ordered[n:], ordered[:n]


def for_testing(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """The rest, and one word in TEST_SHARE: those whose digest is a multiple of it."""
    known = list(words)
    test = {word for word in known if digest_of(word) % TEST_SHARE == 0}
    return [word for word in known if word not in test], [word for word in known if word in test]


# Words to learn spelling from: the embedded dictionary's, or a list of the user's own. Does not import torch.


def words_of(file: str) -> list[str]:
    """The words of a file, or, without one, those of the dictionary that have no sign but the letters a to z."""
    if file:
        return read_words(file)
    return [word for word in embedded(stress=False) if word.isalpha() and word.isascii()]


def read_words(file: str) -> list[str]:
    """One word in each line; empty lines are skipped, and what comes twice is there once."""
    lines = read_lines(file)
    for number, line in enumerate(lines, start=1):
        if len(line.strip()) > MAX_WORD_LENGTH:
            raise ValueError(
                f"expected one word of at most {MAX_WORD_LENGTH} letters per line, "
                f"got {line[:20]!r}... in line {number} of {file}; "
                "to learn a whole text, train the recipe text"
            )
    words = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not words:
        raise ValueError(f"a list has a word in each line, got none in {file}; name another file")
    return words
