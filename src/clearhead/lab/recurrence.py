"""A transformer and LSTMs of equal size, within a training budget: reversing digits and pronouncing words."""

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from clearhead.data.dataset import Dataset, SequencePairs
from clearhead.data.sequences import load_pronounce
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
    gradient_ratios,
    log2_length_axis,
    plot_model,
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


TOKENS_PER_STEP = 2_048
"""batch size in tokens, for every length, when the time of a step is measured"""


NUM_TIMINGS = 7


LONG_FACTOR = 6
"""multiple of the budget after which the LSTM without attention has narrowed the gap"""


class ConcatenatedInputs(nn.Module):
    """Takes source and shifted target as one concatenated tensor: ids (n,K+Q) -> logits (n,Q,V)"""

    def __init__(self, model: nn.Module, src_length: int):
        super().__init__()
        self.model, self.src_length = model, src_length

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids[:, : self.src_length], ids[:, self.src_length :])


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
    model: nn.Module, src_length: int, task: Task, test_task: Task, budgets: Sequence[int], seed: int
) -> list[float]:
    """Token accuracy under teacher forcing after each number of steps."""
    joint_model = ConcatenatedInputs(model, src_length)
    return learning_curve(joint_model, task, budgets=budgets, seed=seed, test_task=test_task, num_test=NUM_TEST)


def step_seconds(model: nn.Module, length: int, seed: int) -> float:
    """CPU time of one forward and backward pass: the minimum of several runs."""
    joint_model = ConcatenatedInputs(model, length)
    inputs, targets = reversal(length)(torch.Generator().manual_seed(seed), TOKENS_PER_STEP // length)
    timings = []
    for _ in range(NUM_TIMINGS):
        start = time.process_time()
        nn.functional.cross_entropy(joint_model(inputs).flatten(0, -2), targets.flatten()).backward()
        timings.append(time.process_time() - start)
    return min(timings)


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
    lstm_budgets = sorted({*budgets, *step_budgets(steps, 2, LONG_FACTOR)})
    index = budgets.index(steps)
    with single_thread():
        digits = {
            name: mean_over_seeds(partial(digit_accuracy, name, length, width, model_budgets), seed, num_seeds)
            for name, model_budgets in {TRANSFORMER: budgets, LSTM_ATTENTION: budgets, LSTM: lstm_budgets}.items()
        }
        (short_accuracy,) = mean_over_seeds(partial(digit_accuracy, LSTM, short, width, [steps]), seed, num_seeds)
        words = load_pronounce(Pronounce())
        phones = {
            name: mean_over_seeds(partial(phone_accuracy, words, name, width, steps), seed, num_seeds)[0]
            for name in MODEL_NAMES
        }
        curves = (
            *(
                Curve("digit accuracy", name, tuple(lstm_budgets if name == LSTM else budgets), tuple(digits[name]))
                for name in MODEL_NAMES
            ),
            *(Curve("phoneme accuracy", name, (LETTERS,), (phones[name],)) for name in MODEL_NAMES),
            *untrained_curves(width, seed),
        )
    compared = LSTM_ATTENTION if with_attention else LSTM
    lstm_accuracy = digits[LSTM]
    checks = (
        at_most(
            "parameters of the largest model / smallest model",
            size_ratio([build_seq2seq(name, width) for name in MODEL_NAMES]),
            1.05,
        ),
        at_least(f"transformer, {length} digits, {steps} steps: accuracy", digits[TRANSFORMER][index], 0.93),
        at_least(f"LSTM with attention, {length} digits, {steps} steps: accuracy", digits[compared][index], 0.93),
        at_most(f"LSTM without attention, {length} digits, {steps} steps: accuracy", lstm_accuracy[index], 0.85),
        at_least(f"LSTM without attention, {short} digits, {steps} steps: accuracy", short_accuracy, 0.93),
        at_least(
            f"LSTM without attention, {length} digits: gain with {lstm_budgets[-1]} steps",
            lstm_accuracy[-1] - lstm_accuracy[index],
            0.1,
        ),
        at_least(
            "unseen words: phoneme accuracy, transformer minus LSTM without attention",
            gain_over_lstm(phones, TRANSFORMER),
            0.03,
        ),
        at_least(
            "unseen words: phoneme accuracy, LSTM with minus without attention", gain_over_lstm(phones, compared), 0.02
        ),
    )
    return Result(checks, curves)


def gain_over_lstm(phones: dict[str, float], name: str) -> float:
    """Difference in phoneme accuracy between this model and the LSTM without attention."""
    return phones[name] - phones[LSTM]


def untrained_curves(width: int, seed: int) -> list[Curve]:
    """For untrained models: the gradient of the last output with respect to the first input, and the time of a step."""
    lengths = [SHORT * 2**power for power in range(6)]
    curves = []
    for name, model in untrained_models(width, 1.0, seed).items():
        gradients = gradient_ratios(model, lengths, width, seed)
        milliseconds = [1000 * step_seconds(model.float(), length, seed) for length in lengths]
        curves += [
            Curve("gradient", name, tuple(lengths), tuple(gradients)),
            Curve("milliseconds", name, tuple(lengths), tuple(milliseconds)),
        ]
    return curves


def draw_recurrence(result: Result) -> "Figure":
    """Accuracy on digits and phonemes, and the time of a training step."""
    figure, (digits, phones, time) = subplots("AB;AC", widths=(1.2, 1))
    for quantity, axes in {"digit accuracy": digits, "milliseconds": time}.items():
        curves = {curve.name: curve for curve in result.curves if curve.quantity == quantity}
        for name in reversed(MODEL_NAMES):
            plot_model(axes, name, curves[name].x, curves[name].y)
        log2_length_axis(axes, sorted({x for curve in curves.values() for x in curve.x}))
    draw_phoneme_accuracy(
        phones, {curve.name: curve.y[0] for curve in result.curves if curve.quantity == "phoneme accuracy"}
    )
    digits.set_ylim(0, 1.05)
    time.set_ylim(0, 1.1 * time.get_ylim()[1])
    label_axes(digits, "Reversed digits", "training steps", "accuracy")
    label_axes(time, f"Step of {TOKENS_PER_STEP:,} tokens", "sequence length (tokens)", "ms on one core")
    legend_below(figure, digits)
    set_headline(figure, "Within the same training budget, an LSTM without attention falls behind")
    return figure


def draw_phoneme_accuracy(axes: "Axes", accuracy: dict[str, float]) -> None:
    """One bar per model."""
    heights, colors = [accuracy[name] for name in MODEL_NAMES], [COLORS[name] for name in MODEL_NAMES]
    bars = axes.bar(range(len(MODEL_NAMES)), heights, color=colors)
    axes.bar_label(bars, fmt="{:.0%}", fontsize=SMALL_SIZE)
    axes.set_xticks([])
    axes.set_ylim(0, 1.15)
    axes.grid(axis="x", visible=False)
    label_axes(axes, "Phonemes of unseen words", "", "accuracy")


RECURRENCE = Claim(
    slug="recurrence",
    lesson="Attention and recurrence",
    statement="Within the same training budget, a transformer and an LSTM with attention learn to reverse 16 digits, "
    "whereas an LSTM of equal size without attention learns to reverse only short sequences and predicts "
    "pronunciations less accurately. With more training, the gap narrows.",
    misconception="An LSTM of equal size learns as fast without attention, attention does not help recurrent networks, "
    "or reversal cannot be learned without attention at all.",
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
