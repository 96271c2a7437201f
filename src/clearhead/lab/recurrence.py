"""A transformer beside LSTMs of its size, within a training budget: reversing digits, and pronouncing words."""

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from clearhead.data.config import DataConfig
from clearhead.data.dataset import Dataset, SequencePairs
from clearhead.data.pronounce import load_pronounce
from clearhead.data.vocab import SPECIAL_TOKENS
from clearhead.lab.claim import Claim, Curve, Result, at_least, at_most
from clearhead.lab.learning import Task, budgets_of, learning_curve, mean_over_seeds, one_thread
from clearhead.lab.lstm import DIGITS, NAMES, TRANSFORMER, WITH, WITHOUT, rival, spread
from clearhead.lab.plots import SMALL, canvas, headline, key_below, name_axis
from clearhead.lab.sequential_depth import COLORS, SHORT, doubling, fading, line, untrained
from clearhead.training.objectives import shift_right

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LETTERS, N_TEST = 6, 1_000
TOKENS_AT_ONCE = 2_048
"""in the batch that a step's time is measured with, whatever the length"""
BEST_OF = 7
LONG = 6
"""times the budget: enough for the LSTM alone to come much closer"""


class SideBySide(nn.Module):
    """An encoder-decoder whose source and target so far stand in one row: ids (n,K+Q) -> logits (n,Q,V)"""

    def __init__(self, model: nn.Module, src_vocab_size: int):
        super().__init__()
        self.model, self.src_vocab_size = model, src_vocab_size

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids[:, : self.src_vocab_size], ids[:, self.src_vocab_size :])


