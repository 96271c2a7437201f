"""Metrics of a run, and the confusion matrix."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead.data.batches import Batch
from clearhead.data.dataset import Examples, Normalize
from clearhead.data.options import TTA
from clearhead.drawing import displayable, new_figure
from clearhead.inference.run import Run
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
