"""A rich console that prints untrusted text safely: no markup, no emoji codes, and escaped control characters."""

from collections.abc import Iterable

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from clearhead.messages import LAYOUT, printable


class Console(rich.console.Console):
    """Colors come from styles only: `[red]` in text is printed literally, and control characters are escaped."""

    def __init__(self, *, width: int | None = None, stderr: bool = False):
        super().__init__(width=width, stderr=stderr, highlight=False, emoji=False, markup=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape all text before its style becomes a terminal sequence."""
        for segment in super().render(renderable, options):
            if segment.control:  # from rich itself, for example to move the cursor of a progress bar
                yield segment
            else:
                yield Segment(printable(segment.text, keep=LAYOUT), segment.style)
