"""Predictions of a run on a part of its data, compared with the targets: a report, its figure, the confusion matrix.

The outputs come from the same evaluation as those of `clearhead evaluate`, so that all numbers agree.
Dims: N examples, B batch, C channels, L length, S images of a set, V classes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead.data.batches import Batch
from clearhead.data.dataset import Examples, Subset
from clearhead.data.folder import read_valid_images
from clearhead.data.vocab import IGNORE_INDEX, tokens_to_text
from clearhead.drawing import BLUE, GRAY, VERMILION, displayable, new_figure, wrap
from clearhead.inference.evaluate import confusion_matrix, count_errors, examples_of, measure, words_to_score
from clearhead.inference.generation import BEAM, pronounce
from clearhead.inference.run import PartName, Run
from clearhead.models.generate import Beam
from clearhead.training.objectives import OBJECTIVES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Announce = Callable[[], None]
CONTEXT = 24
"""tokens that are shown before a predicted token"""
COLUMNS = 8
CELL = 1.25
"""inches from one image to the next"""
TEXT, TITLE = 9, 12
"""points"""
LINE = 1.35 * TEXT / 72
"""inches"""


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

    def titles(self, part: PartName) -> tuple[str, str]:
        """Of the first predictions and of the mistakes."""
        examples = "texts" if self.unit == "tokens" else self.unit
        is_number = self.first[0].probability is None and self.unit != "tokens"
        order = "the largest errors" if is_number else "the most confident"
        return (
            f"The first {len(self.first)} {examples} of the {part} set",
            f"Wrong predictions: {self.wrong:,} of {self.total:,} {self.unit}, {order} first",
        )


def report(
    run: Run, part: PartName = "test", n: int = 16, beam: Beam = BEAM, announce: Announce = lambda: None
) -> Report:
    """The first n predictions of a part and its n most confident mistakes. `announce` is called before the evaluation,
    which may take minutes."""
    if n < 1:
        raise ValueError(f"the number of predictions must be at least 1, got {n}")
    if run.config.objective == "seq2seq":
        return report_words(run, part, n, beam, announce)
    outputs = outputs_on(run, part, announce)
    if run.config.objective == "causal-lm":
        return report_tokens(run, outputs, n)
    return report_examples(run, outputs, n)


def confusion(run: Run, announce: Announce = lambda: None) -> Tensor:
    """The confusion matrix (V,V) on the test set. If each token has a class, tokens are counted."""
    if run.config.objective not in ("classification", "token-classification", "binary-classification"):
        raise ValueError(
            f"a confusion matrix needs classes, got {run.path}, whose objective is {run.config.objective}; "
            f"try clearhead evaluate {run.path}"
        )
    outputs = outputs_on(run, announce=announce)
    targets, predicted = (torch.stack(side).flatten().long() for side in (outputs.targets, outputs.predicted))
    return confusion_matrix(targets, predicted, len(run.classes))


def outputs_on(run: Run, part: PartName = "test", announce: Announce = lambda: None) -> Outputs:
    """Predictions for every example of a part, and the metrics of the same evaluation."""
    objective = OBJECTIVES[run.config.objective]
    targets: list[Tensor] = []
    predicted: list[Tensor] = []
    confidence: list[Tensor] = []
    correct: list[Tensor] = []

    def collect(batch: Batch, outputs: Tensor) -> None:
        classes, probabilities = decode_outputs(run.config.objective, outputs, batch.targets)
        targets.extend(batch.targets)
        predicted.extend(classes)
        confidence.extend(probabilities)
        correct.extend(objective.correct(outputs, batch))

    examples, normalize = examples_of(run, part)
    announce()
    metrics = measure(run, part, examples, normalize, collect)
    return Outputs(examples, metrics, targets, predicted, confidence, correct)


def decode_outputs(objective: str, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The predicted classes and their probabilities; for regression the numbers and their absolute errors."""
    if objective == "regression":
        values = outputs.squeeze(-1)
        return values, (values - targets).abs()
    if objective == "binary-classification":
        logits = outputs.squeeze(-1)
        return (logits > 0).long(), logits.abs().sigmoid()
    logits = outputs.squeeze(-1) if objective == "set-pointer" else outputs
    classes = logits.argmax(-1)  # of logits: different ones may have probabilities that round to the same number
    return classes, logits.softmax(-1).gather(-1, classes[..., None])[..., 0]


