"""A run on a part of its data, example by example: the confusion matrix, predictions beside the truth, mistakes.

The outputs are those of the one function that training's own test and `clearhead evaluate` use, so that all agree.
Dims: N examples, B batch, L length, V classes, S elements of a set.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead.data.batches import Batch
from clearhead.data.dataset import Examples, Subset
from clearhead.data.folder import usable
from clearhead.data.vocab import IGNORE_INDEX, tokens_to_text
from clearhead.drawing import BLUE, GRAY, VERMILION, displayable, new_figure, wrap
from clearhead.inference.evaluate import PartName, confusion_matrix, examples_of, measure, rates_of, words_to_score
from clearhead.inference.g2p import BEAM, pronounce
from clearhead.inference.run import Run
from clearhead.models.generate import Beam
from clearhead.training.objectives import OBJECTIVES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


def outputs_on(run: Run, part: PartName = "test", announce: Announce = silent) -> Outputs:
    """Predictions for every example of a part, with the metrics of that same pass."""
    objective = OBJECTIVES[run.config.objective]
    targets: list[Tensor] = []
    predicted: list[Tensor] = []
    probability: list[Tensor] = []
    correct: list[Tensor] = []

    def keep(batch: Batch, outputs: Tensor) -> None:
        chosen, sure = read_outputs(run.config.objective, outputs, batch.targets)
        targets.extend(batch.targets)
        predicted.extend(chosen)
        probability.extend(sure)
        correct.extend(objective.correct(outputs, batch))

    examples, normalize = examples_of(run, part)
    announce()
    metrics = measure(run, part, examples, normalize, keep)
    return Outputs(examples, metrics, targets, predicted, probability, correct)


def read_outputs(objective: str, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The predicted classes, and the probability of each; of numbers the numbers, and their errors."""
    if objective == "regression":
        values = outputs.squeeze(-1)
        return values, (values - targets).abs()
    if objective == "binary-classification":
        logits = outputs.squeeze(-1)
        return (logits > 0).long(), logits.abs().sigmoid()
    logits = outputs.squeeze(-1) if objective == "set-pointer" else outputs
    chosen = logits.argmax(-1)  # of the logits: different ones may have probabilities that are rounded to the same
    return chosen, logits.softmax(-1).gather(-1, chosen[..., None])[..., 0]


def confusion(run: Run, announce: Announce = silent) -> Tensor:
    """(V,V): row t, column p counts the test examples of class t that were predicted as class p. Of sequences with a
    class for each token, every token is an example."""
    if run.config.objective not in ("classification", "token-classification", "binary-classification"):
        raise ValueError(
            f"a confusion matrix needs classes, got {run.path}, which predicts none; measure it with: "
            f"clearhead evaluate {run.path}"
        )
    outputs = outputs_on(run, announce=announce)
    targets, predicted = (torch.stack(side).flatten().long() for side in (outputs.targets, outputs.predicted))
    return confusion_matrix(targets, predicted, len(run.classes))


def report(run: Run, part: PartName = "test", n: int = 16, how: Beam = BEAM, announce: Announce = silent) -> Report:
    """The first n predictions of a part, and its n worst mistakes. `announce` is called before the part is evaluated,
    which may take minutes."""
    if n < 1:
        raise ValueError(f"the number of predictions must be 1 or more, got {n}")
    if run.config.objective == "seq2seq":
        return report_words(run, part, n, how, announce)
    outputs = outputs_on(run, part, announce)
    if run.config.objective == "causal-lm":
        return report_tokens(run, outputs, n)
    return report_examples(run, outputs, n)


def report_examples(run: Run, outputs: Outputs, n: int) -> Report:
    """One prediction for each example; of a sequence with a target for each token, all of them together."""
    correct = torch.stack([row.all() for row in outputs.correct])
    # The probability of a sequence is the product of its tokens'; of a number there is none, but its error.
    sure = torch.stack([row.prod() for row in outputs.probability])
    is_number = run.config.objective == "regression"
    files = file_names(run, outputs.examples)

    def row(i: int) -> Row:
        inputs, _ = outputs.examples.get_batch(torch.tensor([i]))
        predicted, actual = (named(run, side[i]) for side in (outputs.predicted, outputs.targets))
        probability = None if is_number else float(sure[i])
        shown = files[i] if files else input_text(run, inputs[0])
        return Row(i, shown, predicted, actual, probability, bool(correct[i]))

    wrong = (~correct).nonzero().flatten()
    worst = wrong[sure[wrong].argsort(descending=True, stable=True)][:n]
    unit = "sets" if run.config.objective == "set-pointer" else "images" if run.input_kind == "images" else "sequences"
    first, mistakes = ([row(i) for i in chosen] for chosen in (range(min(n, len(correct))), worst.tolist()))
    return Report(unit, outputs.metrics, len(correct), len(wrong), first, mistakes)


