"""A contact sheet: examples of a data set on one picture."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from clearhead.data.dataset import DataSet, Examples
from clearhead.data.oddity import OddSets

PER_ROW, MARGIN, GAP, TEXT = 12, 16, 4, 16
SMALLEST = 48
"""side of an image on the sheet: smaller ones are enlarged"""
SEARCHED = 5_000
"""examples that are looked at to find some of each class"""
PAPER, INK, MARKED = "#ffffff", "#222222", "#d1495b"


@dataclass(frozen=True)
class Row:
    name: str
    images: Tensor
    """uint8 (n,C,H,W)"""
    marked: int | None = None
    """the one with a frame around it"""


def contact_sheet(data: DataSet) -> Image.Image:
    """A row of training images for each class; for sets, a row for each set with the odd one framed."""
    if isinstance(data.train, OddSets):
        return draw(rows_of_sets(data.train))
    if data.normalise is None:
        raise ValueError("a contact sheet needs images, got sequences; see them as text")
    return draw(rows_of_classes(data.train, data.classes))


def rows_of_classes(examples: Examples, classes: Sequence[str]) -> list[Row]:
    images, labels = examples.take(torch.arange(min(SEARCHED, len(examples))))
    return [Row(name, images[labels == label][:PER_ROW]) for label, name in enumerate(classes)]


def rows_of_sets(sets: OddSets) -> list[Row]:
    members, places = sets.members(torch.arange(PER_ROW))
    labels = sets.images.labels[members].tolist()
    return [
        Row(f"{labels[i][place]} among {labels[i][place - 1]}", sets.images.images[members[i]], place)
        for i, place in enumerate(places.tolist())
    ]


def draw(rows: Sequence[Row]) -> Image.Image:
    font = ImageFont.load_default(size=TEXT)
    side = max(row.images.shape[-1] for row in rows)
    scale = -(-SMALLEST // side)
    cell = side * scale
    margin = MARGIN + max(int(font.getlength(row.name)) for row in rows) + MARGIN
    width = margin + max(len(row.images) for row in rows) * (cell + GAP) + MARGIN
    sheet = Image.new("RGB", (width, 2 * MARGIN + len(rows) * (cell + GAP)), PAPER)
    pen = ImageDraw.Draw(sheet)
    for i, row in enumerate(rows):
        top = MARGIN + i * (cell + GAP)
        pen.text((MARGIN, top + cell // 2), row.name, fill=INK, font=font, anchor="lm")
        for j, pixels in enumerate(row.images):
            left = margin + j * (cell + GAP)
            sheet.paste(as_image(pixels).resize((cell, cell), Image.Resampling.NEAREST), (left, top))
            if j == row.marked:
                pen.rectangle((left - 2, top - 2, left + cell + 1, top + cell + 1), outline=MARKED, width=3)
    return sheet


def as_image(pixels: Tensor) -> Image.Image:
    """From uint8 (C,H,W), with one channel or three."""
    return Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())
