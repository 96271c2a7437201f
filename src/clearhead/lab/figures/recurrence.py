"""Recurrence beside attention: gradients over long distances, and operations that wait for one another."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from clearhead.drawing import BLACK, BLUE, GREEN, VERMILION
from clearhead.lab.claim import Result
from clearhead.lab.figures.style import SMALL, canvas, headline, key_below, name
from clearhead.lab.gradient_path import SHORT, fading, untrained
from clearhead.lab.in_turn import chain
from clearhead.lab.recurrence import TOKENS_AT_ONCE
from clearhead.lab.rivals import NAMES, TRANSFORMER, WITH, WITHOUT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {TRANSFORMER: BLUE, WITH: GREEN, WITHOUT: VERMILION}
MARKERS = {TRANSFORMER: ("o", 7), WITH: ("s", 10), WITHOUT: ("^", 14)}
"""shape and size: where lines meet, all are seen"""


def line(axes: "Axes", whose: str, x: Sequence[float], y: Sequence[float]) -> None:
    marker, size = MARKERS[whose]
    axes.plot(x, y, f"{marker}-", color=COLOURS[whose], linewidth=3, markersize=size, label=whose)


def doubling(axes: "Axes", lengths: Sequence[float]) -> None:
    """Lengths along the bottom, each doubling as wide as the one before."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, labels=[f"{length:g}" for length in lengths])


def up_to(length: int) -> list[int]:
    """Lengths from SHORT, doubled as long as they are well below the last."""
    return [SHORT * 2**power for power in range(12) if SHORT * 2**power <= length / 1.5] + [length]


def draw_gradient_path(*, seed: int = 0, width: int = 32, length: int = 64) -> "Figure":
    """The gradient from the last output to the first input of untrained models, against length, beside 1/length."""
    lengths = up_to(length)
    with torch.random.fork_rng(devices=[]):
        models = untrained(width, 1.0, seed)
    figure, (axes,) = canvas()
    axes.plot(lengths, [lengths[0] / n for n in lengths], "--", color=BLACK, linewidth=2, label="1 / length")
    for whose in reversed(NAMES):
        line(axes, whose, lengths, fading(models[whose], lengths, width, seed))
    doubling(axes, lengths)
    axes.set_yscale("log")
    name(
        axes,
        "untrained models",
        "sequence length (tokens)",
        f"gradient, last output to first\ninput (1 = {lengths[0]} tokens)",
    )
    key_below(figure, axes)
    headline(figure, "Gradients fade as 1/length with attention, exponentially in an LSTM alone")
    return figure


def draw_in_turn(*, seed: int = 0, width: int = 32, length: int = 64) -> "Figure":
    """Operations that wait for one another when all target tokens are given, against length."""
    lengths = up_to(length)
    with torch.random.fork_rng(devices=[]):
        models = untrained(width, 1.0, seed)
    figure, (axes,) = canvas()
    for whose in reversed(NAMES):
        line(axes, whose, lengths, [chain(models[whose], n) for n in lengths])
    axes.set_ylim(0)
    axes.set_xlim(0)
    name(axes, "one forward pass with teacher forcing", "sequence length (tokens)", "longest chain of operations")
    key_below(figure, axes)
    headline(figure, "A transformer's longest chain of operations does not grow with the length")
    return figure


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
    name(digits, "Reversed digits", "training steps", "accuracy")
    name(time, f"Step of {TOKENS_AT_ONCE:,} tokens", "sequence length (tokens)", "ms on one core")
    key_below(figure, digits)
    headline(figure, "Within the same budget, an LSTM without attention falls behind")
    return figure


def draw_phones(axes: "Axes", shares: dict[str, float]) -> None:
    """A bar for each model, with its number."""
    heights, colours = [shares[whose] for whose in NAMES], [COLOURS[whose] for whose in NAMES]
    bars = axes.bar(range(len(NAMES)), heights, color=colours)
    axes.bar_label(bars, fmt="{:.0%}", fontsize=SMALL)
    axes.set_xticks([])
    axes.set_ylim(0, 1.15)
    axes.grid(axis="x", visible=False)
    name(axes, "Phonemes of new words", "", "accuracy")
