"""Figures that compare heads and attributions: importance, attribution maps, and heads over the course of training.

Dims: T training steps, L layers, H heads, Q queries, K keys, C channels.
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
    add_caption,
    add_colorbar,
    add_title,
    check_labels,
    draw_heatmap,
    draw_image,
    draw_matrix,
    draw_overlay,
    hide_axes,
    is_elongated,
    new_figure,
    panel_title,
    tint,
    tint_limits,
    to_matrix,
    to_numpy,
    value_range,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_BARS = 24
LAST_FRAME = 6
"""the last frame of an animation is shown for this many frame durations"""
DELETION_NOTE = (
    "Deletion AUC: patches are hidden one by one, the highest ranked first; this is the area under the curve of the "
    "predicted probability, from 0 to 1. The smaller it is, the better the map ranks what the model relies on."
)
OCCLUSION_NOTE = (
    "Occlusion: how much the probability of the predicted class drops when one patch is hidden (green: it rises). "
    "It is measured by changing the input; the other maps are computed from attention."
)


def draw_head_importance(
    changes: Any,
    names: Sequence[str],
    *,
    unit: str = "change of the score",
    title: str = "Importance of each head",
) -> "Figure":
    """Heads sorted by how much removing them changes the score (L,H); NaN where a layer has no such head."""
    table = to_numpy(changes)
    check_labels(names, len(table))
    heads = [(row, head) for row, head in np.ndindex(*table.shape) if np.isfinite(table[row, head])]
    heads.sort(key=lambda index: -abs(table[index]))
    num_omitted, heads = len(heads[MAX_BARS:]), heads[:MAX_BARS]
    figure = new_figure(10.0, max(3.2, 0.36 * len(heads) + 1.9))
    axes = figure.subplots()
    values = [table[index] for index in heads]
    axes.barh(range(len(heads)), values, color=[COLORS[0] if value >= 0 else COLORS[1] for value in values])
    axes.set_yticks(range(len(heads)), labels=[wrap(f"{names[row]}  head {head}", 4.5, SMALL) for row, head in heads])
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=1)
    axes.tick_params(labelsize=SMALL)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color=LIGHT_GRAY)
    axes.set_axisbelow(True)
    axes.set_xlabel(unit + (f"   ({num_omitted} smaller changes omitted)" if num_omitted else ""), fontsize=TEXT)
    axes.margins(y=0.02)
    add_title(figure, title)
    return figure


def draw_attributions(
    image: Any,
    maps: Mapping[str, Any],
    occlusion: Any,
    areas: Mapping[str, float] | None = None,
    *,
    title: str = "Attribution over all layers, compared with occlusion",
) -> "Figure":
    """The image, each attribution map (rows,columns) on top of it with its own color scale, and the occlusion map.

    `areas` are the deletion AUCs by the name of the map, with "occlusion" for the last one.
    """
    areas = {} if areas is None else areas
    cells = {name: to_matrix(cells) for name, cells in maps.items()}
    occlusion_map = to_matrix(occlusion)
    columns = min(4, -(-(len(cells) + 2) // 2))
    rows = -(-(len(cells) + 2) // columns)
    figure = new_figure(3.3 * columns, 3.4 * rows + 0.8)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        hide_axes(axes)
    draw_image(panels[0], image)
    panels[0].set_title("image", fontsize=TEXT)
    for axes, (name, matrix) in zip(panels[1:], [*cells.items(), ("occlusion", occlusion_map)], strict=False):
        if name == "occlusion":
            largest = float(np.abs(matrix).max()) or 1.0
            overlay = draw_overlay(axes, image, matrix, -largest, largest, tint(signed=True))
        else:
            overlay = draw_overlay(axes, image, matrix, *tint_limits([matrix]))
        panel_title(axes, name, 3.0)
        add_colorbar(figure, overlay, axes, orientation="horizontal", shrink=0.8, pad=0.02)
        if name in areas:
            axes.set_xlabel(f"deletion AUC {areas[name]:.3f}", fontsize=SMALL)
    add_title(figure, title)
    add_caption(figure, "\n".join([*([DELETION_NOTE] if areas else []), OCCLUSION_NOTE, TINT_NOTE]))
    return figure


def draw_head_entropy(
    steps: Sequence[int], entropies: Any, names: Sequence[str], *, maximum: float | None = None
) -> "Figure":
    """The entropy of each head over training (T,L,H), one panel per layer; `maximum` is that of uniform attention."""
    table = to_numpy(entropies)
    check_labels(names, table.shape[1])
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure = new_figure(max(8.0, 4.6 * columns), 3.6 * rows + 1.2)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True, sharex=True)
    for axes in list(panels.flat)[len(names) :]:
        axes.set_axis_off()
    for layer, (axes, name) in enumerate(zip(panels.flat, names, strict=False)):
        for head in range(table.shape[2]):
            color, dashed = COLORS[head % len(COLORS)], "-" if head < len(COLORS) else "--"
            axes.plot(steps, table[:, layer, head], dashed, color=color, linewidth=2.5, label=f"head {head}")
        if maximum is not None:
            axes.axhline(maximum, color="black", linewidth=1, linestyle=":", label="uniform attention")
        panel_title(axes, name, 4.2)
        axes.tick_params(labelsize=SMALL)
        axes.grid(color=LIGHT_GRAY)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("training step", fontsize=TEXT)
    figure.supylabel("entropy (nats)", fontsize=TEXT)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), fontsize=SMALL, frameon=False)
    add_title(figure, "Attention entropy of each head during training")
    return figure


def draw_training_strip(
    steps: Sequence[int], maps: Any, *, title: str = "One head during training", max_panels: int = 6
) -> "Figure":
    """The weights (T,Q,K) of one head at up to `max_panels` steps, from the first to the last, on one color scale."""
    table = to_numpy(maps)
    chosen = np.unique(np.linspace(0, len(table) - 1, min(max_panels, len(table))).round().astype(int))
    figure = new_figure(2.3 * len(chosen) + 1.4, 3.4)
    panels = list(figure.subplots(1, len(chosen), squeeze=False).flat)
    high = value_range([table])[1]
    for axes, i in zip(panels, chosen, strict=True):
        overlay = draw_matrix(axes, table[i], high)
        axes.set_title(f"step {steps[i]:,}", fontsize=TEXT)
        hide_axes(axes)
    add_title(figure, title)
    add_colorbar(figure, overlay, panels, "weight", shrink=0.85)
    return figure


def save_animation(
    steps: Sequence[int], maps: Any, path: Path, *, title: str = "One head during training", seconds: float = 0.25
) -> Path:
    """An endless animated GIF with one frame for the weights (T,Q,K) of each step, on one color scale."""
    from PIL import Image

    table = to_numpy(maps)
    if path.suffix.lower() != ".gif":
        raise ValueError(f"an animation is saved as .gif, got {path.name!r}; try {path.stem or 'head'}.gif")
    if table.ndim != 3 or len(table) != len(steps) or not len(table):
        raise ValueError(
            f"an animation needs one matrix for each step, got {table.shape} for {len(steps)} steps; "
            "choose an example, a layer and a head"
        )
    figure = new_figure(6.4, 5.8)
    figure.set_dpi(100)
    axes = figure.subplots()
    image = draw_heatmap(
        axes, table[0], 0, value_range([table])[1], aspect="auto" if is_elongated(table.shape[1:]) else "equal"
    )
    hide_axes(axes)
    axes.set_xlabel("key", fontsize=TEXT)
    axes.set_ylabel("query", fontsize=TEXT)
    add_title(figure, title)
    add_colorbar(figure, image, axes, "weight", shrink=0.85)
    freeze_layout(figure, axes, steps[-1])
    frames = []
    for step, matrix in zip(steps, table, strict=True):
        image.set_data(np.ma.masked_invalid(matrix))
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
        duration=[pause] * (len(frames) - 1) + [LAST_FRAME * pause],
        loop=0,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content.getvalue())
    return path


def freeze_layout(figure: Any, axes: Any, longest: int) -> None:
    """Compute the layout once, with the widest title, so that nothing moves between frames."""
    axes.set_title(f"step {longest:,}", fontsize=TEXT)
    for _ in range(2):  # the first draw sizes the color bar, the second the axes next to it
        figure.canvas.draw()
    figure.set_layout_engine("none")
