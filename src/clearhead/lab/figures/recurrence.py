"""Recurrence against attention: what gets lost on a long way, and what has to wait."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from clearhead.drawing import BLUE, GREEN, VERMILION
from clearhead.lab.claim import Result
from clearhead.lab.figures.style import SMALL, canvas, key_below, name
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


def draw_paths(*, seed: int = 0, width: int = 32, length: int = 64) -> "Figure":
    """Left: the gradient from the last output to the first input. Right: operations that wait for one another."""
    lengths = up_to(length)
    with torch.random.fork_rng(devices=[]):
        models = untrained(width, 1.0, seed)
    figure, (left, right) = canvas("AB")
    for whose in reversed(NAMES):
        line(left, whose, lengths, fading(models[whose], lengths, width, seed))
        line(right, whose, lengths, [chain(models[whose], n) for n in lengths])
    doubling(left, lengths)
    left.set_yscale("log")
    right.set_ylim(0)
    right.set_xlim(0)
    name(left, "Gradient, last output\nto first input", "tokens read", f"1 = with {lengths[0]} tokens")
    name(right, "Operations that wait\nfor one another", "tokens read", "longest chain")
    key_below(figure, left)
    return figure


def draw_recurrence(result: Result) -> "Figure":
    """Trained models: accuracy over training budgets, and of phones. Untrained models: gradient and time."""
    figure, (digits, phones, gradient, time) = canvas("AB;CD")
    for what, axes in {"right digits": digits, "gradient": gradient, "milliseconds": time}.items():
        found = {curve.name: curve for curve in result.curves if curve.what == what}
        for whose in reversed(NAMES):
            line(axes, whose, found[whose].x, found[whose].y)
        doubling(axes, found[WITHOUT].x)
    draw_phones(phones, {curve.name: curve.y[0] for curve in result.curves if curve.what == "right phones"})
    digits.set_ylim(0, 1.05)
    gradient.set_yscale("log")
    time.set_ylim(0, 1.1 * time.get_ylim()[1])
    name(digits, "Digits in reverse order", "training steps", "accuracy")
    name(gradient, "Gradient, last to first", "tokens read", f"1 = {SHORT} tokens")
    name(time, f"Step of {TOKENS_AT_ONCE:,} tokens", "tokens in a sequence", "ms on one core")
    key_below(figure, digits)
    return figure


def draw_phones(axes: "Axes", shares: dict[str, float]) -> None:
    """A bar for each model, with its number."""
    heights, colours = [shares[whose] for whose in NAMES], [COLOURS[whose] for whose in NAMES]
    bars = axes.bar(range(len(NAMES)), heights, color=colours)
    axes.bar_label(bars, fmt="{:.0%}", fontsize=SMALL)
    axes.set_xticks([])
    axes.set_ylim(0, 1.15)
    axes.grid(axis="x", visible=False)
    name(axes, "Phones of new words", "", "accuracy")
