"""What all messages share: control characters shown as escapes, suggestions for misspelled names, durations.

Importing this does not import torch.
"""

import difflib
import json
import math
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TextIO

SYNONYMS = {
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "bfloat16": "bf16",
    "adam": "adamw",
    "cls": "class",
    "avg": "mean",
    "average": "mean",
}
"""names from other libraries, and ours; a suggestion is made only where ours is among the known names"""
MOST_SHOWN = 60
"""characters of a wrong value that an error shows"""
CLOSE, ROUGH = 0.6, 0.5
"""difflib ratios: of a typing mistake, and of an abbreviation"""

UNSAFE = re.compile(
    r"[\x00-\x1f\x7f-\x9f"  # C0 and C1 controls, DEL: cursor movement, colours, titles, clipboards
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # text is shown in another order than it is read in
    r"\u00ad\u180e\u200b\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # invisible
    r"\u2028\u2029"  # line breaks to some programs
    r"\ud800-\udfff]"  # lone surrogates: bytes of a file name that are not UTF-8
    r"|(?<![^\x00-\x7f])[\u200c\u200d]"  # joiners, unless they follow what they can join: emoji, Persian, Hindi
)
"""characters that a terminal obeys, or that make a text look like another one"""


def printable(text: object, keep: str = "") -> str:
    r"""A text that is safe to show: control and invisible characters are written as escapes, such as \x1b.

    Everything else, such as kᵀ, ü, 猫 and emoji, is left as it is. Characters in `keep` are too: without it, the
    result is a single line, so that no name can forge another line of output.
    """
    return UNSAFE.sub(lambda match: match[0] if match[0] in keep else escape(match[0]), str(text))


def escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def brief(value: object) -> str:
    """A wrong value as it is written, on one line of at most MOST_SHOWN characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or lists in lists in lists
        return f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The known name that was probably meant, None if nothing resembles it.

    In this order: the same name apart from case, "-" and "_"; the name that other libraries use; a typing mistake; a
    name that begins with it or contains it (gpt2 -> gpt2_small); an abbreviation, which has the same first letter.
    """
    known = {plain(one): one for one in reversed(list(names))}  # of equal ones the first
    word, keys = plain(name), list(reversed(known))
    if word in known:
        return known[word]
    if SYNONYMS.get(word) in known:
        return known[SYNONYMS[word]]
    typed = difflib.get_close_matches(word, keys, n=1, cutoff=CLOSE)
    longer = sorted((key for key in keys if len(word) > 2 and word in key), key=lambda key: not key.startswith(word))
    rough = difflib.get_close_matches(word, [key for key in keys if key[:1] == word[:1]], n=1, cutoff=ROUGH)
    return next((known[key] for key in [*typed, *longer, *rough]), None)


def plain(name: str) -> str:
    return name.lower().replace("-", "_")


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """The end of a message: `; did you mean X?`, or nothing."""
    near = nearest(str(name), names)
    return f"; did you mean {near}?" if near else ""


def unknown_name(what: str, name: object, names: Iterable[str]) -> LookupError:
    """For a name that is not among the known ones: the suggestion stands before their list, which may be long."""
    names = list(names)
    near = nearest(str(name), names)
    hint = f"did you mean {near}? Choose from" if near else "choose from"
    return LookupError(f"unknown {what} {name!r}; {hint} {', '.join(names)}")


def duration(seconds: float) -> str:
    """In the units that a person would use: 23 ms, 3.6 s, 44 s, 5 min 32 s, 42 min, 1 h 33 min, 3 d 4 h."""
    if seconds < 0.1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if round(seconds) < 120:
        return f"{round(seconds)} s"
    if round(seconds) < 600:
        return in_two_units(round(seconds), "min", 60, "s")
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return in_two_units(minutes, "h", 60, "min")
    return in_two_units(round(seconds / 3600), "d", 24, "h")


def round_count(number: float) -> str:
    """Three digits, never in scientific notation: 0.25, 12.3, 5,560."""
    return f"{number:.3g}" if number < 100 else f"{number:,.0f}"


def in_two_units(count: int, large: str, ratio: int, small: str) -> str:
    whole, rest = divmod(count, ratio)
    return f"{whole:,} {large} {rest} {small}" if rest else f"{whole:,} {large}"


def json_text(value: Any, indent: int | None = 2) -> str:
    """Valid JSON in ASCII for `--json`: numbers that JSON does not have, NaN and infinity, become null."""
    return json.dumps(finite(value), indent=indent, allow_nan=False)


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# The standard streams of a command: control characters are escaped, and training survives the loss of its output.
#
# Importing this imports neither torch nor rich.


LAYOUT = "\n\t"
"""the control characters that are allowed in printed text"""


class Escaped:
    """A text stream that shows control characters as escapes instead of passing them on to the terminal.

    rich writes colours, which are escape sequences too, to `rich_proxied_file`: `console.Console` escapes the text
    before it is coloured.
    """

    def __init__(self, stream: "TextIO | Tolerant"):
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(printable(text, keep=LAYOUT))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


class Tolerant:
    """A text stream that is given up when it fails (full disk, closed pipe, lost terminal); `on_loss` gets a reason."""

    def __init__(self, stream: TextIO, on_loss: Callable[[str], None] = lambda reason: None):
        self.stream, self.on_loss, self.is_lost = stream, on_loss, False

    def write(self, text: str) -> int:
        self.attempt(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self.attempt(self.stream.flush)

    def attempt(self, action: Callable[[], object]) -> None:
        if self.is_lost:
            return
        try:
            action()
        except (OSError, ValueError) as error:  # a ValueError says that the stream is closed
            self.is_lost = True
            discard_pending(self.stream)
            self.on_loss(getattr(error, "strerror", None) or str(error))

    def __getattr__(self, name: str) -> Any:
        if name == "rich_proxied_file":  # otherwise rich would write past this
            raise AttributeError(name)
        return getattr(self.stream, name)


def discard_pending(stream: TextIO) -> None:
    """Drops what a failed write left in the buffer: it would fail again at each flush, and at exit (exit code 120)."""
    with suppress(OSError, ValueError, AttributeError):  # a stream without a descriptor has no such buffer
        number = stream.fileno()
        before, null = os.dup(number), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, number)
            stream.flush()
        finally:
            os.dup2(before, number)
            os.close(before)
            os.close(null)


def open_standard_descriptors() -> None:
    """Opens 0, 1 and 2 where the caller has closed them: the next file opened, a checkpoint, would get their number,
    and with it everything that is printed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
