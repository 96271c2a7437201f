"""A transformer and LSTMs of equal size, within a training budget: reversing digits and pronouncing words."""

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from clearhead.data.dataset import Dataset, SequencePairs
from clearhead.data.pronounce import load_pronounce
from clearhead.data.vocab import SPECIAL_TOKENS
from clearhead.lab.claim import Claim, Curve, Result, at_least, at_most
from clearhead.lab.learning import Task, learning_curve, mean_over_seeds, single_thread, step_budgets
from clearhead.lab.lstm import (
    COLORS,
    DIGITS,
    LSTM,
    LSTM_ATTENTION,
    MODEL_NAMES,
    SHORT,
    TRANSFORMER,
    build_seq2seq,
    doubling,
    gradient_ratios,
    line,
    size_ratio,
    untrained_models,
)
from clearhead.lab.plots import SMALL_SIZE, label_axes, legend_below, set_headline, subplots
from clearhead.tasks.objectives import shift_right
from clearhead.tasks.pronounce import Pronounce

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LETTERS, NUM_TEST = 6, 1_000


TOKENS_AT_ONCE = 2_048
"""per batch when the time of a step is measured, for every length"""


BEST_OF = 7


LONG_FACTOR = 6
"""multiple of the budget with which the LSTM without attention comes much closer"""


class ConcatenatedInputs(nn.Module):
    """Takes the source and the shifted target in one tensor: ids (n,K+Q) -> logits (n,Q,V)"""

    def __init__(self, model: nn.Module, src_vocab_size: int):
        super().__init__()
        self.model, self.src_vocab_size = model, src_vocab_size

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids[:, : self.src_vocab_size], ids[:, self.src_vocab_size :])


