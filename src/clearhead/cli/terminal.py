"""Where output goes: as wide as the terminal, with colours only there; as wide as it likes in a file or a pipe."""

import os
import sys
from pathlib import Path

from rich.console import Group, RenderableType

from clearhead.console import Console
from clearhead.messages import printable

FILE_WIDTH = 120
NARROWEST = 78
"""below it a table would lose its numbers; long lines that go on in the next are the lesser evil"""
STATES = {"running": "is still training", "interrupted": "was interrupted", "diverged": "diverged"}
"""of a run that has not been trained to its end"""


def console() -> Console:
    is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=max(NARROWEST, Console().width) if is_sized else FILE_WIDTH)


def say(line: object) -> None:
    """A line with names or paths of others in it: a line break in one of them is escaped too."""
    print(printable(line))


def warn(message: str) -> None:
    """A line beside the output, which programs do not read."""
    print(f"warning: {printable(message)}", file=sys.stderr)


def warn_if_unfinished(run: Path, step: int) -> None:
    """Numbers of a run that is still training, or was stopped, are not yet those of its recipe."""
    from clearhead.cli.runs import summarise

    known = summarise(run)
    if known.state in ("running", "interrupted", "diverged"):
        end = f" of {known.total_steps:,}" if known.total_steps else ""
        at = f"at step {known.step:,}{end}"
        warn(f"{run} {STATES[known.state]} {at}; its best checkpoint so far is that of step {step:,}")


def show(renderable: RenderableType) -> None:
    """Prints it; lines end where their text ends."""
    target = console()
    with target.capture() as captured:
        target.print(Group(renderable))  # a Text alone would be wrapped even where it says not to
    target.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))
