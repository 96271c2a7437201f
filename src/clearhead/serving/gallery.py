"""Pictures with a model's answers below them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead.data import datasets
from clearhead.drawing import COLOURS, blank
from clearhead.serving.session import Session
from clearhead.serving.testing import answers_on_test

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 8


@dataclass(frozen=True)
class Shown:
    image: Tensor
    """uint8 (C,height,width)"""
    answer: str
    probability: float
    right: str | None = None
    """the right answer, where it is known"""


def draw_gallery(groups: dict[str, Sequence[Shown]]) -> "Figure":
    """A block of pictures below each title; a wrong answer stands in orange, with the right one."""
    rows = {title: -(-len(shown) // COLUMNS) for title, shown in groups.items() if shown}
    figure = blank(1.25 * COLUMNS, sum(1.7 * n + 0.45 for n in rows.values()))
    blocks = figure.subfigures(len(rows), 1, squeeze=False, height_ratios=[1.7 * n + 0.45 for n in rows.values()])
    for block, (title, n) in zip(blocks[:, 0], rows.items(), strict=True):
        block.suptitle(title, fontsize=12)
        panels = block.subplots(n, COLUMNS, squeeze=False).flat
        for i, panel in enumerate(panels):
            panel.set_axis_off()
            if i < len(groups[title]):
                draw_one(panel, groups[title][i])
    return figure


def draw_one(panel: "Axes", shown: Shown) -> None:
    pixels = shown.image.permute(1, 2, 0)  # (C,height,width) -> (height,width,C)
    panel.imshow(pixels.squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    is_wrong = shown.right is not None and shown.right != shown.answer
    text = f"{shown.answer}  {shown.probability:.0%}" + (f"\n(it is {shown.right})" if is_wrong else "")
    panel.text(
        0.5,
        -0.06,
        text,
        transform=panel.transAxes,
        ha="center",
        va="top",
        fontsize=10,
        color=COLOURS[1] if is_wrong else "black",
    )


def gallery_of_test(session: Session, n: int = 16) -> "Figure":
    """The first n test images, and the n wrong answers that the model was surest of."""
    data = datasets.load(session.config.data, session.config.seed)
    targets, answers = answers_on_test(session, data)
    surest, chosen = answers.max(-1)
    wrong = (chosen != targets).nonzero().flatten()
    worst = wrong[surest[wrong].argsort(descending=True, stable=True)][:n]

    def shown(places: Tensor) -> list[Shown]:
        images, _ = data.test.take(places)
        names = session.classes
        return [
            Shown(image, names[int(chosen[i])], float(surest[i]), names[int(targets[i])])
            for image, i in zip(images, places.tolist(), strict=True)
        ]

    return draw_gallery(
        {
            "the first test images, with the answer and its probability": shown(torch.arange(min(n, len(targets)))),
            f"mistakes: {len(wrong):,} of {len(targets):,}; those it was surest of": shown(worst),
        }
    )
