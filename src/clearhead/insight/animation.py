"""A head while it is trained, as an animated GIF."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.files import write_atomic
from clearhead.insight.figures import is_long
from clearhead.insight.style import TEXT, bar, blank, heading, heat, limits, numbers, plain

LAST = 6
"""times as long, so that one sees where it ended"""


def save_animation(
    steps: Sequence[int], maps: Any, path: Path, *, title: str = "a head while it is trained", seconds: float = 0.25
) -> Path:
    """One picture for each step's weights (T,Q,K), all on one scale; it runs for ever."""
    from PIL import Image

    table = numbers(maps)
    if path.suffix.lower() != ".gif":
        raise ValueError(f"an animation is saved as .gif, got {path.name!r}; try {path.stem or 'head'}.gif")
    if table.ndim != 3 or len(table) != len(steps) or not len(table):
        raise ValueError(
            f"an animation has one matrix for each step, got {table.shape} for {len(steps)} steps; "
            "choose an example, a layer and a head"
        )
    figure = blank(6.4, 5.8)
    figure.set_dpi(100)
    axes = figure.subplots()
    shown = heat(axes, table[0], 0, limits([table])[1], aspect="auto" if is_long(table.shape[1:]) else "equal")
    plain(axes)
    axes.set_xlabel("key", fontsize=TEXT)
    axes.set_ylabel("query", fontsize=TEXT)
    heading(figure, title)
    bar(figure, shown, axes, "weight", shrink=0.85)
    lay_out(figure, axes, steps[-1])
    frames = []
    for step, matrix in zip(steps, table, strict=True):
        shown.set_data(np.ma.masked_invalid(matrix))
        axes.set_title(f"step {step:,}", fontsize=TEXT)
        figure.canvas.draw()
        pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3]  # type: ignore[attr-defined]
        frames.append(Image.fromarray(pixels.copy()).quantize(128))
    content, pause = io.BytesIO(), round(1000 * seconds)
    frames[0].save(
        content,
        format="GIF",
        save_all=True,
        append_images=frames[1:],
        duration=[pause] * (len(frames) - 1) + [LAST * pause],
        loop=0,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content.getvalue())
    return path


def lay_out(figure: Any, axes: Any, longest: int) -> None:
    """Every frame in the same place: the layout is found once, with a title in it, and kept."""
    axes.set_title(f"step {longest:,}", fontsize=TEXT)
    for _ in range(2):  # the first draw sizes the bar, the second what stands beside it
        figure.canvas.draw()
    figure.set_layout_engine("none")
