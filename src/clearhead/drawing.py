"""What every picture has in common: an empty figure, colours that everybody tells apart, and how it is saved.

matplotlib is loaded when one is drawn. pyplot stays out: a figure belongs to who asked for it, not to a global list,
and leaves nobody else's settings changed.
"""

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.files import write_atomic
from clearhead.messages import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE, BROWN = "#0072B2", "#D55E00", "#CC79A7", "#7F4F24"
COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, BROWN)
"""Okabe and Ito's, which the colour-blind tell apart too, with brown for their yellow, which a white page swallows"""
GRAY, LIGHT_GRAY = "#767676", "#DDDDDD"
COLORMAP = "viridis"
"""even steps of lightness, told apart by the colour-blind and in grey"""
DPI = 150

METADATA: dict[str, dict[str, Any]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None},
}
"""the formats, and what each would otherwise say about the day and the program"""


def new_figure(width: float, height: float, dpi: int = DPI) -> "Figure":
    """An empty figure of this many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def format_number(value: float, spread: float) -> str:
    """Rounded to about a hundredth of the spread."""
    decimals = max(0, 2 - round(math.log10(spread)))
    return f"{value:.{decimals}f}" if decimals < 6 else f"{value:.1e}"


def displayable(symbol: str) -> str:
    """A character or a name on a figure: characters that do not show, or that matplotlib's own font does not have, are
    written out."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    if symbol.isspace():
        return ascii(symbol)[1:-1].replace(" ", "space")
    glyphs = get_font(findfont(FontProperties()))
    return "".join(c if glyphs.get_char_index(ord(c)) else f"U+{ord(c):04X}" for c in printable(symbol))


def text_width(text: str, size: float) -> float:
    """The width in inches of one line at a font size in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    return text_to_path.get_text_width_height_descent(text, FontProperties(size=size), ismath=False)[0] / 72


def wrap(text: str, width: float, size: float) -> str:
    """Break a text into lines no wider than `width` inches: between words, or inside a word that is wider itself."""
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
    """How many characters of a word fit into a line; if possible, the line ends after a punctuation mark."""
    end = max((n for n in range(1, len(word)) if text_width(word[:n], size) <= width), default=1)
    marks = [n for n in range(max(1, end // 2), end + 1) if word[n - 1] in "._-/,"]
    return max(marks, default=end)


def check_suffix(path: Path) -> None:
    if path.suffix.lower() not in METADATA:
        raise ValueError(
            f"a picture is saved as {', '.join(METADATA)}, got {path.name!r}; try {path.stem or 'picture'}.png"
        )


def save_figure(figure: "Figure", path: Path) -> Path:
    """PNG, SVG or PDF, by the suffix of the path: whole or not at all, and the same figure gives the same bytes."""
    import matplotlib

    check_suffix(path)
    suffix, content = path.suffix.lower(), io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "clearhead"}):
        figure.savefig(content, format=suffix[1:], metadata=METADATA[suffix], facecolor="white")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content.getvalue())
    return path
