"""Pictures with a model's predictions below them. Dims: C channels, S images of a set."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead.drawing import BLUE, GREY, VERMILION, blank, visible, wrap
from clearhead.serving.evaluating import PartName, examples_of
from clearhead.serving.session import Session
from clearhead.serving.testing import Report, Row, report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 8
CELL = 1.25
"""inches from one picture to the next"""
TEXT, TITLE = 9, 12
"""points"""
LINE = 1.35 * TEXT / 72
"""inches"""


@dataclass(frozen=True)
class Shown:
    image: Tensor
    """uint8 (C,height,width)"""
    answer: str
    probability: float
    right: str | None = None
    """the right answer, where it is known"""
    index: int | None = None
    """position in its part of the data"""

    @property
    def is_wrong(self) -> bool:
        return self.right is not None and self.right != self.answer

    @property
    def text(self) -> str:
        """Wrapped to the width of a column."""
        predicted = f"{visible(self.answer)}  {self.probability:.0%}"
        return wrap(predicted + (f"\nactual: {visible(self.right or '')}" if self.is_wrong else ""), 0.92 * CELL, TEXT)


def draw_gallery(groups: dict[str, Sequence[Shown]]) -> "Figure":
    """A block of pictures below each title; a wrong prediction stands in orange, with the truth below it."""
    blocks = {wrap(title, 0.96 * CELL * COLUMNS, TITLE): shown for title, shown in groups.items() if shown}
    rows = [-(-len(shown) // COLUMNS) for shown in blocks.values()]
    lines = [max(each.text.count("\n") + 1 for each in shown) for shown in blocks.values()]
    heights = [
        n * (CELL + (n_lines + 1) * LINE) + 0.3 * (title.count("\n") + 1) + 0.2
        for title, n, n_lines in zip(blocks, rows, lines, strict=True)
    ]
    figure = blank(CELL * COLUMNS, sum(heights))
    parts = figure.subfigures(len(blocks), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, (title, shown), n in zip(parts, blocks.items(), rows, strict=True):
        part.suptitle(title, fontsize=TITLE)
        for i, panel in enumerate(part.subplots(n, COLUMNS, squeeze=False).flat):
            panel.set_axis_off()
            if i < len(shown):
                draw_one(panel, shown[i])
    return figure


def draw_one(panel: "Axes", shown: Shown) -> None:
    draw_pixels(panel, shown.image)
    if shown.index is not None:
        panel.set_title(f"#{shown.index}", fontsize=8, color=GREY, pad=2)
    panel.text(
        0.5,
        -0.06,
        shown.text,
        transform=panel.transAxes,
        ha="center",
        va="top",
        fontsize=TEXT,
        color=VERMILION if shown.is_wrong else "black",
        parse_math=False,
    )


def draw_pixels(panel: "Axes", image: Tensor) -> None:
    pixels = image.permute(1, 2, 0)  # (C,height,width) -> (height,width,C)
    panel.imshow(pixels.squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=255, interpolation="nearest")


def titles(found: Report, part: PartName) -> tuple[str, str]:
    """What the two groups of a report are."""
    of_what = {"tokens": "texts"}.get(found.unit, found.unit)
    first = f"The first {len(found.first)} {of_what} of the {part} set"
    order = (
        "the largest errors" if found.first[0].probability is None and found.unit != "tokens" else "the most confident"
    )
    worst = f"Wrong predictions: {found.wrong:,} of {found.total:,} {found.unit}, {order} first"
    return first, worst


def gallery_of_test(session: Session, n: int = 16) -> "Figure":
    """The first n test images, and the n mistakes that the model was most confident of."""
    return draw_report(session, report(session, n=n), "test")


def draw_report(session: Session, found: Report, part: PartName) -> "Figure":
    """The predictions of a report, for runs on images or on sets of images."""
    examples, _ = examples_of(session, part)

    def inputs(rows: Sequence[Row]) -> Tensor:
        return examples.take(torch.tensor([row.index for row in rows]))[0]

    groups = {
        title: rows for title, rows in zip(titles(found, part), (found.first, found.mistakes), strict=True) if rows
    }
    if found.unit == "sets":
        return draw_sets({title: (rows, inputs(rows)) for title, rows in groups.items()})
    return draw_gallery(
        {
            title: [
                Shown(image, row.predicted, row.probability or 0.0, row.actual, row.index)
                for row, image in zip(rows, inputs(rows), strict=True)
            ]
            for title, rows in groups.items()
        }
    )


def draw_sets(groups: dict[str, tuple[Sequence[Row], Tensor]]) -> "Figure":
    """A line for each set of images (S,784), with a frame around the image that was taken for the odd one, and around
    the one that it is."""
    n_columns = next(iter(groups.values()))[1].shape[1]
    heights = [CELL * len(rows) + 0.4 for rows, _ in groups.values()]
    figure = blank(max(CELL * n_columns, 8.0), sum(heights))
    parts = figure.subfigures(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, (title, (rows, sets)) in zip(parts, groups.items(), strict=True):
        part.suptitle(wrap(title, 0.96 * figure.get_figwidth(), TITLE), fontsize=TITLE)
        panels = part.subplots(len(rows), n_columns, squeeze=False)
        for row, images, line in zip(rows, sets, panels, strict=True):
            for i, panel in enumerate(line):
                panel.imshow(images[i].view(28, 28).numpy(), cmap="gray", interpolation="nearest")
                panel.set(xticks=[], yticks=[])
                frame_one(panel, row, f"image {i}")
            line[0].set_ylabel(f"#{row.index}", fontsize=8, color=GREY, rotation=0, ha="right")
    return figure


def frame_one(panel: "Axes", row: Row, name: str) -> None:
    """Says below an image of a set that it was predicted to be the odd one, or that it is."""
    if name not in (row.predicted, row.actual):
        return
    colour = BLUE if name == row.actual else VERMILION
    panel.spines[:].set(edgecolor=colour, linewidth=4)
    text = f"predicted {row.probability:.0%}" if name == row.predicted else "actual"
    panel.set_xlabel(text, fontsize=TEXT, color=colour)