def named(run: Run, value: Tensor) -> str:
    """A class or a number, or the classes of all tokens."""
    if run.config.objective == "regression":
        return f"{float(value):.4g}"
    if run.config.objective == "set-pointer":
        return f"image {int(value)}"
    return " ".join(run.classes[int(i)] for i in value.flatten())


def file_names(run: Run, examples: Examples) -> list[str]:
    """The files of the user's own images, by their paths below the folder; [] for other data."""
    if run.config.data.name != "folder":
        return []
    chosen = torch.arange(len(examples))
    while isinstance(examples, Subset):
        chosen, examples = examples.chosen[chosen], examples.examples
    listing, _, _ = usable(run.config.data)
    return [listing.name(i) for i in chosen.tolist()]


def input_text(run: Run, inputs: Tensor) -> str | None:
    return None if run.input_kind == "images" else " ".join(map(str, inputs.tolist()))


def report_tokens(run: Run, outputs: Outputs, n: int) -> Report:
    """The next token after each: the first texts token by token, and the most confident mistakes of all tokens."""
    targets, predicted, sure, correct = map(
        torch.cat, (outputs.targets, outputs.predicted, outputs.probability, outputs.correct)
    )
    lengths = torch.tensor([len(row) for row in outputs.targets])
    starts = lengths.cumsum(0) - lengths
    wrong = ((targets != IGNORE_INDEX) & ~correct).nonzero().flatten()
    worst = wrong[sure[wrong].argsort(descending=True, stable=True)][:n]

    def mistake(place: int) -> Row:
        example = int(torch.searchsorted(starts, place, right=True)) - 1
        inputs, _ = outputs.examples.get_batch(torch.tensor([example]))
        seen = inputs[0, : place - int(starts[example]) + 1][-CONTEXT:]
        before, chosen, actual = (text_of(run, ids) for ids in (seen, predicted[place, None], targets[place, None]))
        return Row(example, before, chosen, actual, float(sure[place]), False)

    def whole(example: int) -> Row:
        asked = outputs.targets[example] != IGNORE_INDEX
        chosen, actual = (
            text_of(run, side[example][asked][-2 * CONTEXT :]) for side in (outputs.predicted, outputs.targets)
        )
        return Row(example, None, chosen, actual, None, bool((outputs.correct[example] | ~asked).all()))

    first = [whole(i) for i in range(min(n, len(lengths)))]
    total = int((targets != IGNORE_INDEX).sum())
    return Report("tokens", outputs.metrics, total, len(wrong), first, [mistake(i) for i in worst.tolist()])


def text_of(run: Run, ids: Tensor) -> str:
    """Tokens as a text in which line breaks and the like are written out."""
    return repr(tokens_to_text("".join(run.vocab[i] for i in ids.tolist()), run.config.data.level))[1:-1]


def report_words(run: Run, part: PartName, n: int, how: Beam, announce: Announce) -> Report:
    """Pronunciations that are written by beam search; one of a word's own is enough to be correct."""
    words = words_to_score(run, part)
    if not words:
        raise ValueError(f"{run.path} has no {part} words; try --part validation")
    announce()
    answers = pronounce(run, list(words), how)
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


# Pictures with a model's predictions below them. Dims: C channels, S images of a set.


COLUMNS = 8
CELL = 1.25
"""inches from one picture to the next"""
TEXT, TITLE = 9, 12
"""points"""
LINE = 1.35 * TEXT / 72
"""inches"""


