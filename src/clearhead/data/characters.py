"""A text as symbols: its characters, or the bytes of its UTF-8. Does not import torch.

A byte is written as the character of that number, so that both kinds are read in the same way.
"""

from collections.abc import Iterable

from clearhead.data.config import Level
from clearhead.data.limits import MOST_SYMBOLS, MOST_TEXT_BYTES
from clearhead.data.own_files import own_bytes, own_text

BYTES = tuple(map(chr, range(256)))
OTHERWISE = "convert it, or learn it with level=byte"


def read_text(file: str, level: Level) -> list[str]:
    """All of a file of at most MOST_TEXT_BYTES, in pieces, one character for each token."""
    if level == "byte":
        pieces = [data.decode("latin-1") for data in own_bytes(file, MOST_TEXT_BYTES)]
    else:
        pieces = own_text(file, MOST_TEXT_BYTES, OTHERWISE)
    n = len(set().union(*pieces))
    if n < 2:
        raise ValueError(f"a text must have two different characters or more, got {n} in {file}; choose another")
    if n > MOST_SYMBOLS:
        raise ValueError(f"a text may have {MOST_SYMBOLS:,} different characters, got {n:,} in {file}; try level=byte")
    return pieces


def symbols_of(text: Iterable[str], level: Level) -> tuple[str, ...]:
    """What the ids stand for: all bytes, or the characters that occur, in their order."""
    return BYTES if level == "byte" else tuple(sorted(set().union(*text)))


def from_user(text: str, level: Level) -> str:
    """What a user has typed, one character for each token; bytes that are no UTF-8 are those bytes."""
    return text.encode(errors="surrogateescape").decode("latin-1") if level == "byte" else text


def to_user(symbols: str, level: Level) -> str:
    """The other way; bytes that are no UTF-8 become a question mark in a diamond."""
    return symbols.encode("latin-1").decode(errors="replace") if level == "byte" else symbols