def report_examples(run: Run, outputs: Outputs, n: int) -> Report:
    """A row for each example. The probability of a sequence is the product of those of its tokens."""
    correct = torch.stack([row.all() for row in outputs.correct])
    confidence = torch.stack([row.prod() for row in outputs.confidence])
    files = file_names(run, outputs.examples)

    def row(i: int) -> Row:
        inputs, _ = outputs.examples.get_batch(torch.tensor([i]))
        predicted, actual = (format_target(run, side[i]) for side in (outputs.predicted, outputs.targets))
        probability = None if run.config.objective == "regression" else float(confidence[i])
        digits = None if run.input_kind == "images" else " ".join(map(str, inputs[0].tolist()))
        return Row(i, files[i] if files else digits, predicted, actual, probability, bool(correct[i]))

    wrong = (~correct).nonzero().flatten()
    worst = wrong[confidence[wrong].argsort(descending=True, stable=True)][:n]
    unit = "sets" if run.takes_sets else "images" if run.input_kind == "images" else "sequences"
    first, mistakes = ([row(i) for i in indices] for indices in (range(min(n, len(correct))), worst.tolist()))
    return Report(unit, outputs.metrics, len(correct), len(wrong), first, mistakes)


def format_target(run: Run, value: Tensor) -> str:
    """The name of a class, the names of the classes of all tokens, or a number."""
    if run.config.objective == "regression":
        return f"{float(value):.4g}"
    if run.takes_sets:
        return f"image {int(value)}"
    return " ".join(run.classes[int(i)] for i in value.flatten())


def file_names(run: Run, examples: Examples) -> list[str]:
    """The paths of the user's own images below their folder; [] for other data."""
    if run.config.data.name != "folder":
        return []
    indices = torch.arange(len(examples))
    while isinstance(examples, Subset):
        indices, examples = examples.indices[indices], examples.examples
    listing, _, _ = read_valid_images(run.config.data)
    return [listing.name(i) for i in indices.tolist()]


def report_tokens(run: Run, outputs: Outputs, n: int) -> Report:
    """A row for each of the first texts, and for each of the most confident mistakes among all tokens."""
    targets, predicted, confidence, correct = map(
        torch.cat, (outputs.targets, outputs.predicted, outputs.confidence, outputs.correct)
    )
    lengths = torch.tensor([len(row) for row in outputs.targets])
    starts = lengths.cumsum(0) - lengths
    wrong = ((targets != IGNORE_INDEX) & ~correct).nonzero().flatten()
    worst = wrong[confidence[wrong].argsort(descending=True, stable=True)][:n]

    def token_row(position: int) -> Row:
        example = int(torch.searchsorted(starts, position, right=True)) - 1
        inputs, _ = outputs.examples.get_batch(torch.tensor([example]))
        context = inputs[0, : position - int(starts[example]) + 1][-CONTEXT:]
        sides = (context, predicted[position, None], targets[position, None])
        before, prediction, actual = (format_tokens(run, ids) for ids in sides)
        return Row(example, before, prediction, actual, float(confidence[position]), False)

    def text_row(example: int) -> Row:
        mask = outputs.targets[example] != IGNORE_INDEX
        prediction, actual = (
            format_tokens(run, side[example][mask][-2 * CONTEXT :]) for side in (outputs.predicted, outputs.targets)
        )
        return Row(example, None, prediction, actual, None, bool((outputs.correct[example] | ~mask).all()))

    first = [text_row(i) for i in range(min(n, len(lengths)))]
    total = int((targets != IGNORE_INDEX).sum())
    return Report("tokens", outputs.metrics, total, len(wrong), first, [token_row(i) for i in worst.tolist()])


def format_tokens(run: Run, ids: Tensor) -> str:
    """Tokens as text, with line breaks and other control characters as escapes."""
    return repr(tokens_to_text("".join(run.vocab[i] for i in ids.tolist()), run.config.data.level))[1:-1]


def plot_test_predictions(run: Run, n: int = 16) -> "Figure":
    """The first n test images, and the n most confident mistakes."""
    return draw_report(run, report(run, n=n), "test")


