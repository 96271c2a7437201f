"""Display in notebooks: HTML tables and the viewer for `_repr_html_`, and a progress bar that is updated in place.

All text is escaped: names of modules, classes and files are not markup. Importing this module does not import IPython.
"""

import base64
import html
import io
import time
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from clearhead.messages import printable

if TYPE_CHECKING:
    import numpy as np

SECONDS_BETWEEN_UPDATES = 0.2
FRAME_HEIGHT = 720
"""pixels of the viewer in a notebook"""
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
            f"<p>{escaped(footer)}</p>" if footer else "",
        ]
    )


def viewer_frame(document: str, image: bytes) -> str:
    """An HTML document in a frame that may run its scripts and nothing else.

    A static image (PNG) lies below it, and is seen where frames or scripts are removed.
    """
    picture = base64.b64encode(image).decode()
    return (
        '<div class="clearhead-viewer" style="display: grid">'
        f'<img style="grid-area: 1 / 1; max-width: 100%" alt="Attention of every layer (rows) and head (columns)" '
        f'src="data:image/png;base64,{picture}">'
        f'<iframe style="grid-area: 1 / 1; z-index: 1; width: 100%; height: {FRAME_HEIGHT}px; border: 0; '
        f'background: white" sandbox="allow-scripts" srcdoc="{html.escape(document)}"></iframe></div>'
    )


def static_image(maps: "Sequence[np.ndarray]", size: int = 64) -> bytes:
    """A PNG of attention maps (H,Q,K), one row for each layer: the darker, the larger the weight."""
    import numpy as np
    from PIL import Image

    gap, columns = 4, max(len(layer) for layer in maps)
    canvas = np.full((len(maps) * (size + gap) + gap, columns * (size + gap) + gap), 255, dtype=np.uint8)
    for i, layer in enumerate(maps):
        for j, weights in enumerate(layer):
            rows, keys = (np.arange(size) * length // size for length in weights.shape)
            cell = weights[rows][:, keys].astype(np.float32)
            shade = 235 - 235 * cell / max(float(np.nanmax(cell, initial=0.0)), 1e-12)
            top, left = gap + i * (size + gap), gap + j * (size + gap)
            canvas[top : top + size, left : left + size] = np.nan_to_num(shade, nan=255.0)
    stream = io.BytesIO()
    Image.fromarray(canvas).save(stream, "PNG")
    return stream.getvalue()


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
