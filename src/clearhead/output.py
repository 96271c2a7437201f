"""The standard streams of a command: control characters are escaped, and training survives the loss of its output.

Importing this imports neither torch nor rich.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TextIO

from clearhead.messages import printable

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