def reversal(length: int) -> Task:
    """Digits to be written in reverse order: the last output is the first digit that was read."""

    def task(random: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
        digits = len(SPECIAL_TOKENS) + torch.randint(DIGITS, (n, length), generator=random)
        return torch.cat([digits, shift_right(digits.flip(1))], dim=1), digits.flip(1)

    return task


def pronouncing(examples: SequencePairs) -> Task:
    """Words of LETTERS letters, and their phones."""
    sources, targets = examples.get_batch((examples.lengths[:, 0] == LETTERS).nonzero()[:, 0])

    def task(random: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(sources), (n,), generator=random)
        return torch.cat([sources[chosen], shift_right(targets[chosen])], dim=1), targets[chosen]

    return task


def accuracies(
    model: nn.Module, src_vocab_size: int, task: Task, unseen: Task, budgets: Sequence[int], seed: int
) -> list[float]:
    """The fraction of correct tokens after each training budget, under teacher forcing."""
    rows = SideBySide(model, src_vocab_size)
    return learning_curve(rows, task, budgets=budgets, seed=seed, unseen=unseen, num_test=N_TEST)


def seconds(model: nn.Module, length: int, seed: int) -> float:
    """Processor time of a training step's passes, forwards and backwards; the best of several."""
    rows = SideBySide(model, length)
    inputs, targets = reversal(length)(torch.Generator().manual_seed(seed), TOKENS_AT_ONCE // length)
    found = []
    for _ in range(BEST_OF):
        start = time.process_time()
        nn.functional.cross_entropy(rows(inputs).flatten(0, -2), targets.flatten()).backward()
        found.append(time.process_time() - start)
    return min(found)


def digits_right(name: str, length: int, width: int, budgets: Sequence[int], seed: int) -> list[float]:
    """Accuracy of one model in reversing that many digits, after each training budget."""
    torch.manual_seed(seed)
    task = reversal(length)
    return accuracies(rival(name, width), length, task, task, budgets, seed)


def phones_right(words: Dataset, name: str, width: int, steps: int, seed: int) -> list[float]:
    """Accuracy of one model in pronouncing words that it has not seen."""
    assert isinstance(words.train, SequencePairs)
    assert isinstance(words.test, SequencePairs)
    torch.manual_seed(seed)
    model = rival(name, width, len(words.vocab), len(words.classes))
    return accuracies(model, LETTERS, pronouncing(words.train), pronouncing(words.test), [steps], seed)


def run_recurrence(
    *, seed: int = 0, num_seeds: int = 3, width: int = 32, length: int = 16, steps: int = 300, attends: bool = True
) -> Result:
    """attends=False asks of the LSTM without attention what holds with it."""
    short, budgets = length // 4, budgets_of(steps, 0.25, 0.5, 1)
    longer = sorted({*budgets, *budgets_of(steps, 2, LONG)})
    at = budgets.index(steps)
    with one_thread():
        digits = {
            name: mean_over_seeds(partial(digits_right, name, length, width, trained), seed, num_seeds)
            for name, trained in {TRANSFORMER: budgets, WITH: budgets, WITHOUT: longer}.items()
        }
        (few,) = mean_over_seeds(partial(digits_right, WITHOUT, short, width, [steps]), seed, num_seeds)
        words = load_pronounce(DataConfig(name="pronounce"), seed)
        phones = {
            name: mean_over_seeds(partial(phones_right, words, name, width, steps), seed, num_seeds)[0]
            for name in NAMES
        }
        drawn = (
            *(
                Curve("right digits", name, tuple(longer if name == WITHOUT else budgets), tuple(digits[name]))
                for name in NAMES
            ),
            *(Curve("right phones", name, (LETTERS,), (phones[name],)) for name in NAMES),
            *untrained_curves(width, seed),
        )
    other = WITH if attends else WITHOUT
    alone = digits[WITHOUT]
    checks = (
        at_most("parameters, largest model over smallest", spread([rival(name, width) for name in NAMES]), 1.05),
        at_least(f"transformer, {length} digits, {steps} steps: accuracy", digits[TRANSFORMER][at], 0.93),
        at_least("LSTM with attention, the same: accuracy", digits[other][at], 0.93),
        at_most("LSTM alone, the same: accuracy", alone[at], 0.85),
        at_least(f"LSTM alone, {short} digits, {steps} steps: accuracy", few, 0.93),
        at_least(f"LSTM alone, {length} digits: gain from {longer[-1]} steps", alone[-1] - alone[at], 0.1),
        at_least("new words, phone accuracy: transformer minus LSTM alone", lead(phones, TRANSFORMER), 0.03),
        at_least("new words: LSTM with attention minus LSTM alone", lead(phones, other), 0.02),
    )
    return Result(checks, drawn)


def lead(phones: dict[str, float], name: str) -> float:
    return phones[name] - phones[WITHOUT]


def untrained_curves(width: int, seed: int) -> list[Curve]:
    """Two quantities of models that are not trained: the gradient from end to end, and the time of a step."""
    further = [SHORT * 2**power for power in range(6)]
    found = []
    for name, model in untrained(width, 1.0, seed).items():
        gradients = fading(model, further, width, seed)
        milliseconds = [1000 * seconds(model.float(), length, seed) for length in further]
        found += [
            Curve("gradient", name, tuple(further), tuple(gradients)),
            Curve("milliseconds", name, tuple(further), tuple(milliseconds)),
        ]
    return found


RECURRENCE = Claim(
    slug="recurrence",
    rows=("R4.12",),
    lesson="Beside recurrence",
    statement="Within the same training budget, a transformer and an LSTM with attention learn to reverse sequences of "
    "16 digits; an LSTM of equal size without attention learns only short ones and pronounces words worse. With more "
    "training it comes closer.",
    mistake="An LSTM with as many weights does without attention as quickly; or: recurrence has to go before attention "
    "helps; or: without attention it cannot be learned at all.",
    formula="without attention, all that the decoder knows of the source is one state and cell, 2 width numbers",
    conditions="300 training steps of 64 sequences for each model; accuracy under teacher forcing. "
    "Float32, the mean of three seeds.",
    run=run_recurrence,
    try_next="clearhead lab recurrence --length 8",
    least={"width": 16, "length": 8},
    most={"width": 256, "length": 128},
    multiples={"width": 2},
    trains=True,
    seconds=65,
)


# Recurrence beside attention: gradients over long distances, and operations that wait for one another.


def draw_recurrence(result: Result) -> "Figure":
    """What the training found, accuracy on digits and phonemes; and the time of a step. (Gradients: gradient-path.)"""
    figure, (digits, phones, time) = canvas("AB;AC", widths=(1.2, 1))
    for what, axes in {"right digits": digits, "milliseconds": time}.items():
        found = {curve.name: curve for curve in result.curves if curve.what == what}
        for whose in reversed(NAMES):
            line(axes, whose, found[whose].x, found[whose].y)
        doubling(axes, sorted({x for curve in found.values() for x in curve.x}))
    draw_phones(phones, {curve.name: curve.y[0] for curve in result.curves if curve.what == "right phones"})
    digits.set_ylim(0, 1.05)
    time.set_ylim(0, 1.1 * time.get_ylim()[1])
    name_axis(digits, "Reversed digits", "training steps", "accuracy")
    name_axis(time, f"Step of {TOKENS_AT_ONCE:,} tokens", "sequence length (tokens)", "ms on one core")
    key_below(figure, digits)
    headline(figure, "Within the same budget, an LSTM without attention falls behind")
    return figure


def draw_phones(axes: "Axes", shares: dict[str, float]) -> None:
    """A bar for each model, with its number."""
    heights, colours = [shares[whose] for whose in NAMES], [COLORS[whose] for whose in NAMES]
    bars = axes.bar(range(len(NAMES)), heights, color=colours)
    axes.bar_label(bars, fmt="{:.0%}", fontsize=SMALL)
    axes.set_xticks([])
    axes.set_ylim(0, 1.15)
    axes.grid(axis="x", visible=False)
    name_axis(axes, "Phonemes of new words", "", "accuracy")
