"""Words to learn spelling from: the embedded dictionary's, or a list of the user's own. Does not import torch."""

from clearhead.data.dictionary import MOST, embedded
from clearhead.data.own_files import own_lines


def words_of(file: str) -> list[str]:
    """The words of a file, or, without one, those of the dictionary that have no sign but the letters a to z."""
    if file:
        return read_words(file)
    return [word for word in embedded(stress=False) if word.isalpha() and word.isascii()]


def read_words(file: str) -> list[str]:
    """One word in each line; empty lines are skipped, and what comes twice is there once."""
    lines = own_lines(file)
    for number, line in enumerate(lines, start=1):
        if len(line.strip()) > MOST:
            raise ValueError(
                f"a line has one word of at most {MOST} letters, got {line[:20]!r}... in line {number} of {file}; "
                "to learn a whole text, train the recipe text"
            )
    words = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not words:
        raise ValueError(f"a list has a word in each line, got none in {file}; name another file")
    return words
