"""Contact sheets: examples of a data set in a single image."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from clearhead.data.batches import Batches
from clearhead.data.dataset import Dataset, Examples, Subset
from clearhead.data.image_datasets import OddSets
from clearhead.data.options import Augmentation

NUM_COLUMNS, MARGIN, GAP, FONT_SIZE = 12, 16, 4, 16
NUM_AUGMENTED_ROWS, NUM_VERSIONS = 10, 8
"""rows of an augmented sheet (at least one per class), and augmented versions per row"""
MIN_CELL = 48
"""smallest side of an image on the sheet in pixels; smaller images are enlarged"""
MAX_CELL = 256
"""largest side of an image on the sheet in pixels; larger images are downscaled"""
MAX_ROWS, MAX_NAME_LENGTH = 64, 40
"""limits on rows and on the length of their names, because a folder may have thousands of classes with long names"""
MAX_SCANNED = 5_000
"""examples that are searched for images of each class"""
BACKGROUND, TEXT_COLOR, HIGHLIGHT = "#ffffff", "#222222", "#d1495b"
OUTLINE = "#c8c8c8"
"""the outline of each image, which separates white images from the background"""


@dataclass(frozen=True)
class Row:
    name: str
    images: Tensor
    """uint8 (n,C,H,W)"""
    highlighted: int | None = None
    """index of the image that is framed"""


def contact_sheet(data: Dataset) -> Image.Image:
    """One row of training images per class; for `odd-one-out`, one row per set with the odd image framed."""
    if isinstance(data.train, OddSets):
        return draw(rows_of_sets(data.train))
    if data.normalize is None:
        raise ValueError("a contact sheet needs images, got sequences")
    return draw(rows_of_classes(data.train, data.classes))


def rows_of_classes(examples: Examples, classes: Sequence[str]) -> list[Row]:
    images, labels = examples.get_batch(torch.arange(min(MAX_SCANNED, len(examples))))
    return [Row(name, images[labels == label][:NUM_COLUMNS]) for label, name in enumerate(classes[:MAX_ROWS])]


def augmented_sheet(data: Dataset, augmentation: Augmentation, seed: int) -> Image.Image:
    """One row per selected training image: the original, then its augmented version in each of several training steps.

    The versions are batches of `Batches`, as in training (including crop, flip, cutout and mixup), with the selected
    images as the only training examples. Only the normalization is undone.
    """
    if data.normalize is None:
        raise ValueError("augmentation needs images, got sequences")
    names, chosen = examples_by_class(data)
    shown = Subset(data.train, chosen)
    batches = Batches(replace(data, train=shown), len(shown), seed, augmentation=augmentation)  # one step is one epoch
    columns = [shown.get_batch(torch.arange(len(shown)))[0]]
    for step in range(NUM_VERSIONS):
        inputs = data.normalize.undo(batches.at(step).inputs)
        columns.append(inputs[batches.epoch_order(step).argsort()])  # restores the order of the rows
    rows = [Row(name, images) for name, images in zip(names, torch.stack(columns, dim=1), strict=True)]
    return draw(rows, {0: "original", 1: f"augmented ({describe(augmentation)})"})


def examples_by_class(data: Dataset) -> tuple[list[str], Tensor]:
    """Class names and indices of some training examples, sorted by class."""
    labels = data.train.get_batch(torch.arange(min(MAX_SCANNED, len(data.train))))[1]
    per_class = max(1, NUM_AUGMENTED_ROWS // len(data.classes))
    indices = [(labels == label).nonzero().flatten()[:per_class] for label in range(len(data.classes))]
    return [name for name, group in zip(data.classes, indices, strict=True) for _ in group], torch.cat(indices)


def describe(augmentation: Augmentation) -> str:
    """crop 4, flip"""
    used = {name: value for name, value in asdict(augmentation).items() if value}
    return ", ".join(name if value is True else f"{name} {value}" for name, value in used.items()) or "none"


def rows_of_sets(sets: OddSets) -> list[Row]:
    members, positions = sets.members(torch.arange(NUM_COLUMNS))
    labels = sets.images.labels[members].tolist()
    return [
        Row(f"{labels[i][position]} among {labels[i][position - 1]}", sets.images.images[members[i]], position)
        for i, position in enumerate(positions.tolist())
    ]


def draw(rows: Sequence[Row], headings: Mapping[int, str] | None = None) -> Image.Image:
    """Rows of images with their names on the left. Headings are drawn above their columns, after a gap."""
    headings, rows = headings or {}, [replace(row, name=truncate(row.name)) for row in rows[:MAX_ROWS]]
    font = ImageFont.load_default(size=FONT_SIZE)
    side = max(row.images.shape[-1] for row in rows)
    cell = min(side * -(-MIN_CELL // side), MAX_CELL)
    margin = MARGIN + max(int(font.getlength(row.name)) for row in rows) + MARGIN
    n = max(len(row.images) for row in rows)
    lefts = [margin + j * (cell + GAP) + MARGIN * sum(0 < start <= j for start in headings) for j in range(n)]
    rights = [lefts[-1] + cell if n else margin]
    rights += [lefts[j] + int(font.getlength(heading)) for j, heading in headings.items()]
    first_top = MARGIN + (FONT_SIZE + MARGIN // 2 if headings else 0)
    sheet = Image.new("RGB", (max(rights) + MARGIN, first_top + len(rows) * (cell + GAP) + MARGIN), BACKGROUND)
    canvas = ImageDraw.Draw(sheet)
    for j, heading in headings.items():
        canvas.text((lefts[j], MARGIN), heading, fill=TEXT_COLOR, font=font)
    for i, row in enumerate(rows):
        top = first_top + i * (cell + GAP)
        canvas.text((MARGIN, top + cell // 2), row.name, fill=TEXT_COLOR, font=font, anchor="lm")
        for j, pixels in enumerate(row.images):
            left = lefts[j]
            method = Image.Resampling.NEAREST if side <= cell else Image.Resampling.BICUBIC
            sheet.paste(to_image(pixels).resize((cell, cell), method), (left, top))
            canvas.rectangle((left - 1, top - 1, left + cell, top + cell), outline=OUTLINE)
            if j == row.highlighted:
                canvas.rectangle((left - 2, top - 2, left + cell + 1, top + cell + 1), outline=HIGHLIGHT, width=3)
    return sheet


def truncate(name: str) -> str:
    return name if len(name) <= MAX_NAME_LENGTH else f"{name[: MAX_NAME_LENGTH - 3]}..."


def to_image(pixels: Tensor) -> Image.Image:
    """An image from uint8 (C,H,W), with one channel or three."""
    return Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())
