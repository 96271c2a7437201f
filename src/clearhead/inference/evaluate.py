"""Evaluate a run: metrics, the confusion matrix, and predictions compared with the targets, as a report and a figure.

All outputs come from the same evaluation, so that all numbers agree.
Dims: N examples, B batch, C channels, L length, S images of a set, V classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead.data import TTA
from clearhead.data.batches import Batch
from clearhead.data.dataset import Examples, Normalize
from clearhead.drawing import BLUE, GRAY, VERMILION, displayable, new_figure, wrap
from clearhead.inference.run import Run
from clearhead.tasks.report import Outputs, Report, Row
from clearhead.tasks.task import PartName
from clearhead.training.evaluation import evaluate
from clearhead.validation import check_choice

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_NUMBERED_CLASSES = 30
"""with more classes, the cells of a confusion matrix are too small for numbers"""


def evaluate_run(run: Run, part: PartName = "test") -> dict[str, Any]:
    """The metrics of `clearhead evaluate`: loss and accuracy; for `pronounce`, word and phoneme error rates."""
    check_choice(part=(part, PartName))
    return run.task.evaluate(run, part, lambda: loss_and_accuracy(run, part))


def loss_and_accuracy(run: Run, part: PartName) -> dict[str, float]:
    """The metrics that training itself reports."""
    return measure(run, part, *examples_of(run, part))


def examples_of(run: Run, part: PartName) -> tuple[Examples, Normalize | None]:
    """The examples of a part, and the normalization of their images."""
    run.check_data_files()
    data = run.task.load(run.config.seed)
    examples = data.test if part == "test" else data.validation
    if not len(examples):
        other = "validation" if part == "test" else "test"
        raise ValueError(f"{run.path} has no {part} examples; try --part {other}")
    return examples, data.normalize


def measure(
    run: Run,
    part: PartName,
    examples: Examples,
    normalize: Normalize | None,
    on_batch: Callable[[Batch, Tensor], None] | None = None,
) -> dict[str, float]:
    """Metrics on these examples; `on_batch` receives each batch and the model's outputs."""
    return evaluate(
        run.model,
        run.task.objective,
        examples,
        normalize,
        batch_size=run.eval_batch_size,
        tta=tta_of(run, part),
        on_batch=on_batch,
    )


def tta_of(run: Run, part: PartName) -> TTA:
    """Test-time augmentation is applied on the test set only."""
    return run.config.training.tta if part == "test" else "none"


def confusion_matrix(targets: Tensor, predictions: Tensor, num_classes: int) -> Tensor:
    """Counts (V,V): row t, column p counts the examples of class t that were predicted as class p.

    targets (N,), predictions (N,)
    """
    if targets.shape != predictions.shape or targets.ndim != 1:
        raise ValueError(
            "targets and predictions must be vectors of the same length, "
            f"got shapes {tuple(targets.shape)} and {tuple(predictions.shape)}"
        )
    for name, classes in (("targets", targets), ("predictions", predictions)):
        if classes.is_floating_point() or classes.dtype == torch.bool:
            raise ValueError(f"{name} must be integers, got {classes.dtype}; convert them with .long()")
        if len(classes) and (classes.min() < 0 or classes.max() >= num_classes):
            got = f"{int(classes.min())} to {int(classes.max())}"
            raise ValueError(f"{name} must be classes from 0 to {num_classes - 1}, got {got}")
    counts = torch.bincount(targets.long() * num_classes + predictions.long(), minlength=num_classes**2)
    return counts.reshape(num_classes, num_classes)


