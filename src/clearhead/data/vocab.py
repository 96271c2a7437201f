"""Vocabularies, and the readers of texts, pronouncing dictionaries and word lists. Does not import torch.

A text is read as characters or as the bytes of its UTF-8 encoding. A byte is represented by the character with the
same code point, so that both levels share the rest of the code.

A pronouncing dictionary has a word and its phones on each line, in one of two forms: that of the CMU dictionary,
`word(2) W ER1 D # comment`, or `WORD<tab>W ER D`. Spelling is converted to lower case, and word(2) is another
pronunciation of word. The package embeds the CMU dictionary: 135,166 entries by Carnegie Mellon University, licensed
as in files/cmudict/LICENCE.txt.

Words are split by the SHA-256 of their spelling, so that neither the seed nor the other words move a word to another
split.
"""

import gzip
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from itertools import takewhile
from pathlib import Path

from clearhead.data import Level
from clearhead.data.user_files import MAX_SYMBOLS, MAX_TEXT_BYTES, read_chunks, read_lines, read_text_chunks

PAD, BOS, EOS = 0, 1, 2
"""ids of the special tokens: padding of sources, beginning of a sequence, end of a sequence"""
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
"""names of the special tokens, in the order of their ids"""
IGNORE_INDEX = -100
"""padding of targets: these positions have no loss"""
MAX_SHOWN = 120
"""characters of a list of tokens in an error message"""
BYTES = tuple(map(chr, range(256)))
"""the vocabulary of level=byte"""

Pronunciations = Mapping[str, tuple[tuple[str, ...], ...]]
"""the distinct pronunciations of each word, in the order of the file"""
CMUDICT_SHA256 = "81917843c7f44ce2b094ac63873c2c7a4cf802040792c455ba3ca406891c3d22"
VARIANT = re.compile(r"(?<=.)\(\d+\)$")
COMMENT = re.compile(r"(^|\s)#.*|^;;;.*")
PHONES = re.compile(r"[A-Z]+[012]?( [A-Z]+[012]?)*")
NO_STRESS = str.maketrans("", "", "012")
MAX_WORD_LENGTH = 100
"""maximum number of letters, and of phones, of a word"""
TEST_EVERY = 20
"""one word in this many is in the test set"""


