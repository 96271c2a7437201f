"""Predictions as users see them: of single inputs, of examples to look at, and in reports over a part of the data.

Dims: B batch, C channels, L length, V classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead.data.dataset import Examples
from clearhead.drawing import displayable
from clearhead.tasks.objectives import Objective

if TYPE_CHECKING:
    from clearhead.tasks.task import PartName, Task, TrainedRun

MAX_HEADING = 60
"""characters of prediction and target that fit into one line"""


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
