"""What users see of data and predictions: predictions, examples to look at, reports, and contact sheets of images.

Dims: N examples, B batch, C channels, H height, W width, L length, V classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead.data import Augmentation
from clearhead.data.batches import Batches
from clearhead.data.dataset import Dataset, Examples, Subset
from clearhead.drawing import displayable
from clearhead.tasks.objectives import Objective

if TYPE_CHECKING:
    from PIL.Image import Image

    from clearhead.data.image_datasets import OddSets
    from clearhead.tasks.task import PartName, Task, TrainedRun

MAX_HEADING = 60
"""characters of prediction and target that fit into one line"""
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
class Prediction:
    """The predicted class, sequence or number."""

    label: str
    probability: float | None
    """None for a number"""
    probabilities: dict[str, float]
    """of all classes, or of the candidates of a beam search, best first; {} for a number"""

    def __str__(self) -> str:
        return self.label if self.probability is None else f"{self.label} ({self.probability:.0%})"


def to_predictions(objective: Objective, logits: Tensor, classes: Sequence[str]) -> list[Prediction]:
    """One prediction for each row of logits (B,V), or (B,1) if the objective has a single output."""
    if objective.is_number:
        return [Prediction(f"{value:.2f}", None, {}) for value in logits.squeeze(-1).tolist()]
    return [to_prediction(row, classes) for row in objective.probabilities(logits).tolist()]


def to_prediction(probabilities: Sequence[float], classes: Sequence[str]) -> Prediction:
    pairs = sorted(zip(classes, probabilities, strict=True), key=lambda pair: -pair[1])
    return Prediction(pairs[0][0], pairs[0][1], dict(pairs))


@dataclass(frozen=True)
class Example:
    """One input as the model takes it, (1, ...), and as it is drawn."""

    inputs: Tensor
    prediction: str
    image: Tensor | None = None
    """uint8 (C,height,width)"""
    tokens: tuple[str, ...] | None = None
    """the name of each token"""
    word: str | None = None
    """the word to be pronounced"""
    target: str | None = None
    """None for an input that is not from the test set"""
    correct: bool | None = None
    predicted: int | None = None
    """index of the predicted class of an image, or of the predicted token after a text"""

    def with_target(self, target: str, *, correct: bool) -> "Example":
        return replace(self, target=target, correct=correct)

    @property
    def heading(self) -> str:
        """Prediction, target and agreement, for the title of a figure."""
        predicted = f"predicted: {displayable(self.prediction)}"
        if self.target is None:
            return predicted
        actual, verdict = f"actual: {displayable(self.target)}", "correct" if self.correct else "wrong"
        if len(predicted) + len(actual) > MAX_HEADING:  # sequences, one below the other
            return f"{predicted}\n{actual} · {verdict}"
        return f"{predicted} · {actual} · {verdict}"

    @property
    def sentence(self) -> str:
        """The same for the terminal."""
        predicted = f"Predicted: {self.prediction or '(nothing)'}."
        if self.target is None:
            return predicted
        return f"{predicted} Actual: {self.target}. The prediction is {'correct' if self.correct else 'wrong'}."


@dataclass(frozen=True, eq=False)
class Outputs:
    """Predictions for all examples of a part: for each example a tensor (), or (L,) if each token has a target."""

    examples: Examples
    metrics: dict[str, float]
    targets: list[Tensor]
    predicted: list[Tensor]
    """classes; for regression numbers"""
    confidence: list[Tensor]
    """probability of the predicted class; for regression the absolute error"""
    correct: list[Tensor]
    """bool, as the accuracy counts them"""


@dataclass(frozen=True)
class Row:
    """One prediction beside its target."""

    index: int | None
    """index for `clearhead look --sample`; None for words, which are looked at by their text"""
    input: str | None
    """None for images without a file name"""
    predicted: str
    actual: str
    probability: float | None
    correct: bool


@dataclass(frozen=True)
class Report:
    """The first predictions of a part, and its most confident mistakes."""

    unit: str
    """what is counted: images, sequences, tokens, words or sets"""
    metrics: dict[str, Any]
    total: int
    wrong: int
    first: list[Row]
    mistakes: list[Row]
    order: str = "the most confident"

    def titles(self, part: "PartName") -> tuple[str, str]:
        """Of the first predictions and of the mistakes."""
        examples = {"tokens": "texts"}.get(self.unit, self.unit)
        return (
            f"The first {len(self.first)} {examples} of the {part} set",
            f"Wrong predictions: {self.wrong:,} of {self.total:,} {self.unit}, {self.order} first",
        )


FRACTIONS = ("accuracy", "exact_match", "word_error_rate", "phoneme_error_rate")


def format_metrics(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Metrics by name as text: fractions in percent, counts with thousands separators."""
    texts = {}
    for name, value in metrics.items():
        text = f"{value:.2%}" if name in FRACTIONS else f"{value:.4f}" if name == "loss" else value
        texts[name.replace("_", " ")] = f"{text:,}" if isinstance(text, int) else str(text)
    return texts


