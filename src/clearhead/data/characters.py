"""A text as symbols: its characters, or the bytes of its UTF-8. Does not import torch.

A byte is written as the character of that number, so that both kinds are read in the same way.
"""

from clearhead.data.config import Level
from clearhead.data.own_files import own_file, own_text

BYTES = tuple(map(chr, range(256)))
OTHERWISE = "convert it, or learn it with level=byte"


def read_text(file: str, level: Level) -> str:
    """All of a file, one character for each token."""
    text = own_file(file).read_bytes().decode("latin-1") if level == "byte" else own_text(file, OTHERWISE)
    if len(set(text)) < 2:
        raise ValueError(
            f"a text must have two different characters or more, got {len(set(text))} in {file}; choose another"
        )
    return text


def symbols_of(text: str, level: Level) -> tuple[str, ...]:
    """What the ids stand for: all bytes, or the characters that occur, in their order."""
    return BYTES if level == "byte" else tuple(sorted(set(text)))


def from_user(text: str, level: Level) -> str:
    """What a user has typed, one character for each token; bytes that are no UTF-8 are those bytes."""
    return text.encode(errors="surrogateescape").decode("latin-1") if level == "byte" else text


def to_user(symbols: str, level: Level) -> str:
    """The other way; bytes that are no UTF-8 become a question mark in a diamond."""
    return symbols.encode("latin-1").decode(errors="replace") if level == "byte" else symbols