def reversal(length: int) -> Task:
    """Reverse a sequence of digits: the last output is the first input."""

    def task(random: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
        digits = len(SPECIAL_TOKENS) + torch.randint(DIGITS, (n, length), generator=random)
        return torch.cat([digits, shift_right(digits.flip(1))], dim=1), digits.flip(1)

    return task


def pronunciation(examples: SequencePairs) -> Task:
    """Words of LETTERS letters and their phonemes."""
    sources, targets = examples.get_batch((examples.lengths[:, 0] == LETTERS).nonzero()[:, 0])

    def task(random: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(sources), (n,), generator=random)
        return torch.cat([sources[chosen], shift_right(targets[chosen])], dim=1), targets[chosen]

    return task


def accuracies(
    model: nn.Module, src_vocab_size: int, task: Task, unseen: Task, budgets: Sequence[int], seed: int
) -> list[float]:
    """Token accuracy under teacher forcing after each number of steps."""
    rows = ConcatenatedInputs(model, src_vocab_size)
    return learning_curve(rows, task, budgets=budgets, seed=seed, unseen=unseen, num_test=NUM_TEST)


def seconds(model: nn.Module, length: int, seed: int) -> float:
    """CPU time of one forward and backward pass, the best of several."""
    rows = ConcatenatedInputs(model, length)
    inputs, targets = reversal(length)(torch.Generator().manual_seed(seed), TOKENS_AT_ONCE // length)
    found = []
    for _ in range(BEST_OF):
        start = time.process_time()
        nn.functional.cross_entropy(rows(inputs).flatten(0, -2), targets.flatten()).backward()
        found.append(time.process_time() - start)
    return min(found)


def digit_accuracy(name: str, length: int, width: int, budgets: Sequence[int], seed: int) -> list[float]:
    """Reversal accuracy of one model after each number of steps."""
    torch.manual_seed(seed)
    task = reversal(length)
    return accuracies(build_seq2seq(name, width), length, task, task, budgets, seed)


def phone_accuracy(words: Dataset, name: str, width: int, steps: int, seed: int) -> list[float]:
    """Phoneme accuracy of one model on unseen words."""
    assert isinstance(words.train, SequencePairs)
    assert isinstance(words.test, SequencePairs)
    torch.manual_seed(seed)
    model = build_seq2seq(name, width, len(words.vocab), len(words.classes))
    return accuracies(model, LETTERS, pronunciation(words.train), pronunciation(words.test), [steps], seed)


def run_recurrence(
    *,
    seed: int = 0,
    num_seeds: int = 3,
    width: int = 32,
    length: int = 16,
    steps: int = 300,
    with_attention: bool = True,
) -> Result:
    """with_attention=False tests the LSTM without attention in place of the one with attention."""
    short, budgets = length // 4, step_budgets(steps, 0.25, 0.5, 1)
    longer = sorted({*budgets, *step_budgets(steps, 2, LONG_FACTOR)})
    at = budgets.index(steps)
    with single_thread():
        digits = {
            name: mean_over_seeds(partial(digit_accuracy, name, length, width, trained), seed, num_seeds)
            for name, trained in {TRANSFORMER: budgets, LSTM_ATTENTION: budgets, LSTM: longer}.items()
        }
        (few,) = mean_over_seeds(partial(digit_accuracy, LSTM, short, width, [steps]), seed, num_seeds)
        words = load_pronounce(Pronounce())
        phones = {
            name: mean_over_seeds(partial(phone_accuracy, words, name, width, steps), seed, num_seeds)[0]
            for name in MODEL_NAMES
        }
        drawn = (
            *(
                Curve("digit accuracy", name, tuple(longer if name == LSTM else budgets), tuple(digits[name]))
                for name in MODEL_NAMES
            ),
            *(Curve("phoneme accuracy", name, (LETTERS,), (phones[name],)) for name in MODEL_NAMES),
            *untrained_curves(width, seed),
        )
    other = LSTM_ATTENTION if with_attention else LSTM
    alone = digits[LSTM]
    checks = (
        at_most(
            "parameters of the largest model / smallest model",
            size_ratio([build_seq2seq(name, width) for name in MODEL_NAMES]),
            1.05,
        ),
        at_least(f"transformer, {length} digits, {steps} steps: accuracy", digits[TRANSFORMER][at], 0.93),
        at_least(f"LSTM with attention, {length} digits, {steps} steps: accuracy", digits[other][at], 0.93),
        at_most(f"LSTM without attention, {length} digits, {steps} steps: accuracy", alone[at], 0.85),
        at_least(f"LSTM without attention, {short} digits, {steps} steps: accuracy", few, 0.93),
        at_least(f"LSTM without attention, {length} digits: gain with {longer[-1]} steps", alone[-1] - alone[at], 0.1),
        at_least(
            "unseen words: phoneme accuracy, transformer minus LSTM without attention", lead(phones, TRANSFORMER), 0.03
        ),
        at_least("unseen words: phoneme accuracy, LSTM with minus without attention", lead(phones, other), 0.02),
    )
    return Result(checks, drawn)


def lead(phones: dict[str, float], name: str) -> float:
    return phones[name] - phones[LSTM]


def untrained_curves(width: int, seed: int) -> list[Curve]:
    """Of untrained models: the gradient of the last output with respect to the first input, and the time of a step."""
    further = [SHORT * 2**power for power in range(6)]
    found = []
    for name, model in untrained_models(width, 1.0, seed).items():
        gradients = gradient_ratios(model, further, width, seed)
        milliseconds = [1000 * seconds(model.float(), length, seed) for length in further]
        found += [
            Curve("gradient", name, tuple(further), tuple(gradients)),
            Curve("milliseconds", name, tuple(further), tuple(milliseconds)),
        ]
    return found


def draw_recurrence(result: Result) -> "Figure":
    """Accuracy on digits and phonemes, and the time of a training step."""
    figure, (digits, phones, time) = subplots("AB;AC", widths=(1.2, 1))
    for what, axes in {"digit accuracy": digits, "milliseconds": time}.items():
        found = {curve.name: curve for curve in result.curves if curve.quantity == what}
        for whose in reversed(MODEL_NAMES):
            line(axes, whose, found[whose].x, found[whose].y)
        doubling(axes, sorted({x for curve in found.values() for x in curve.x}))
    draw_phoneme_accuracy(
        phones, {curve.name: curve.y[0] for curve in result.curves if curve.quantity == "phoneme accuracy"}
    )
    digits.set_ylim(0, 1.05)
    time.set_ylim(0, 1.1 * time.get_ylim()[1])
    label_axes(digits, "Reversed digits", "training steps", "accuracy")
    label_axes(time, f"Step of {TOKENS_AT_ONCE:,} tokens", "sequence length (tokens)", "ms on one core")
    legend_below(figure, digits)
    set_headline(figure, "Within the same training budget, an LSTM without attention falls behind")
    return figure


def draw_phoneme_accuracy(axes: "Axes", accuracy: dict[str, float]) -> None:
    """One bar per model."""
    heights, colors = [accuracy[whose] for whose in MODEL_NAMES], [COLORS[whose] for whose in MODEL_NAMES]
    bars = axes.bar(range(len(MODEL_NAMES)), heights, color=colors)
    axes.bar_label(bars, fmt="{:.0%}", fontsize=SMALL_SIZE)
    axes.set_xticks([])
    axes.set_ylim(0, 1.15)
    axes.grid(axis="x", visible=False)
    label_axes(axes, "Phonemes of unseen words", "", "accuracy")


RECURRENCE = Claim(
    slug="recurrence",
    lesson="Attention and recurrence",
    statement="Within the same training budget, a transformer and an LSTM with attention learn to reverse sequences of "
    "16 digits; an LSTM of equal size without attention learns only short ones and pronounces words worse. With more "
    "training the difference shrinks.",
    misconception="An LSTM of equal size learns as quickly without attention; or: attention helps only without "
    "recurrence; or: reversal cannot be learned without attention at all.",
    formula="without attention, the decoder sees the source only through one hidden and one cell state: 2 · width "
    "numbers",
    conditions="Each model: 300 training steps of 64 sequences in float32; accuracy under teacher forcing, mean of "
    "three seeds.",
    run=run_recurrence,
    figure=draw_recurrence,
    try_next="clearhead lab recurrence --length 8",
    minimum={"width": 16, "length": 8},
    maximum={"width": 256, "length": 128},
    multiple_of={"width": 2},
    trains=True,
    seconds=65,
)