@dataclass(frozen=True)
class PredictedImage:
    image: Tensor
    """uint8 (C,height,width)"""
    answer: str
    probability: float
    right: str | None = None
    """the right answer, where it is known"""
    index: int | None = None
    """position in its part of the data"""

    @property
    def is_wrong(self) -> bool:
        return self.right is not None and self.right != self.answer

    @property
    def text(self) -> str:
        """Wrapped to the width of a column."""
        predicted = f"{displayable(self.answer)}  {self.probability:.0%}"
        return wrap(
            predicted + (f"\nactual: {displayable(self.right or '')}" if self.is_wrong else ""), 0.92 * CELL, TEXT
        )


def plot_predictions(groups: dict[str, Sequence[PredictedImage]]) -> "Figure":
    """A block of pictures below each title; a wrong prediction stands in orange, with the truth below it."""
    blocks = {wrap(title, 0.96 * CELL * COLUMNS, TITLE): shown for title, shown in groups.items() if shown}
    rows = [-(-len(shown) // COLUMNS) for shown in blocks.values()]
    lines = [max(each.text.count("\n") + 1 for each in shown) for shown in blocks.values()]
    heights = [
        n * (CELL + (n_lines + 1) * LINE) + 0.3 * (title.count("\n") + 1) + 0.2
        for title, n, n_lines in zip(blocks, rows, lines, strict=True)
    ]
    figure = new_figure(CELL * COLUMNS, sum(heights))
    parts = figure.subfigures(len(blocks), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, (title, shown), n in zip(parts, blocks.items(), rows, strict=True):
        part.suptitle(title, fontsize=TITLE)
        for i, panel in enumerate(part.subplots(n, COLUMNS, squeeze=False).flat):
            panel.set_axis_off()
            if i < len(shown):
                draw_one(panel, shown[i])
    return figure


def draw_one(panel: "Axes", shown: PredictedImage) -> None:
    draw_pixels(panel, shown.image)
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


def draw_pixels(panel: "Axes", image: Tensor) -> None:
    pixels = image.permute(1, 2, 0)  # (C,height,width) -> (height,width,C)
    panel.imshow(pixels.squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=255, interpolation="nearest")


def titles(found: Report, part: PartName) -> tuple[str, str]:
    """What the two groups of a report are."""
    of_what = {"tokens": "texts"}.get(found.unit, found.unit)
    first = f"The first {len(found.first)} {of_what} of the {part} set"
    order = (
        "the largest errors" if found.first[0].probability is None and found.unit != "tokens" else "the most confident"
    )
    worst = f"Wrong predictions: {found.wrong:,} of {found.total:,} {found.unit}, {order} first"
    return first, worst


def plot_test_predictions(run: Run, n: int = 16) -> "Figure":
    """The first n test images, and the n mistakes that the model was most confident of."""
    return draw_report(run, report(run, n=n), "test")


def draw_report(run: Run, found: Report, part: PartName) -> "Figure":
    """The predictions of a report, for runs on images or on sets of images."""
    examples, _ = examples_of(run, part)

    def inputs(rows: Sequence[Row]) -> Tensor:
        return examples.get_batch(torch.tensor([row.index for row in rows]))[0]

    groups = {
        title: rows for title, rows in zip(titles(found, part), (found.first, found.mistakes), strict=True) if rows
    }
    if found.unit == "sets":
        return draw_sets({title: (rows, inputs(rows)) for title, rows in groups.items()})
    return plot_predictions(
        {
            title: [
                PredictedImage(image, row.predicted, row.probability or 0.0, row.actual, row.index)
                for row, image in zip(rows, inputs(rows), strict=True)
            ]
            for title, rows in groups.items()
        }
    )


def draw_sets(groups: dict[str, tuple[Sequence[Row], Tensor]]) -> "Figure":
    """A line for each set of images (S,784), with a frame around the image that was taken for the odd one, and around
    the one that it is."""
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
                frame_one(panel, row, f"image {i}")
            line[0].set_ylabel(f"#{row.index}", fontsize=8, color=GRAY, rotation=0, ha="right")
    return figure


def frame_one(panel: "Axes", row: Row, name: str) -> None:
    """Says below an image of a set that it was predicted to be the odd one, or that it is."""
    if name not in (row.predicted, row.actual):
        return
    colour = BLUE if name == row.actual else VERMILION
    panel.spines[:].set(edgecolor=colour, linewidth=4)
    text = f"predicted {row.probability:.0%}" if name == row.predicted else "actual"
    panel.set_xlabel(text, fontsize=TEXT, color=colour)
