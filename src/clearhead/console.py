"""A rich console for text that others wrote: no markup, no emoji codes, and control characters shown as escapes."""

from collections.abc import Iterable

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from clearhead.messages import LAYOUT, printable


class Console(rich.console.Console):
    """Colours come from styles alone: `[red]` in a text is text, and its control characters are escaped."""

    def __init__(self, *, width: int | None = None, stderr: bool = False):
        super().__init__(width=width, stderr=stderr, highlight=False, emoji=False, markup=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Every piece of text passes here before its style becomes an escape sequence."""
        for segment in super().render(renderable, options):
            if segment.control:  # rich's own: moves the cursor of a progress bar
                yield segment
            else:
                yield Segment(printable(segment.text, keep=LAYOUT), segment.style)
