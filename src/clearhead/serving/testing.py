"""A run on a part of its data, example by example: the confusion matrix, predictions beside the truth, mistakes.

The outputs are those of the one function that training's own test and `clearhead evaluate` use, so that all agree.
Dims: N examples, B batch, L length, V classes, S elements of a set.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.data.batches import Batch
from clearhead.data.characters import to_user
from clearhead.data.dataset import Examples, Part
from clearhead.data.folder import usable
from clearhead.data.tokens import IGNORED
from clearhead.models.beam import Beam
from clearhead.serving.evaluating import PartName, examples_of, measure, rates_of, words_to_score
from clearhead.serving.pronouncing import BEAM, pronounce
from clearhead.serving.session import Session
from clearhead.training.confusion import confusion_matrix
from clearhead.training.objective import OBJECTIVES

Announce = Callable[[], None]
CONTEXT = 24
"""tokens of a text that are shown before a predicted one"""


def silent() -> None:
    """Announces nothing."""


@dataclass(frozen=True, eq=False)
class Outputs:
    """What a model predicted for all examples of a part: for each a tensor (), or (L,) if each token has a target."""

    examples: Examples
    metrics: dict[str, float]
    """those of `clearhead evaluate`"""
    targets: list[Tensor]
    predicted: list[Tensor]
    """classes; numbers where the targets are numbers"""
    probability: list[Tensor]
    """of each predicted class; where numbers are predicted, their distance from the target"""
    correct: list[Tensor]
    """bool, as the accuracy counts them"""


@dataclass(frozen=True)
class Row:
    """One prediction beside the truth."""

    index: int | None
    """position in the part, for `clearhead look --sample`; None where an example is looked at by its text"""
    input: str | None
    """the file of an image of your own; None for other images"""
    predicted: str
    actual: str
    probability: float | None
    correct: bool


@dataclass(frozen=True)
class Report:
    """The first predictions of a run, and its worst mistakes: those that it was most confident of."""

    unit: str
    """what is counted: images, sequences, tokens, words ..."""
    metrics: dict[str, Any]
    total: int
    wrong: int
    first: list[Row]
    mistakes: list[Row]


def outputs_on(session: Session, part: PartName = "test", announce: Announce = silent) -> Outputs:
    """Predictions for every example of a part, with the metrics of that same pass."""
    objective = OBJECTIVES[session.config.objective]
    targets: list[Tensor] = []
    predicted: list[Tensor] = []
    probability: list[Tensor] = []
    correct: list[Tensor] = []

    def keep(batch: Batch, outputs: Tensor) -> None:
        chosen, sure = read_outputs(session.config.objective, outputs, batch.targets)
        targets.extend(batch.targets)
        predicted.extend(chosen)
        probability.extend(sure)
        correct.extend(objective.right(outputs, batch))

    examples, normalise = examples_of(session, part)
    announce()
    metrics = measure(session, part, examples, normalise, keep)
    return Outputs(examples, metrics, targets, predicted, probability, correct)


def read_outputs(objective: str, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The predicted classes, and the probability of each; of numbers the numbers, and their errors."""
    if objective == "number":
        values = outputs.squeeze(-1)
        return values, (values - targets).abs()
    if objective == "yes-no":
        logits = outputs.squeeze(-1)
        return (logits > 0).long(), logits.abs().sigmoid()
    logits = outputs.squeeze(-1) if objective == "odd" else outputs
    chosen = logits.argmax(-1)  # of the logits: different ones may have probabilities that are rounded to the same
    return chosen, logits.softmax(-1).gather(-1, chosen[..., None])[..., 0]


def confusion(session: Session, announce: Announce = silent) -> Tensor:
    """(V,V): row t, column p counts the test examples of class t that were predicted as class p. Of sequences with a
    class for each token, every token is an example."""
    if session.config.objective not in ("classes", "each", "yes-no"):
        raise ValueError(
            f"a confusion matrix needs classes, got {session.path}, which predicts none; measure it with: "
            f"clearhead evaluate {session.path}"
        )
    outputs = outputs_on(session, announce=announce)
    targets, predicted = (torch.stack(side).flatten().long() for side in (outputs.targets, outputs.predicted))
    return confusion_matrix(targets, predicted, len(session.classes))


def report(
    session: Session, part: PartName = "test", n: int = 16, how: Beam = BEAM, announce: Announce = silent
) -> Report:
    """The first n predictions of a part, and its n worst mistakes. `announce` is called before the part is evaluated,
    which may take minutes."""
    if n < 1:
        raise ValueError(f"the number of predictions must be 1 or more, got {n}")
    if session.config.objective == "written":
        return report_words(session, part, n, how, announce)
    outputs = outputs_on(session, part, announce)
    if session.config.objective == "next":
        return report_tokens(session, outputs, n)
    return report_examples(session, outputs, n)