@dataclass(frozen=True)
class Vocabulary:
    """All tokens in the order of their ids."""

    tokens: tuple[str, ...]

    @classmethod
    def with_special_tokens(cls, tokens: Iterable[str]) -> "Vocabulary":
        """The special tokens, followed by the distinct tokens in sorted order."""
        return cls((*SPECIAL_TOKENS, *sorted(set(tokens))))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def token_to_id(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    @property
    def has_special_tokens(self) -> bool:
        return self.tokens[: len(SPECIAL_TOKENS)] == SPECIAL_TOKENS

    def encode(self, tokens: Sequence[str]) -> list[int]:
        """The id of each token; a str is a sequence of characters."""
        try:
            return [self.token_to_id[token] for token in tokens]
        except KeyError:
            known = self.tokens[len(SPECIAL_TOKENS) :] if self.has_special_tokens else self.tokens
            unknown = next(token for token in tokens if token not in self.token_to_id)
            raise LookupError(
                f"unknown token {unknown!r} in {format_tokens(tokens)}; the vocabulary is {format_tokens(known)}"
            ) from None

    def decode(self, ids: Iterable[int]) -> list[str]:
        """The tokens up to EOS, without special tokens."""
        if not self.has_special_tokens:
            return [self.tokens[i] for i in ids]
        before_eos = takewhile(lambda i: i != EOS, ids)
        return [self.tokens[i] for i in before_eos if i >= len(SPECIAL_TOKENS)]


def format_tokens(tokens: Sequence[str]) -> str:
    """Characters as one quoted string, other tokens separated by spaces; long lists are truncated."""
    text = repr("".join(tokens)) if all(len(token) == 1 for token in tokens) else " ".join(tokens)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def read_text(file: str, level: Level) -> list[str]:
    """The chunks of a text file of at most MAX_TEXT_BYTES, one character per token."""
    if level == "byte":
        chunks = [data.decode("latin-1") for data in read_chunks(file, MAX_TEXT_BYTES)]
    else:
        chunks = read_text_chunks(file, MAX_TEXT_BYTES, "convert it, or use level=byte")
    n = len(set().union(*chunks))
    if n < 2:
        raise ValueError(f"a text must have at least two different characters, got {n} in {file}")
    if n > MAX_SYMBOLS:
        raise ValueError(
            f"a text must have at most {MAX_SYMBOLS:,} different characters, got {n:,} in {file}; try level=byte"
        )
    return chunks


def text_vocab(text: Iterable[str], level: Level) -> tuple[str, ...]:
    """All bytes, or the distinct characters of the text in sorted order."""
    return BYTES if level == "byte" else tuple(sorted(set().union(*text)))


def text_to_tokens(text: str, level: Level) -> str:
    """The user's input, one character per token; bytes that are not valid UTF-8 are kept."""
    return text.encode(errors="surrogateescape").decode("latin-1") if level == "byte" else text


def tokens_to_text(tokens: str, level: Level) -> str:
    """The inverse of text_to_tokens; bytes that are not valid UTF-8 become U+FFFD."""
    return tokens.encode("latin-1").decode(errors="replace") if level == "byte" else tokens


def read_dictionary(path: str | Path, *, stress: bool) -> Pronunciations:
    """The user's own dictionary."""
    words = group_by_word(parse_entries(read_lines(path), str(path), stress=stress))
    if not words:
        raise ValueError(f"a dictionary must have a word and its phones on each line, got no entry in {path}")
    return words


@cache
def read_cmudict(*, stress: bool) -> Pronunciations:
    """The embedded CMU dictionary, read once per process."""
    data = gzip.decompress(files("clearhead.data").joinpath("files", "cmudict", "cmudict.dict.gz").read_bytes())
    if hashlib.sha256(data).hexdigest() != CMUDICT_SHA256:
        raise ValueError("cmudict.dict does not match its SHA-256 digest; reinstall clearhead")
    return group_by_word(parse_entries(data.decode().split("\n"), "cmudict.dict", stress=stress))


def parse_entries(lines: Iterable[str], name: str, *, stress: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The word and phones of each line, except for blank lines and comments."""
    for number, line in enumerate(lines, start=1):
        entry = COMMENT.sub("", line).rstrip()
        if not (fields := entry.split()):
            continue
        word, raw_phones = VARIANT.sub("", fields[0]).lower(), " ".join(fields[1:])
        phones = raw_phones.upper()
        is_one_case = raw_phones in (phones, raw_phones.lower())  # else two words, or case-sensitive phones
        is_one_word = "\t" not in entry or entry.partition("\t")[0].strip() == fields[0]
        if (
            not (PHONES.fullmatch(phones) and is_one_case and is_one_word)
            or max(len(word), len(fields) - 1) > MAX_WORD_LENGTH
        ):
            raise ValueError(
                f"expected a word and its phones, as in 'word W ER1 D', got {line[:60]!r} in line {number} of {name}"
            )
        yield word, tuple((phones if stress else phones.translate(NO_STRESS)).split())


def group_by_word(entries: Iterable[tuple[str, tuple[str, ...]]]) -> Pronunciations:
    """The distinct pronunciations of each word; those that differed only in a dropped stress count once."""
    words: dict[str, dict[tuple[str, ...], None]] = {}
    for word, phones in entries:
        words.setdefault(word, {})[phones] = None
    return {word: tuple(variants) for word, variants in words.items()}


def letters_in(words: Iterable[str]) -> list[str]:
    return sorted({letter for word in words for letter in word})


def phones_in(words: Pronunciations) -> list[str]:
    return sorted({phone for variants in words.values() for phones in variants for phone in phones})


def spelling_hash(word: str) -> int:
    """SHA-256 of the word in UTF-8, as an integer. It decides the split of the word."""
    return int.from_bytes(hashlib.sha256(word.encode()).digest(), "big")


def split_validation(words: Iterable[str], n: int) -> tuple[list[str], list[str]]:
    """(train, validation): the n words with the smallest hashes are held out. Both are sorted by hash."""
    ordered = sorted(words, key=spelling_hash)
    if n >= len(ordered):
        hint = f"try validation={len(ordered) // 10}" if ordered else "add words that are not in the test set"
        raise ValueError(
            f"no words are left to train on: validation={n}, got {len(ordered)} words outside the test set; {hint}"
        )
    return ordered[n:], ordered[:n]


def split_test(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """(rest, test): the words whose hash is a multiple of TEST_EVERY are the test set."""
    ordered = list(words)
    test = {word for word in ordered if spelling_hash(word) % TEST_EVERY == 0}
    return [word for word in ordered if word not in test], [word for word in ordered if word in test]


def load_word_list(file: str) -> list[str]:
    """The words of a file, or, without a file, the words of the CMU dictionary that consist of the letters a to z."""
    if file:
        return read_words(file)
    return [word for word in read_cmudict(stress=False) if word.isalpha() and word.isascii()]


def read_words(file: str) -> list[str]:
    """The distinct words of a file with one word per line; empty lines are skipped."""
    lines = read_lines(file)
    for number, line in enumerate(lines, start=1):
        if len(line.strip()) > MAX_WORD_LENGTH:
            raise ValueError(
                f"expected one word of at most {MAX_WORD_LENGTH} letters per line, "
                f"got {line[:20]!r}... in line {number} of {file}; "
                "for running text, use the recipe text"
            )
    words = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not words:
        raise ValueError(f"a word list must have one word per line, got no word in {file}")
    return words