def draw_confusion(matrix: Tensor, classes: Sequence[str], note: str = "") -> "Figure":
    """The confusion matrix (V,V) with its counts. Colors show the fraction of each row, so that rare classes are as
    legible as frequent ones. The note is added to the title."""
    n, matrix = len(classes), matrix.cpu()
    if n == 0 or matrix.shape != (n, n):
        raise ValueError(
            f"a confusion matrix needs a row and a column for each class, got shape {tuple(matrix.shape)} "
            f"for {n} classes"
        )
    fractions = matrix / matrix.sum(1, keepdim=True).clamp(min=1)
    side = min(max(4.5, 0.62 * n + 2), 16)
    figure = new_figure(side + 1.2, side)
    panel = figure.subplots()
    image = panel.imshow(fractions.numpy(), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    label_axes(panel, classes)
    correct, total = int(matrix.diagonal().sum()), int(matrix.sum())
    accuracy = f" ({correct / total:.2%})" if total else ""
    panel.set_title(f"{correct:,} of {total:,} correct{accuracy}" + (f", {note}" if note else ""))
    if n <= MAX_NUMBERED_CLASSES:
        draw_counts(panel, matrix, fractions)
    figure.colorbar(image, ax=panel, shrink=0.85, label="fraction of the examples of a class (row)", format="{x:.0%}")
    return figure


def label_axes(panel: "Axes", classes: Sequence[str]) -> None:
    """Label every class, or every second or third if there are many."""
    ticks = range(0, len(classes), -(-len(classes) // MAX_NUMBERED_CLASSES))
    names = [displayable(classes[i]) for i in ticks]
    panel.set_yticks(list(ticks), names)
    panel.set_xticks(list(ticks), names)
    for text in (*panel.get_xticklabels(), *panel.get_yticklabels()):
        text.set_parse_math(False)  # a dollar sign is not TeX
    if max(map(len, names)) > 3:
        panel.tick_params("x", rotation=45)
        for text in panel.get_xticklabels():
            text.set(ha="right", rotation_mode="anchor")
    panel.set_xlabel("predicted")
    panel.set_ylabel("actual")


def draw_counts(panel: "Axes", matrix: Tensor, fractions: Tensor) -> None:
    """Draw all counts except zeros, so that mistakes stand out."""
    for row, column in matrix.nonzero().tolist():
        color = "white" if fractions[row, column] > 0.55 else "black"
        text = f"{int(matrix[row, column]):,}"
        panel.text(column, row, text, ha="center", va="center", color=color, fontsize=9)


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


def report(run: Run, part: PartName = "test", n: int = 16, announce: Announce = lambda: None) -> Report:
    """The first n predictions of a part and its n most confident mistakes. `announce` is called before the evaluation,
    which may take minutes."""
    if n < 1:
        raise ValueError(f"the number of predictions must be at least 1, got {n}")
    return run.task.report(run, part, n, lambda: outputs_on(run, part, announce), announce)


def confusion(run: Run, announce: Announce = lambda: None) -> Tensor:
    """The confusion matrix (V,V) on the test set. If each token has a class, tokens are counted."""
    objective = run.task.objective
    if not objective.has_classes:
        raise ValueError(
            f"a confusion matrix needs classes, got {run.path}, whose objective is {type(objective).__name__}; "
            f"try clearhead evaluate {run.path}"
        )
    return confusion_of(run, outputs_on(run, announce=announce))


def confusion_of(run: Run, outputs: Outputs) -> Tensor:
    """The confusion matrix (V,V) of predictions that were made before."""
    targets, predicted = (torch.stack(side).flatten().long() for side in (outputs.targets, outputs.predicted))
    return confusion_matrix(targets, predicted, len(run.classes))


def outputs_on(run: Run, part: PartName = "test", announce: Announce = lambda: None) -> Outputs:
    """Predictions for every example of a part, and the metrics of the same evaluation."""
    examples, normalize = examples_of(run, part)
    announce()
    return predict_examples(run, part, examples, normalize)


def predict_examples(run: Run, part: PartName, examples: Examples, normalize: Normalize | None) -> Outputs:
    """The same for examples that are loaded already."""
    objective = run.task.objective
    targets: list[Tensor] = []
    predicted: list[Tensor] = []
    confidence: list[Tensor] = []
    correct: list[Tensor] = []

    def collect(batch: Batch, outputs: Tensor) -> None:
        classes, probabilities = objective.decode(outputs, batch.targets)
        targets.extend(batch.targets)
        predicted.extend(classes)
        confidence.extend(probabilities)
        correct.extend(objective.correct(outputs, batch))

    metrics = measure(run, part, examples, normalize, collect)
    return Outputs(examples, metrics, targets, predicted, confidence, correct)


def plot_test_predictions(run: Run, n: int = 16) -> "Figure":
    """The first n test images, and the n most confident mistakes."""
    return draw_report(run, report(run, n=n), "test")


def draw_report(run: Run, result: Report, part: PartName, examples: Examples | None = None) -> "Figure":
    """The images of a report with their predictions; for sets, a row of images for each. `examples` are those of the
    part, if they are loaded already."""
    examples = examples_of(run, part)[0] if examples is None else examples

    def images(rows: Sequence[Row]) -> Tensor:
        return examples.get_batch(torch.tensor([row.index for row in rows]))[0]

    groups = {
        title: rows for title, rows in zip(result.titles(part), (result.first, result.mistakes), strict=True) if rows
    }
    if run.task.takes_sets:
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
        """The caption, wrapped to the width of a column."""
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


def draw_image(panel: "Axes", prediction: PredictedImage) -> None:
    pixels = prediction.image.permute(1, 2, 0)  # (C,height,width) -> (height,width,C)
    panel.imshow(pixels.squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    if prediction.index is not None:
        panel.set_title(f"#{prediction.index}", fontsize=8, color=GRAY, pad=2)
    panel.text(
        0.5,
        -0.06,
        prediction.text,
        transform=panel.transAxes,
        ha="center",
        va="top",
        fontsize=TEXT,
        color=VERMILION if prediction.is_wrong else "black",
        parse_math=False,
    )


def draw_sets(groups: dict[str, tuple[Sequence[Row], Tensor]]) -> "Figure":
    """A row for each set of images (S,784), with frames around the predicted and the actual odd one."""
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
    """Frame and label the image that was predicted to be the odd one, and the one that is."""
    if name not in (row.predicted, row.actual):
        return
    color = BLUE if name == row.actual else VERMILION
    panel.spines[:].set(edgecolor=color, linewidth=4)
    text = f"predicted {row.probability:.0%}" if name == row.predicted else "actual"
    panel.set_xlabel(text, fontsize=TEXT, color=color)
