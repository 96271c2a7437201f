"""How the pictures of training look, and how they are saved.

matplotlib is loaded when one is drawn. pyplot stays out: a figure belongs to who asked for it, not to a global list.
"""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, which the colour-blind tell apart too, without the yellow, which a white page swallows"""
MARKERS = "os^Dv<>PX"
GRID, GREY = "#DDDDDD", "#767676"

METADATA: dict[str, dict[str, Any]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
"""the formats, and what each would otherwise say about the day and the program"""


def blank(width: float, height: float) -> "Figure":
    """An empty figure of this many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


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
