"""The confusion matrix: row t, column p counts the examples of class t that were predicted as class p."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead.drawing import blank, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_NUMBERS = 30
"""with more classes than these the numbers in the cells would be too small to read, and only colours are drawn"""


def confusion_matrix(targets: Tensor, predictions: Tensor, n: int) -> Tensor:
    """Counts (n,n) from the true classes (N,) and the predicted classes (N,)."""
    if targets.shape != predictions.shape or targets.ndim != 1:
        raise ValueError(
            "targets and predictions must be one class for each example, "
            f"got shapes {tuple(targets.shape)} and {tuple(predictions.shape)}; flatten both, or take the argmax"
        )
    for name, classes in (("targets", targets), ("predictions", predictions)):
        if classes.is_floating_point() or classes.dtype == torch.bool:
            raise ValueError(f"{name} must be whole numbers, got {classes.dtype}; convert them with .long()")
        if len(classes) and (classes.min() < 0 or classes.max() >= n):
            got = f"{int(classes.min())} to {int(classes.max())}"
            raise ValueError(f"{name} must be classes from 0 to {n - 1}, got {got}; give the number of classes as n")
    return torch.bincount(targets.long() * n + predictions.long(), minlength=n * n).reshape(n, n)


def draw_confusion(matrix: Tensor, classes: Sequence[str], note: str = "") -> "Figure":
    """Counts in the cells, colours for the share of each row: a rare class is judged like a frequent one. The note says
    how the answers were made."""
    n, matrix = len(classes), matrix.cpu()
    if n == 0 or matrix.shape != (n, n):
        raise ValueError(
            f"a confusion matrix has a row and a column for each class, got {tuple(matrix.shape)} for {n} classes; "
            "name as many classes as it has rows"
        )
    shares = matrix / matrix.sum(1, keepdim=True).clamp(min=1)
    side = min(max(4.5, 0.62 * n + 2), 16)
    figure = blank(side + 1.2, side)
    panel = figure.subplots()
    image = panel.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    name_axes(panel, classes)
    right, total = int(matrix.diagonal().sum()), int(matrix.sum())
    share = f" ({right / total:.2%})" if total else ""
    panel.set_title(f"{right:,} of {total:,} correct{share}" + (f", {note}" if note else ""))
    if n <= MOST_NUMBERS:
        write_counts(panel, matrix, shares)
    figure.colorbar(image, ax=panel, shrink=0.85, label="fraction of the examples of a class (row)", format="{x:.0%}")
    return figure


def name_axes(panel: "Axes", classes: Sequence[str]) -> None:
    """Every class has its name beside its row and below its column; if they are many, every second or third has."""
    shown = range(0, len(classes), -(-len(classes) // MOST_NUMBERS))
    names = [visible(classes[i]) for i in shown]
    panel.set_yticks(list(shown), names)
    panel.set_xticks(list(shown), names)
    for text in (*panel.get_xticklabels(), *panel.get_yticklabels()):
        text.set_parse_math(False)  # a dollar sign is one
    if max(map(len, names)) > 3:
        panel.tick_params("x", rotation=45)
        for text in panel.get_xticklabels():
            text.set(ha="right", rotation_mode="anchor")
    panel.set_xlabel("predicted")
    panel.set_ylabel("actual")


def write_counts(panel: "Axes", matrix: Tensor, shares: Tensor) -> None:
    """Nothing where there is nothing to count: the mistakes stand out."""
    for row, column in matrix.nonzero().tolist():
        colour = "white" if shares[row, column] > 0.55 else "black"
        text = f"{int(matrix[row, column]):,}"
        panel.text(column, row, text, ha="center", va="center", color=colour, fontsize=9)