def columns_of(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The rows as the columns of a table; empty columns are omitted."""
    any_correct = any(row.correct for row in rows)
    columns: dict[str, list[str | None]] = {
        "index": [None if row.index is None else str(row.index) for row in rows],
        "input": [row.input for row in rows],
        "predicted": [row.predicted for row in rows],
        "actual": [row.actual for row in rows],
        "probability": [None if row.probability is None else percent(row.probability) for row in rows],
        "": ["wrong" if any_correct and not row.correct else None for row in rows],
    }
    kept = {name: cells for name, cells in columns.items() if any(cell is not None for cell in cells)}
    return {name: [cell or "" for cell in cells] for name, cells in kept.items()}


def percent(probability: float) -> str:
    """54.2%, or 3.1e-05 for the probability of a long sequence."""
    return f"{probability:.1%}" if probability >= 1e-3 or probability == 0 else f"{probability:.1e}"


def report_examples(task: "Task", run: "TrainedRun", outputs: Outputs, n: int) -> Report:
    """A row for each example. The probability of a sequence is the product of those of its tokens."""
    correct = torch.stack([row.all() for row in outputs.correct])
    confidence = torch.stack([row.prod() for row in outputs.confidence])
    is_number = task.objective.is_number

    def row(i: int) -> Row:
        predicted, actual = (task.format_target(run, side[i]) for side in (outputs.predicted, outputs.targets))
        text, probability = task.format_input(run, outputs.examples, i), None if is_number else float(confidence[i])
        return Row(i, text, predicted, actual, probability, bool(correct[i]))

    wrong = (~correct).nonzero().flatten()
    worst = wrong[confidence[wrong].argsort(descending=True, stable=True)][:n]
    first, mistakes = ([row(i) for i in indices] for indices in (range(min(n, len(correct))), worst.tolist()))
    order = "the largest errors" if is_number else "the most confident"
    return Report(task.unit, outputs.metrics, len(correct), len(wrong), first, mistakes, order)


@dataclass(frozen=True)
class SheetRow:
    name: str
    images: Tensor
    """uint8 (n,C,H,W)"""
    highlighted: int | None = None
    """index of the image that is framed"""


def contact_sheet(data: Dataset) -> "Image":
    """One row of training images per class; for `odd-one-out`, one row per set with the odd image framed."""
    from clearhead.data.image_datasets import OddSets

    if isinstance(data.train, OddSets):
        return draw_sheet(rows_of_sets(data.train))
    if data.normalize is None:
        raise ValueError("a contact sheet needs images, got sequences")
    return draw_sheet(rows_of_classes(data.train, data.classes))


def rows_of_classes(examples: Examples, classes: Sequence[str]) -> list[SheetRow]:
    images, labels = examples.get_batch(torch.arange(min(MAX_SCANNED, len(examples))))
    return [SheetRow(name, images[labels == label][:NUM_COLUMNS]) for label, name in enumerate(classes[:MAX_ROWS])]


def augmented_sheet(data: Dataset, augmentation: Augmentation, seed: int) -> "Image":
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
    rows = [SheetRow(name, images) for name, images in zip(names, torch.stack(columns, dim=1), strict=True)]
    return draw_sheet(rows, {0: "original", 1: f"augmented ({describe_augmentation(augmentation)})"})


def examples_by_class(data: Dataset) -> tuple[list[str], Tensor]:
    """Class names and indices of some training examples, sorted by class."""
    labels = data.train.get_batch(torch.arange(min(MAX_SCANNED, len(data.train))))[1]
    per_class = max(1, NUM_AUGMENTED_ROWS // len(data.classes))
    indices = [(labels == label).nonzero().flatten()[:per_class] for label in range(len(data.classes))]
    return [name for name, group in zip(data.classes, indices, strict=True) for _ in group], torch.cat(indices)


def describe_augmentation(augmentation: Augmentation) -> str:
    """crop 4, flip"""
    used = {name: value for name, value in asdict(augmentation).items() if value}
    return ", ".join(name if value is True else f"{name} {value}" for name, value in used.items()) or "none"


def rows_of_sets(sets: "OddSets") -> list[SheetRow]:
    members, positions = sets.members(torch.arange(NUM_COLUMNS))
    labels = sets.images.labels[members].tolist()
    return [
        SheetRow(f"{labels[i][position]} among {labels[i][position - 1]}", sets.images.images[members[i]], position)
        for i, position in enumerate(positions.tolist())
    ]


def draw_sheet(rows: Sequence[SheetRow], headings: Mapping[int, str] | None = None) -> "Image":
    """Rows of images with their names on the left. Headings are drawn above their columns, after a gap."""
    from PIL import Image, ImageDraw, ImageFont

    headings, rows = headings or {}, [replace(row, name=truncate_name(row.name)) for row in rows[:MAX_ROWS]]
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
            sheet.paste(to_pil(pixels).resize((cell, cell), method), (left, top))
            canvas.rectangle((left - 1, top - 1, left + cell, top + cell), outline=OUTLINE)
            if j == row.highlighted:
                canvas.rectangle((left - 2, top - 2, left + cell + 1, top + cell + 1), outline=HIGHLIGHT, width=3)
    return sheet


def truncate_name(name: str) -> str:
    return name if len(name) <= MAX_NAME_LENGTH else f"{name[: MAX_NAME_LENGTH - 3]}..."


def to_pil(pixels: Tensor) -> "Image":
    """An image from uint8 (C,H,W), with one channel or three."""
    from PIL import Image

    return Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())
