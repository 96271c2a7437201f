"""Metrics of a run: loss and accuracy, the error rates of `pronounce`, and the confusion matrix.

The word error rate (WER) is the fraction of words whose pronunciation equals none of those in the dictionary; the
phoneme error rate (PER) is the edit distance to the nearest pronunciation over its length, summed over all words.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead.data import datasets
from clearhead.data.batches import Batch
from clearhead.data.dataset import Examples, Normalize
from clearhead.data.datasets import TTA
from clearhead.data.pronounce import check_vocab, load_splits
from clearhead.data.vocab import Pronunciations, Vocabulary, read_dictionary
from clearhead.drawing import displayable, new_figure
from clearhead.inference.generation import BEAM, Pronunciation, pronounce
from clearhead.inference.run import PartName, Run
from clearhead.models.generate import Beam
from clearhead.training.objectives import OBJECTIVES, evaluate
from clearhead.validation import check_choice

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_NUMBERED_CLASSES = 30
"""with more classes, the cells of a confusion matrix are too small for numbers"""


def evaluate_run(run: Run, part: PartName = "test", beam: Beam = BEAM) -> dict[str, Any]:
    """The metrics of `clearhead evaluate`: loss and accuracy; for `pronounce`, word and phoneme error rates."""
    check_choice(part=(part, PartName))
    if run.config.objective == "seq2seq":
        return error_rates(run, words_to_score(run, part), beam).to_dict(beam)
    return loss_and_accuracy(run, part)


def loss_and_accuracy(run: Run, part: PartName) -> dict[str, float]:
    """The metrics that training itself reports."""
    return measure(run, part, *examples_of(run, part))


def examples_of(run: Run, part: PartName) -> tuple[Examples, Normalize | None]:
    """The examples of a part, and the normalization of their images."""
    run.check_data_files()
    data = datasets.load_dataset(run.config.data, run.config.seed)
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
        OBJECTIVES[run.config.objective],
        examples,
        normalize,
        batch_size=run.config.training.eval_batch_size,
        tta=tta_of(run, part),
        on_batch=on_batch,
    )


def tta_of(run: Run, part: PartName) -> TTA:
    """Test-time augmentation is applied on the test set only."""
    return run.config.training.tta if part == "test" else "none"


@dataclass(frozen=True)
class ErrorRates:
    words: int
    wrong: int
    """words whose pronunciation equals none of those in the dictionary"""
    phones: int
    """total length of the nearest pronunciations"""
    errors: int
    """insertions, deletions and substitutions"""

    @property
    def word_error_rate(self) -> float:
        return self.wrong / self.words

    @property
    def phoneme_error_rate(self) -> float:
        return self.errors / self.phones

    def to_dict(self, beam: Beam) -> dict[str, Any]:
        rates = {"word_error_rate": self.word_error_rate, "phoneme_error_rate": self.phoneme_error_rate}
        return {"beam": beam.size} | asdict(self) | rates


def error_rates(run: Run, words: Pronunciations, beam: Beam = BEAM) -> ErrorRates:
    """Compare the best candidate for each word with its pronunciations in the dictionary."""
    if not words:
        raise ValueError(f"{run.path} has no words to evaluate on; name a dictionary with --test FILE")
    return count_errors(pronounce(run, list(words), beam), words)


def count_errors(candidates: Sequence[Sequence[Pronunciation]], words: Pronunciations) -> ErrorRates:
    counts = [
        distance_to_nearest(best.phones, known) for (best, *_), known in zip(candidates, words.values(), strict=True)
    ]
    wrong, phones, errors = sum(e > 0 for e, _ in counts), sum(n for _, n in counts), sum(e for e, _ in counts)
    return ErrorRates(len(words), wrong, phones, errors)


def words_to_score(run: Run, part: PartName, dictionary: Path | None = None) -> Pronunciations:
    """The words of a dictionary file, or of a part of the run's data.

    Raises ValueError for phones that the run does not know, usually because only one of the two has stress marks.
    """
    if dictionary is not None:
        words = read_dictionary(dictionary, stress=run.config.data.stress)
        check_vocab(words, Vocabulary(run.vocab), Vocabulary(run.classes), dictionary)
        return words
    run.check_data_files()
    return load_splits(run.config.data)[part]


def training_overlap(run: Run, words: Pronunciations) -> int | None:
    """How many of the words the run was trained on; None if its data is missing or has changed."""
    try:
        run.check_data_files()
        return len(words.keys() & load_splits(run.config.data)["train"].keys())
    except (OSError, ValueError):
        return None


def distance_to_nearest(phones: Sequence[str], known: Sequence[Sequence[str]]) -> tuple[int, int]:
    """The edit distance to the nearest known pronunciation, the first one in case of a tie, and its length."""
    return min(((edit_distance(phones, other), len(other)) for other in known), key=lambda pair: pair[0])


def edit_distance(a: Sequence[str], b: Sequence[str]) -> int:
    """Levenshtein distance: the fewest insertions, deletions and substitutions that turn a into b."""
    row = list(range(len(b) + 1))
    for i, symbol_a in enumerate(a, start=1):
        diagonal, row[0] = row[0], i
        for j, symbol_b in enumerate(b, start=1):
            diagonal, row[j] = row[j], min(diagonal + (symbol_a != symbol_b), row[j] + 1, row[j - 1] + 1)
    return row[-1]


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
