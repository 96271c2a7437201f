"""Contact sheets: examples of a data set in a single image."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from clearhead.data.batches import Batches
from clearhead.data.dataset import Dataset, Examples, Subset
from clearhead.data.options import Augmentation
from clearhead.data.mnist import OddSets

PER_ROW, MARGIN, GAP, TEXT = 12, 16, 4, 16
ROWS, VERSIONS = 10, 8
"""rows of an augmented sheet (at least one per class), and augmented versions per row"""
SMALLEST = 48
"""smallest side of an image on the sheet; smaller images are enlarged"""
LARGEST = 256
"""largest side of an image on the sheet; larger images are reduced"""
MOST_ROWS, MOST_NAME = 64, 40
"""limits on rows and on characters of a row's name, as a folder may have thousands of classes with long names"""
SEARCHED = 5_000
"""examples that are searched for members of each class"""
PAPER, INK, MARKED = "#ffffff", "#222222", "#d1495b"
EDGE = "#c8c8c8"
"""outline of each image, which keeps images with a white border visible on the white background"""


@dataclass(frozen=True)
class Row:
    name: str
    images: Tensor
    """uint8 (n,C,H,W)"""
    marked: int | None = None
    """index of the image that is framed"""


def contact_sheet(data: Dataset) -> Image.Image:
    """A row of training images for each class; for sets, a row for each set with the odd one framed."""
    if isinstance(data.train, OddSets):
        return draw(rows_of_sets(data.train))
    if data.normalize is None:
        raise ValueError("a contact sheet needs images, got sequences")
    return draw(rows_of_classes(data.train, data.classes))


def rows_of_classes(examples: Examples, classes: Sequence[str]) -> list[Row]:
    images, labels = examples.get_batch(torch.arange(min(SEARCHED, len(examples))))
    return [Row(name, images[labels == label][:PER_ROW]) for label, name in enumerate(classes[:MOST_ROWS])]


def augmented_sheet(data: Dataset, augmentation: Augmentation, seed: int) -> Image.Image:
    """One row per selected training image: the original, then its augmented version in each of several training steps.

    The versions come from `Batches`, which makes the batches of training (crop, flip, cutout and mixup included), with
    the shown images as the only training examples; only the normalization is undone.
    """
    if data.normalize is None:
        raise ValueError("augmentation is for images, got sequences")
    names, chosen = some_of_each_class(data)
    shown = Subset(data.train, chosen)
    batches = Batches(replace(data, train=shown), len(shown), seed, augmentation=augmentation)  # one step is one epoch
    columns = [shown.get_batch(torch.arange(len(shown)))[0]]
    for step in range(VERSIONS):
        inputs = data.normalize.undo(batches.at(step).inputs)
        columns.append(inputs[batches.epoch_order(step).argsort()])  # restores the order of the rows
    rows = [Row(name, images) for name, images in zip(names, torch.stack(columns, dim=1), strict=True)]
    return draw(rows, {0: "original", 1: f"augmented ({described(augmentation)})"})


def some_of_each_class(data: Dataset) -> tuple[list[str], Tensor]:
    """Class names and indices of some training examples, sorted by class."""
    labels = data.train.get_batch(torch.arange(min(SEARCHED, len(data.train))))[1]
    each = max(1, ROWS // len(data.classes))
    found = [(labels == label).nonzero().flatten()[:each] for label in range(len(data.classes))]
    return [name for name, some in zip(data.classes, found, strict=True) for _ in some], torch.cat(found)


def described(augmentation: Augmentation) -> str:
    """crop 4, flip"""
    used = {name: value for name, value in asdict(augmentation).items() if value}
    return ", ".join(name if value is True else f"{name} {value}" for name, value in used.items()) or "none"


def rows_of_sets(sets: OddSets) -> list[Row]:
    members, places = sets.members(torch.arange(PER_ROW))
    labels = sets.images.labels[members].tolist()
    return [
        Row(f"{labels[i][place]} among {labels[i][place - 1]}", sets.images.images[members[i]], place)
        for i, place in enumerate(places.tolist())
    ]


def draw(rows: Sequence[Row], headings: Mapping[int, str] | None = None) -> Image.Image:
    """Rows of images with their names on the left. A heading is drawn above its column, which a gap separates from the
    previous one."""
    headings, rows = headings or {}, [replace(row, name=shortened(row.name)) for row in rows[:MOST_ROWS]]
    font = ImageFont.load_default(size=TEXT)
    side = max(row.images.shape[-1] for row in rows)
    cell = min(side * -(-SMALLEST // side), LARGEST)
    margin = MARGIN + max(int(font.getlength(row.name)) for row in rows) + MARGIN
    n = max(len(row.images) for row in rows)
    lefts = [margin + j * (cell + GAP) + MARGIN * sum(0 < start <= j for start in headings) for j in range(n)]
    ends = [lefts[-1] + cell if n else margin]
    ends += [lefts[j] + int(font.getlength(heading)) for j, heading in headings.items()]
    above = MARGIN + (TEXT + MARGIN // 2 if headings else 0)
    sheet = Image.new("RGB", (max(ends) + MARGIN, above + len(rows) * (cell + GAP) + MARGIN), PAPER)
    pen = ImageDraw.Draw(sheet)
    for j, heading in headings.items():
        pen.text((lefts[j], MARGIN), heading, fill=INK, font=font)
    for i, row in enumerate(rows):
        top = above + i * (cell + GAP)
        pen.text((MARGIN, top + cell // 2), row.name, fill=INK, font=font, anchor="lm")
        for j, pixels in enumerate(row.images):
            left = lefts[j]
            method = Image.Resampling.NEAREST if side <= cell else Image.Resampling.BICUBIC
            sheet.paste(as_image(pixels).resize((cell, cell), method), (left, top))
            pen.rectangle((left - 1, top - 1, left + cell, top + cell), outline=EDGE)
            if j == row.marked:
                pen.rectangle((left - 2, top - 2, left + cell + 1, top + cell + 1), outline=MARKED, width=3)
    return sheet


def shortened(name: str) -> str:
    return name if len(name) <= MOST_NAME else f"{name[: MOST_NAME - 3]}..."


def as_image(pixels: Tensor) -> Image.Image:
    """From uint8 (C,H,W), with one channel or three."""
    return Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())
