"""Heads and aggregates as pictures: rankings, maps beside the occlusion map, heads that form while training.

Dims: T times, L layers, H heads, C channels.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.drawing import COLORS, LIGHT_GRAY, wrap
from clearhead.files import write_atomic
from clearhead.insight.plots import (
    SMALL,
    TEXT,
    TINT_NOTE,
    bar,
    caption,
    check_names,
    draw_matrix,
    heading,
    heat,
    is_long,
    lay_over,
    limits,
    new_figure,
    numbers,
    panel_title,
    plain,
    show_picture,
    tint,
    tint_limits,
    two_dimensional,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_BARS = 24
DELETION_NOTE = (
    "Deletion area: patches are hidden one by one, the highest ranked first; it is the area under the curve of the "
    "predicted class's probability, from 0 to 1. The smaller it is, the better the map ranks what the model relies on."
)
OCCLUSION_NOTE = (
    "Occlusion: how much the probability of the predicted class drops when one patch is hidden "
    "(green: it rises). It is measured by changing the input; the other maps are computed from attention."
)


def draw_head_importance(
    changes: Any,
    names: Sequence[str],
    *,
    unit: str = "change in the score",
    title: str = "what the model loses without each head",
) -> "Figure":
    """Heads by how much their loss changes the score (L,H), the largest change first; nan where there is no head."""
    table = numbers(changes)
    check_names(names, len(table))
    places = [(row, head) for row, head in np.ndindex(*table.shape) if np.isfinite(table[row, head])]
    places.sort(key=lambda place: -abs(table[place]))
    left_out, places = len(places[MOST_BARS:]), places[:MOST_BARS]
    figure = new_figure(10.0, max(3.2, 0.36 * len(places) + 1.9))
    axes = figure.subplots()
    values = [table[place] for place in places]
    axes.barh(range(len(places)), values, color=[COLORS[0] if value >= 0 else COLORS[1] for value in values])
    axes.set_yticks(range(len(places)), labels=[wrap(f"{names[row]}  head {head}", 4.5, SMALL) for row, head in places])
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=1)
    axes.tick_params(labelsize=SMALL)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color=LIGHT_GRAY)
    axes.set_axisbelow(True)
    axes.set_xlabel(unit + (f"   ({left_out} smaller changes are left out)" if left_out else ""), fontsize=TEXT)
    axes.margins(y=0.02)
    heading(figure, title)
    return figure


def draw_attributions(
    image: Any,
    maps: Mapping[str, Any],
    occluded: Any,
    areas: Mapping[str, float] | None = None,
    *,
    title: str = "attention over all layers, compared with hiding each patch",
) -> "Figure":
    """The image, each aggregate (rows,columns) over it on a scale of its own, and the occlusion map.

    `areas` are those under the deletion curves, by the name of the map, "occlusion" for the last.
    """
    areas = {} if areas is None else areas
    cells = {name: two_dimensional(cells) for name, cells in maps.items()}
    proof = two_dimensional(occluded)
    columns = min(4, -(-(len(cells) + 2) // 2))
    rows = -(-(len(cells) + 2) // columns)
    figure = new_figure(3.3 * columns, 3.4 * rows + 0.8)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        plain(axes)
    show_picture(panels[0], image)
    panels[0].set_title("image", fontsize=TEXT)
    for axes, (name, matrix) in zip(panels[1:], [*cells.items(), ("occlusion", proof)], strict=False):
        if name == "occlusion":
            most = float(np.abs(matrix).max()) or 1.0
            drawn = lay_over(axes, image, matrix, -most, most, tint(signed=True))
        else:
            drawn = lay_over(axes, image, matrix, *tint_limits([matrix]))
        panel_title(axes, name, 3.0)
        bar(figure, drawn, axes, orientation="horizontal", shrink=0.8, pad=0.02)
        if name in areas:
            axes.set_xlabel(f"deletion area {areas[name]:.3f}", fontsize=SMALL)
    heading(figure, title)
    caption(figure, "\n".join([*([DELETION_NOTE] if areas else []), OCCLUSION_NOTE, TINT_NOTE]))
    return figure


def draw_head_entropy(
    steps: Sequence[int], entropies: Any, names: Sequence[str], *, most: float | None = None
) -> "Figure":
    """Entropy of each head against the step of training (T,L,H), a panel for each layer; `most` is that of a head that
    looks at all keys alike."""
    table = numbers(entropies)
    check_names(names, table.shape[1])
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure = new_figure(max(8.0, 4.6 * columns), 3.6 * rows + 1.2)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True, sharex=True)
    for axes in list(panels.flat)[len(names) :]:
        axes.set_axis_off()
    for layer, (axes, name) in enumerate(zip(panels.flat, names, strict=False)):
        for head in range(table.shape[2]):
            colour, dashed = COLORS[head % len(COLORS)], "-" if head < len(COLORS) else "--"
            axes.plot(steps, table[:, layer, head], dashed, color=colour, linewidth=2.5, label=f"head {head}")
        if most is not None:
            axes.axhline(most, color="black", linewidth=1, linestyle=":", label="all keys alike")
        panel_title(axes, name, 4.2)
        axes.tick_params(labelsize=SMALL)
        axes.grid(color=LIGHT_GRAY)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("step", fontsize=TEXT)
    figure.supylabel("entropy (nats)", fontsize=TEXT)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), fontsize=SMALL, frameon=False)
    heading(figure, "entropy of each head's attention during training")
    return figure


def draw_training_strip(
    steps: Sequence[int], maps: Any, *, title: str = "a head while it is trained", most: int = 6
) -> "Figure":
    """One head's weights (T,Q,K) at `most` of the steps, from the first to the last, on one scale."""
    table = numbers(maps)
    chosen = np.unique(np.linspace(0, len(table) - 1, min(most, len(table))).round().astype(int))
    figure = new_figure(2.3 * len(chosen) + 1.4, 3.4)
    panels = list(figure.subplots(1, len(chosen), squeeze=False).flat)
    high = limits([table])[1]
    for axes, i in zip(panels, chosen, strict=True):
        drawn = draw_matrix(axes, table[i], high)
        axes.set_title(f"step {steps[i]:,}", fontsize=TEXT)
        plain(axes)
    heading(figure, title)
    bar(figure, drawn, panels, "weight", shrink=0.85)
    return figure


# A head while it is trained, as an animated GIF.


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
    figure = new_figure(6.4, 5.8)
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
