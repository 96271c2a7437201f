"""Shared by all figures: new figures, colors for color-blind readers, text that fits, and reproducible files.

matplotlib is imported when a figure is made. pyplot is not used, so no global state or settings change.
"""

import io
import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.files import write_atomic
from clearhead.messages import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE, BROWN = "#0072B2", "#D55E00", "#CC79A7", "#7F4F24"
COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, BROWN)
"""the color-blind safe palette of Okabe & Ito (2008), with brown in place of yellow, which is too light on white"""
GRAY, LIGHT_GRAY = "#767676", "#DDDDDD"
COLORMAP = "viridis"
"""perceptually uniform, also for color-blind readers and in grayscale"""
DPI = 150
NOTEBOOK_DPI = 90

METADATA: dict[str, dict[str, Any]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None},
}
"""the formats, and the metadata to leave out so that equal figures give equal files"""


def new_figure(width: float, height: float, dpi: int = DPI) -> "Figure":
    """An empty figure; sizes are in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = figure_class()(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


@cache
def figure_class() -> "type[Figure]":
    """A figure that a notebook shows as an image, also if pyplot was never imported."""
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        def _repr_png_(self) -> bytes:
            content = io.BytesIO()
            self.savefig(content, format="png", dpi=NOTEBOOK_DPI, metadata=METADATA[".png"], facecolor="white")
            return content.getvalue()

    return NotebookFigure


def format_number(value: float, spread: float) -> str:
    """A value rounded to about a hundredth of the spread."""
    decimals = max(0, 2 - round(math.log10(spread)))
    return f"{value:.{decimals}f}" if decimals < 6 else f"{value:.1e}"


def displayable(text: str) -> str:
    """Text for a figure: invisible characters, and those missing in matplotlib's font, are written as codes."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    if text.isspace():
        return ascii(text)[1:-1].replace(" ", "space")
    glyphs = get_font(findfont(FontProperties()))
    return "".join(c if glyphs.get_char_index(ord(c)) else f"U+{ord(c):04X}" for c in printable(text))


def text_width(text: str, size: float) -> float:
    """The width of one line in inches, for a font size in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    return text_to_path.get_text_width_height_descent(text, FontProperties(size=size), ismath=False)[0] / 72


def wrap(text: str, width: float, size: float) -> str:
    """Break text into lines of at most `width` inches, between words, or inside a word that is too long."""
    lines = []
    for paragraph in text.split("\n"):
        line = ""
        for word in paragraph.split(" "):
            longer = f"{line} {word}" if line else word
            if line and text_width(longer, size) > width:
                lines.append(line)
                longer = word
            while text_width(longer, size) > width and len(longer) > 1:
                end = break_point(longer, width, size)
                lines.append(longer[:end])
                longer = longer[end:]
            line = longer
        lines.append(line)
    return "\n".join(lines)


def break_point(word: str, width: float, size: float) -> int:
    """The number of characters of a word that fit into a line, which ends after punctuation if possible."""
    end = max((n for n in range(1, len(word)) if text_width(word[:n], size) <= width), default=1)
    breaks = [n for n in range(max(1, end // 2), end + 1) if word[n - 1] in "._-/,"]
    return max(breaks, default=end)


def check_suffix(path: Path) -> None:
    if path.suffix.lower() not in METADATA:
        raise ValueError(
            f"a figure is saved as {', '.join(METADATA)}, got {path.name!r}; try {path.stem or 'figure'}.png"
        )


def save_figure(figure: "Figure", path: Path) -> Path:
    """Write PNG, SVG or PDF, by the suffix of the path, atomically. Equal figures give identical files."""
    import matplotlib

    check_suffix(path)
    suffix, content = path.suffix.lower(), io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "clearhead"}):
        figure.savefig(content, format=suffix[1:], metadata=METADATA[suffix], facecolor="white")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content.getvalue())
    return path
