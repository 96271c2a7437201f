"""Pronouncing dictionaries: a word and its phones on each line. Does not import torch.

Two forms are read, line by line: the CMU dictionary's, `word(2) W ER1 D # a remark`, and `WORD<tab>W ER D`. Spelling is
taken in lower case; word(2) is another pronunciation of word. The CMU dictionary is embedded in the package:
135,166 entries by Carnegie Mellon University, files/cmudict/LICENCE.txt.
"""

import gzip
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path

from clearhead.data.own_files import own_lines

Pronunciations = Mapping[str, tuple[tuple[str, ...], ...]]
"""each word, with its different pronunciations in the order of the file"""

DIGEST = "81917843c7f44ce2b094ac63873c2c7a4cf802040792c455ba3ca406891c3d22"
VARIANT = re.compile(r"(?<=.)\(\d+\)$")
REMARK = re.compile(r"(^|\s)#.*|^;;;.*")
PHONES = re.compile(r"[A-Z]+[012]?( [A-Z]+[012]?)*")
NO_STRESS = str.maketrans("", "", "012")
MOST = 100
"""letters of a word, and phones: a longer line is no entry"""
TEST_SHARE = 20
"""one word in so many is for the test"""


def read_dictionary(path: str | Path, *, stress: bool) -> Pronunciations:
    """The user's own dictionary."""
    words = grouped(entries(own_lines(path), str(path), stress=stress))
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
        if not (PHONES.fullmatch(phones) and is_one_case and is_one_word) or max(len(word), len(parts) - 1) > MOST:
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


def letters_of(words: Iterable[str]) -> list[str]:
    return sorted({letter for word in words for letter in word})


def phones_of(words: Pronunciations) -> list[str]:
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