def report_examples(session: Session, outputs: Outputs, n: int) -> Report:
    """One prediction for each example; of a sequence with a target for each token, all of them together."""
    correct = torch.stack([row.all() for row in outputs.correct])
    # The probability of a sequence is the product of its tokens'; of a number there is none, but its error.
    sure = torch.stack([row.prod() for row in outputs.probability])
    is_number = session.config.objective == "number"
    files = file_names(session, outputs.examples)

    def row(i: int) -> Row:
        inputs, _ = outputs.examples.take(torch.tensor([i]))
        predicted, actual = (named(session, side[i]) for side in (outputs.predicted, outputs.targets))
        probability = None if is_number else float(sure[i])
        shown = files[i] if files else input_text(session, inputs[0])
        return Row(i, shown, predicted, actual, probability, bool(correct[i]))

    wrong = (~correct).nonzero().flatten()
    worst = wrong[sure[wrong].argsort(descending=True, stable=True)][:n]
    unit = "sets" if session.config.objective == "odd" else "images" if session.takes_pictures else "sequences"
    first, mistakes = ([row(i) for i in chosen] for chosen in (range(min(n, len(correct))), worst.tolist()))
    return Report(unit, outputs.metrics, len(correct), len(wrong), first, mistakes)


def named(session: Session, value: Tensor) -> str:
    """A class or a number, or the classes of all tokens."""
    if session.config.objective == "number":
        return f"{float(value):.4g}"
    if session.config.objective == "odd":
        return f"image {int(value)}"
    return " ".join(session.classes[int(i)] for i in value.flatten())


def file_names(session: Session, examples: Examples) -> list[str]:
    """The files of the user's own images, by their paths below the folder; [] for other data."""
    if session.config.data.name != "folder":
        return []
    chosen = torch.arange(len(examples))
    while isinstance(examples, Part):
        chosen, examples = examples.chosen[chosen], examples.examples
    listing, _, _ = usable(session.config.data)
    return [listing.name(i) for i in chosen.tolist()]


def input_text(session: Session, inputs: Tensor) -> str | None:
    return None if session.takes_pictures else " ".join(map(str, inputs.tolist()))


def report_tokens(session: Session, outputs: Outputs, n: int) -> Report:
    """The next token after each: the first texts token by token, and the most confident mistakes of all tokens."""
    targets, predicted, sure, correct = map(
        torch.cat, (outputs.targets, outputs.predicted, outputs.probability, outputs.correct)
    )
    lengths = torch.tensor([len(row) for row in outputs.targets])
    starts = lengths.cumsum(0) - lengths
    wrong = ((targets != IGNORED) & ~correct).nonzero().flatten()
    worst = wrong[sure[wrong].argsort(descending=True, stable=True)][:n]

    def mistake(place: int) -> Row:
        example = int(torch.searchsorted(starts, place, right=True)) - 1
        inputs, _ = outputs.examples.take(torch.tensor([example]))
        seen = inputs[0, : place - int(starts[example]) + 1][-CONTEXT:]
        before, chosen, actual = (text_of(session, ids) for ids in (seen, predicted[place, None], targets[place, None]))
        return Row(example, before, chosen, actual, float(sure[place]), False)

    def whole(example: int) -> Row:
        asked = outputs.targets[example] != IGNORED
        chosen, actual = (
            text_of(session, side[example][asked][-2 * CONTEXT :]) for side in (outputs.predicted, outputs.targets)
        )
        return Row(example, None, chosen, actual, None, bool((outputs.correct[example] | ~asked).all()))

    first = [whole(i) for i in range(min(n, len(lengths)))]
    total = int((targets != IGNORED).sum())
    return Report("tokens", outputs.metrics, total, len(wrong), first, [mistake(i) for i in worst.tolist()])


def text_of(session: Session, ids: Tensor) -> str:
    """Tokens as a text in which line breaks and the like are written out."""
    return repr(to_user("".join(session.symbols[i] for i in ids.tolist()), session.config.data.level))[1:-1]


def report_words(session: Session, part: PartName, n: int, how: Beam, announce: Announce) -> Report:
    """Pronunciations that are written by beam search; one of a word's own is enough to be correct."""
    words = words_to_score(session, part)
    if not words:
        raise ValueError(f"{session.path} has no {part} words; try --part validation")
    announce()
    answers = pronounce(session, list(words), how)
    rates = rates_of(answers, words)
    best = [spoken[0] for spoken in answers]
    rows = [
        Row(None, word, str(way), " or ".join(map(" ".join, known)), math.exp(way.score), way.phones in known)
        for way, (word, known) in zip(best, words.items(), strict=True)
    ]
    mistakes = sorted((row for row in rows if not row.correct), key=lambda row: -(row.probability or 0))
    metrics = asdict(rates) | {
        "word_error_rate": rates.word_error_rate,
        "phoneme_error_rate": rates.phoneme_error_rate,
    }
    return Report("words", {"beam": how.size} | metrics, len(rows), rates.wrong, rows[:n], mistakes[:n])
