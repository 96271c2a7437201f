"""How good a run is: loss and accuracy on a part of its data; for `pronounce` the error rates that papers name.

A word is right if one of its pronunciations is written, and its errors are those against the nearest of them: the
fewest phones put in, left out or changed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from clearhead.data import datasets
from clearhead.data.batches import Batch
from clearhead.data.config import TTA
from clearhead.data.dataset import Examples, Normalize
from clearhead.data.pronounce import check_vocab, parts
from clearhead.data.vocab import Pronunciations, Vocabulary, read_dictionary
from clearhead.drawing import displayable, new_figure
from clearhead.inference.g2p import BEAM, Pronunciation, pronounce
from clearhead.inference.run import Run
from clearhead.models.generate import Beam
from clearhead.training.objectives import OBJECTIVES, evaluate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PartName = Literal["validation", "test"]


@dataclass(frozen=True)
class ErrorRates:
    words: int
    wrong: int
    """words that are written like none of their pronunciations"""
    phones: int
    """of the nearest pronunciations"""
    errors: int
    """phones put in, left out or changed"""

    @property
    def word_error_rate(self) -> float:
        return self.wrong / self.words

    @property
    def phoneme_error_rate(self) -> float:
        return self.errors / self.phones


def error_rates(run: Run, words: Pronunciations, how: Beam = BEAM) -> ErrorRates:
    """The best answer to each word against its pronunciations."""
    if not words:
        raise ValueError(f"there must be words to score, got none for {run.path}; name some with --test FILE")
    return rates_of(pronounce(run, list(words), how), words)


def rates_of(answers: Sequence[Sequence[Pronunciation]], words: Pronunciations) -> ErrorRates:
    counted = [nearest(spoken[0].phones, known) for spoken, known in zip(answers, words.values(), strict=True)]
    wrong, phones, errors = sum(e > 0 for e, _ in counted), sum(n for _, n in counted), sum(e for e, _ in counted)
    return ErrorRates(len(words), wrong, phones, errors)


def words_to_score(run: Run, part: PartName, test: Path | None = None) -> Pronunciations:
    """Those of a file, or of a part of the run's own data. Phones of a file that the run cannot write are refused: they
    are mostly those of a dictionary with stress, for a run without, or the other way round."""
    if test is not None:
        words = read_dictionary(test, stress=run.config.data.stress)
        check_vocab(words, Vocabulary(run.vocab), Vocabulary(run.classes), test)
        return words
    run.check_files()
    return parts(run.config.data)[part]


def learnt(run: Run, words: Pronunciations) -> int | None:
    """How many of the words the run was trained on; None where that is not known, because its own file is not there,
    or has changed."""
    try:
        run.check_files()
        return len(words.keys() & parts(run.config.data)["train"].keys())
    except (OSError, ValueError):
        return None


def nearest(written: Sequence[str], known: Sequence[Sequence[str]]) -> tuple[int, int]:
    """Errors against the nearest pronunciation, and how many phones that has; of equally near ones, the first."""
    return min(((edit_distance(written, phones), len(phones)) for phones in known), key=lambda found: found[0])


def edit_distance(one: Sequence[str], other: Sequence[str]) -> int:
    """The fewest symbols put in, left out or changed that make one sequence of the other."""
    row = list(range(len(other) + 1))
    for i, mine in enumerate(one, start=1):
        last, row[0] = row[0], i
        for j, theirs in enumerate(other, start=1):
            last, row[j] = row[j], min(last + (mine != theirs), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def loss_and_accuracy(run: Run, part: PartName) -> dict[str, float]:
    """Of any run, as its training measures them."""
    return measure(run, part, *examples_of(run, part))


def examples_of(run: Run, part: PartName) -> tuple[Examples, Normalize | None]:
    """The examples of a part, and what happens to images among them before the model."""
    run.check_files()
    data = datasets.load_dataset(run.config.data, run.config.seed)
    examples = data.test if part == "test" else data.validation
    if not len(examples):
        other = "validation" if part == "test" else "test"
        raise ValueError(f"{run.path} must have {part} examples, got none; try --part {other}")
    return examples, data.normalize


def measure(
    run: Run,
    part: PartName,
    examples: Examples,
    normalize: Normalize | None,
    on_batch: Callable[[Batch, Tensor], None] | None = None,
) -> dict[str, float]:
    """Loss and accuracy of these examples; `on_batch` sees each batch and the model's outputs."""
    objective = OBJECTIVES[run.config.objective]
    return evaluate(run.model, objective, examples, normalize, tta=tta_of(run, part), on_batch=on_batch)


def tta_of(run: Run, part: PartName) -> TTA:
    """Of each image: several views only at the test, and only if the run says so."""
    return run.config.training.tta if part == "test" else "none"


# The confusion matrix: row t, column p counts the examples of class t that were predicted as class p.


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
    figure = new_figure(side + 1.2, side)
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
    names = [displayable(classes[i]) for i in shown]
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