def draw_report(run: Run, found: Report, part: PartName) -> "Figure":
    """The images of a report with their predictions; for sets, a line of images for each."""
    examples, _ = examples_of(run, part)

    def images(rows: Sequence[Row]) -> Tensor:
        return examples.get_batch(torch.tensor([row.index for row in rows]))[0]

    groups = {
        title: rows for title, rows in zip(found.titles(part), (found.first, found.mistakes), strict=True) if rows
    }
    if found.unit == "sets":
        return draw_sets({title: (rows, images(rows)) for title, rows in groups.items()})
    return plot_predictions(
        {
            title: [
                PredictedImage(image, row.predicted, row.probability or 0.0, row.actual, row.index)
                for row, image in zip(rows, images(rows), strict=True)
            ]
            for title, rows in groups.items()
        }
    )


@dataclass(frozen=True)
class PredictedImage:
    image: Tensor
    """uint8 (C,height,width)"""
    predicted: str
    probability: float
    actual: str | None = None
    index: int | None = None

    @property
    def is_wrong(self) -> bool:
        return self.actual is not None and self.actual != self.predicted

    @property
    def text(self) -> str:
        """Wrapped to the width of a column."""
        text = f"{displayable(self.predicted)}  {self.probability:.0%}"
        actual = f"\nactual: {displayable(self.actual or '')}" if self.is_wrong else ""
        return wrap(text + actual, 0.92 * CELL, TEXT)


def plot_predictions(groups: dict[str, Sequence[PredictedImage]]) -> "Figure":
    """A block of images below each title; wrong predictions are orange, with the actual class below them."""
    blocks = {wrap(title, 0.96 * CELL * COLUMNS, TITLE): images for title, images in groups.items() if images}
    rows = [-(-len(images) // COLUMNS) for images in blocks.values()]
    lines = [max(each.text.count("\n") + 1 for each in images) for images in blocks.values()]
    heights = [
        n * (CELL + (n_lines + 1) * LINE) + 0.3 * (title.count("\n") + 1) + 0.2
        for title, n, n_lines in zip(blocks, rows, lines, strict=True)
    ]
    figure = new_figure(CELL * COLUMNS, sum(heights))
    parts = figure.subfigures(len(blocks), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, (title, images), n in zip(parts, blocks.items(), rows, strict=True):
        part.suptitle(title, fontsize=TITLE)
        for i, panel in enumerate(part.subplots(n, COLUMNS, squeeze=False).flat):
            panel.set_axis_off()
            if i < len(images):
                draw_image(panel, images[i])
    return figure


def draw_image(panel: "Axes", shown: PredictedImage) -> None:
    pixels = shown.image.permute(1, 2, 0)  # (C,height,width) -> (height,width,C)
    panel.imshow(pixels.squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    if shown.index is not None:
        panel.set_title(f"#{shown.index}", fontsize=8, color=GRAY, pad=2)
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


def draw_sets(groups: dict[str, tuple[Sequence[Row], Tensor]]) -> "Figure":
    """A line for each set of images (S,784), with frames around the predicted and the actual odd one."""
    n_columns = next(iter(groups.values()))[1].shape[1]
    heights = [CELL * len(rows) + 0.4 for rows, _ in groups.values()]
    figure = new_figure(max(CELL * n_columns, 8.0), sum(heights))
    parts = figure.subfigures(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, (title, (rows, sets)) in zip(parts, groups.items(), strict=True):
        part.suptitle(wrap(title, 0.96 * figure.get_figwidth(), TITLE), fontsize=TITLE)
        panels = part.subplots(len(rows), n_columns, squeeze=False)
        for row, images, line in zip(rows, sets, panels, strict=True):
            for i, panel in enumerate(line):
                panel.imshow(images[i].view(28, 28).numpy(), cmap="gray", interpolation="nearest")
                panel.set(xticks=[], yticks=[])
                frame_image(panel, row, f"image {i}")
            line[0].set_ylabel(f"#{row.index}", fontsize=8, color=GRAY, rotation=0, ha="right")
    return figure


def frame_image(panel: "Axes", row: Row, name: str) -> None:
    """A frame and a label for an image that was predicted to be the odd one, or that is."""
    if name not in (row.predicted, row.actual):
        return
    color = BLUE if name == row.actual else VERMILION
    panel.spines[:].set(edgecolor=color, linewidth=4)
    text = f"predicted {row.probability:.0%}" if name == row.predicted else "actual"
    panel.set_xlabel(text, fontsize=TEXT, color=color)
