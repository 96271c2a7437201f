"""Training: figures of what a training measured, and what training does that evaluation does not."""

from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING

import torch

from clearhead.drawing import COLOURS, GREY
from clearhead.lab.claim import Check, Curve, Result
from clearhead.lab.figures.style import (
    MISTAKE,
    SMALL,
    TEXT,
    TRUTH,
    against,
    bars,
    canvas,
    headline,
    key_below,
    label,
    name,
)
from clearhead.lab.stages import weight_change
from clearhead.models.config import PredictorConfig
from clearhead.models.predictor import SequencePredictor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "os^Dv*X"


def draw_several_heads(result: Result) -> "Figure":
    return draw_measured(result, "Several heads need fewer training steps than one as wide, or than many")


def draw_augmentation(result: Result) -> "Figure":
    return draw_measured(result, "Random crops make a model robust to shifts, but not to rotation")


def draw_plain_vit(result: Result) -> "Figure":
    return draw_measured(result, "Positions help the plain ViT most, all three parts together more still")


def draw_positions(result: Result) -> "Figure":
    """Accuracy with and without positions, beside the best guess of a model that knows no order."""
    found = {check.name: check.value for check in result.checks}
    given = {
        part: value
        for part in ("reversal with positions", "above", "reversal without", "odd one out")
        for name, value in found.items()
        if part in name and ("above" in name) == (part == "above")
    }
    sentence = "Reversal needs positions; finding the odd one out does not"
    if len(given) < 4:
        return draw_measured(result, sentence)
    with_positions, above, without, odd = given.values()
    figure, (axes,) = canvas()
    heights = {
        "reversal,\nwith positions": (with_positions, TRUTH),
        "reversal,\nwithout": (without, MISTAKE),
        "best guess\nwithout order": (without - above, GREY),
        "odd one out,\nwithout": (odd, TRUTH),
    }
    bars(axes, heights, "{:.0%}")
    axes.set_ylim(0, 1.1)
    name(axes, "", "", "accuracy")
    headline(figure, sentence)
    return figure


def draw_measured(result: Result, sentence: str) -> "Figure":
    """A panel for each quantity whose curves the result has; the numbers of its checks where it has none."""
    quantities = list(dict.fromkeys(curve.what for curve in result.curves))
    if not quantities:
        figure, (axes,) = canvas()
        draw_checks(axes, result.checks)
    else:
        figure, all_axes = canvas("ABCDEF"[: len(quantities)])
        for axes, what in zip(all_axes, quantities, strict=True):
            draw_quantity(axes, [curve for curve in result.curves if curve.what == what])
        if max(len(curve.x) for curve in result.curves) > 1:
            key_below(figure, all_axes[0], 3)
    headline(figure, sentence)
    return figure


def draw_quantity(axes: "Axes", curves: Sequence[Curve]) -> None:
    """One quantity: lines over training steps, or bars, if each curve has one point or each point has a name."""
    what, names = curves[0].what, curves[0].what.split(", ")
    if len(names) == len(curves[0].x) > 1:
        draw_groups(axes, curves, names)
        what = "accuracy"
    elif all(len(curve.x) == 1 for curve in curves):
        bars(axes, {fill(curve.name, 11): (curve.y[0], TRUTH) for curve in curves}, "{:.3g}")
    else:
        draw_lines(axes, curves)
    axes.set_ylim(0, 1.1 * max(1.0, *(height for curve in curves for height in curve.y)))
    axes.set_ylabel(fill(what, 24), fontsize=TEXT)


def draw_groups(axes: "Axes", curves: Sequence[Curve], names: Sequence[str]) -> None:
    """Bars side by side, a group for each name."""
    width = 0.8 / len(curves)
    for number, curve in reversed(list(enumerate(curves))):
        places = [group + (number + 0.5) * width - 0.4 for group in range(len(names))]
        drawn = axes.bar(places, curve.y, width, color=COLOURS[number % len(COLOURS)], label=curve.name)
        axes.bar_label(drawn, fmt="{:.0%}", fontsize=SMALL)
    axes.set_xticks(range(len(names)), labels=[fill(text, 12) for text in names])
    axes.grid(axis="x", visible=False)


def draw_lines(axes: "Axes", curves: Sequence[Curve]) -> None:
    """Lines over training steps, on a logarithmic axis."""
    for number, curve in reversed(list(enumerate(curves))):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        axes.plot(curve.x, curve.y, f"{marker}-", color=colour, linewidth=3, markersize=8, label=curve.name)
    steps = sorted({step for curve in curves for step in curve.x})
    axes.set_xscale("log", base=2)
    axes.set_xticks(steps, labels=[f"{step:g}" for step in steps])
    axes.set_xlabel("training steps", fontsize=TEXT)


def draw_checks(axes: "Axes", checks: Sequence[Check]) -> None:
    """A horizontal bar for each number, with its name and what is claimed of it."""
    values = [check.value for check in checks]
    colours = [TRUTH if check.ok else MISTAKE for check in checks]
    axes.barh(range(len(checks)), values, color=colours, height=0.6)
    for row, check in enumerate(checks):
        label(axes, max(check.value, 0.0), row, f"{check.value:.3g} ({check.says})", offset=(6, 0), va="center")
    axes.set_yticks(range(len(checks)), labels=[fill(check.name, 32) for check in checks])
    axes.invert_yaxis()
    axes.axvline(0, color=GREY)
    axes.set_xlim(min(0.0, 1.1 * min(values)), 1.6 * max(*values, 0.1))
    axes.grid(axis="y", visible=False)
    name(axes, "", "measured value")


def draw_stages(*, seed: int = 0, width: int = 16, dropout: float = 0.2) -> "Figure":
    """Left and middle: the same input twice, in training and in evaluation. Right: how far a pass moves the weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SequencePredictor(
            PredictorConfig(width=width, depth=2, n_heads=2, n_inputs=10, n_outputs=10, dropout=dropout)
        )
        ids = torch.randint(0, 10, (4, 8))
        twice, moved = {}, {}
        for text, training, colour in (("evaluation", False, TRUTH), ("training", True, MISTAKE)):
            model.train(training)
            with torch.no_grad():
                twice[text] = (model(ids)[0], model(ids)[0], colour)
        for text, training, colour in (("evaluation", False, TRUTH), ("training", True, MISTAKE)):
            moved[text] = (weight_change(model, ids, training), colour)
    figure, (left, middle, right) = canvas("ABC")
    for axes, (text, (first, second, colour)) in zip((left, middle), twice.items(), strict=True):
        against(axes, second, {text: (first, colour, "o")})
        name(axes, text, "logits, first pass", "logits, second pass")
    bars(right, moved)
    right.set_box_aspect(1)
    name(right, "weights, one step", "", "largest change")
    headline(figure, "In training the same input gives other outputs, and the weights move")
    return figure
