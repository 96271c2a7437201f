"""Where output goes: as wide as the terminal, with colours only there; as wide as it likes in a file or a pipe."""

import os
import sys

from rich.console import Group, RenderableType

from clearhead.console import Console
from clearhead.messages import printable

FILE_WIDTH = 120
NARROWEST = 78
"""below it a table would lose its numbers; long lines that go on in the next are the lesser evil"""


def console() -> Console:
    is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=max(NARROWEST, Console().width) if is_sized else FILE_WIDTH)


def say(line: object) -> None:
    """A line with names or paths of others in it: a line break in one of them is escaped too."""
    print(printable(line))


def warn(message: str) -> None:
    """A line beside the output, which programs do not read."""
    print(f"warning: {printable(message)}", file=sys.stderr)


def show(renderable: RenderableType) -> None:
    """Prints it; lines end where their text ends."""
    target = console()
    with target.capture() as captured:
        target.print(Group(renderable))  # a Text alone would be wrapped even where it says not to
    target.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))
