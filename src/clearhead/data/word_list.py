"""Words to learn spelling from: the embedded dictionary's, or a list of the user's own. Does not import torch."""

from pathlib import Path

from clearhead.data.dictionary import MOST, embedded


def words_of(file: str) -> list[str]:
    """The words of a file, or, without one, those of the dictionary that have no sign but the letters a to z."""
    if file:
        return read_words(file)
    return [word for word in embedded(stress=False) if word.isalpha() and word.isascii()]


def read_words(file: str) -> list[str]:
    """One word in each line; empty lines are skipped, and what comes twice is there once."""
    try:
        lines = Path(file).expanduser().read_text("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} must be text in UTF-8, got other bytes ({error.reason}); convert it first") from None
    for number, line in enumerate(lines, start=1):
        if len(line.strip()) > MOST:
            raise ValueError(
                f"a line has one word of at most {MOST} letters, got {line[:20]!r}... in line {number} of {file}; "
                "to learn a whole text, train the recipe text"
            )
    return list(dict.fromkeys(line.strip() for line in lines if line.strip()))
