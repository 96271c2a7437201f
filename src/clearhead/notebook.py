"""Display in notebooks: HTML tables for `_repr_html_`, and a progress bar that is updated in place.

All text is escaped: names of modules, classes and files are not markup. Importing this module does not import IPython.
"""

import html
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from clearhead.messages import printable

SECONDS_BETWEEN_UPDATES = 0.2
CELL = "text-align: {}; padding: 0.2em 0.8em; white-space: pre-wrap"


def escaped(text: object) -> str:
    """Text as HTML. Markup, control characters and invisible characters are shown, not interpreted."""
    return html.escape(printable(text, keep="\n"))


def html_table(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    caption: str = "",
    footer: str = "",
    right: Collection[int] = (),
) -> str:
    """A table with a caption above and a footer below; the columns in `right` are right-aligned."""

    def line(cells: Sequence[object], tag: str) -> str:
        styles = [CELL.format("right" if i in right else "left") for i in range(len(cells))]
        pairs = zip(cells, styles, strict=True)
        return "<tr>" + "".join(f'<{tag} style="{style}">{escaped(text)}</{tag}>' for text, style in pairs) + "</tr>"

    return "".join(
        [
            f"<p>{escaped(caption)}</p>" if caption else "",
            "<table>",
            f"<thead>{line(header, 'th')}</thead>" if header else "",
            f"<tbody>{''.join(line(row, 'td') for row in rows)}</tbody></table>",
            f"<p>{escaped(footer).replace(chr(10), '<br>')}</p>" if footer else "",
        ]
    )


class NotebookBar:
    """A progress bar in the output of a cell, which is replaced at each update, so that nothing is shown twice."""

    def __init__(self, total: int, completed: int = 0):
        from IPython.display import display

        self.total, self.completed, self.metrics, self.updated = total, completed, "", time.monotonic()
        self.handle: Any = display(self, display_id=True)

    def update(self, completed: int, metrics: str | None = None, *, force: bool = False) -> None:
        """Show new values, several times a second at most."""
        self.completed, self.metrics = completed, self.metrics if metrics is None else metrics
        now = time.monotonic()
        if force or now - self.updated >= SECONDS_BETWEEN_UPDATES:
            self.updated = now
            self.handle.update(self)

    def __repr__(self) -> str:
        return f"{self.completed}/{self.total}  {printable(self.metrics)}".rstrip()

    def _repr_html_(self) -> str:
        return f'<progress value="{self.completed}" max="{self.total}"></progress> {escaped(self)}'
