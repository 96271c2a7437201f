"""Masks by large negative numbers, and what they get wrong."""

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from clearhead.drawing import BLACK, BLUE, GREEN, VERMILION
from clearhead.lab.claim import Claim, Result, above, at_least, at_most
from clearhead.lab.plots import TRUTH, canvas, headline, label, name_axis, two_colours
from clearhead.nn import masks
from clearhead.nn.attention import attend_reference

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run_additive_mask(*, seed: int = 0, width: int = 8, n_tokens: int = 6, low: float = -10_000.0) -> Result:
    """Adding `low` to the scores, before they are scaled, against a mask; low = -10 is the mistake made visible."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, n_tokens, width, generator=random)
    mask = masks.causal(n_tokens)
    beta = width**-0.5

    def added(number: float) -> Tensor:
        return attend_reference(q, k, v, logit_bias=beta * masks.to_additive(mask, number))[1]

    logits = beta * (q @ k.T + masks.to_additive(mask, low))
    by_mask = attend_reference(q, k, v, mask)[1]
    return Result(
        (
            at_most("weight that reaches a hidden key", added(low)[~mask].max().item(), 0.0),
            at_most("difference of all weights from a mask's", (added(low) - by_mask).abs().max().item(), 1e-6),
            above(
                "logarithm of that weight (with a mask: -inf)", logits.log_softmax(-1)[~mask].max().item(), -math.inf
            ),
            at_least("weight that reaches a hidden key with -10 instead", added(-10.0)[~mask].max().item(), 1e-8),
        )
    )


def run_row(*, seed: int = 0, width: int = 8, n_tokens: int = 6, low: float = -1e14, by_mask: bool = False) -> Result:
    """by_mask hides the row by a mask instead, and asks of it what holds of the number: the mistake."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, n_tokens, width, generator=random)
    nobody = torch.zeros(n_tokens, n_tokens, dtype=torch.bool)
    masked = attend_reference(q, k, v, nobody)[1]
    hidden = masked if by_mask else attend_reference(q, k, v, logit_bias=masks.to_additive(nobody, low))[1]
    return Result(
        (
            at_most("distance of its weights from 1/n each", (hidden - 1 / n_tokens).abs().max().item(), 1e-6),
            at_most("weight that a mask leaves it", masked.abs().max().item(), 0.0),
        )
    )


ADDITIVE = Claim(
    slug="additive-mask",
    kind="demonstration",
    rows=("R0.3",),
    lesson="Masks, training and testing",
    statement="-10000 added before the scale hides a key only because e^(-10000/sqrt d) underflows to 0; -10 leaks.",
    mistake="Any large negative number is a mask.",
    formula="e^(beta (z - 10000)) = 0 in floating point, e^(beta (z - 10)) is not",
    run=run_additive_mask,
    try_next="clearhead lab additive-mask --low -10",
    least={"n_tokens": 2},
)

HIDDEN_ROW = Claim(
    slug="hidden-row",
    kind="demonstration",
    rows=("R0.3",),
    lesson="Masks, training and testing",
    statement="A row hidden everywhere by -1e14 becomes uniform over what it may not see; a mask gives zeros.",
    mistake="Such a row is ignored.",
    formula="z - 1e14 = -1e14 in float32, whatever z; and softargmax of equal numbers is 1/n",
    run=run_row,
    try_next="clearhead lab additive-mask",
)


# Large negative numbers in the place of a mask: what leaks through, and a row that may see nothing.


UNDERFLOW = 1e-46
"""where 0 is drawn: below the smallest number of float32"""


def draw_additive_mask(*, seed: int = 0, width: int = 8, n_tokens: int = 5, low: float = -10_000.0) -> "Figure":
    """Left: the causal mask as numbers that are added to the scores. Right: what leaks through, against the number."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, n_tokens, width, generator=random)
    causal = masks.causal(n_tokens).dense()
    beta = width**-0.5

    def leaked(number: float) -> float:
        """The largest weight of a hidden key when this number is added before the scores are scaled."""
        weights = attend_reference(q, k, v, logit_bias=beta * masks.to_additive(causal, number))[1]
        return weights[~causal].max().item() if n_tokens > 1 else 0.0

    figure, (left, right) = canvas("AB", widths=(1.25, 1))
    texts = [[f"{number:g}" for number in row] for row in masks.to_additive(causal, low).tolist()]
    two_colours(left, causal, texts)
    name_axis(left, "Causal mask, as numbers to add", "key token", "query token")
    numbers = [-(10 ** (power / 8)) for power in range(49)]
    leaks = [leaked(number) for number in numbers]
    seen = [(-number, leak) for number, leak in zip(numbers, leaks, strict=True) if leak > UNDERFLOW]
    right.plot(*zip(*seen, strict=True), color=TRUTH, linewidth=3)
    marks = {-10.0: VERMILION, low: GREEN}
    for number, colour in marks.items():
        if number < 0:
            right.plot(-number, max(leaked(number), UNDERFLOW), "o", color=colour, markersize=12)
            text = f"{number:g}: {leaked(number):.2g}"
            side: Literal["left", "right"] = "left" if number > -300 else "right"
            label(
                right,
                -number,
                max(leaked(number), UNDERFLOW),
                text,
                colour,
                offset=(10 if side == "left" else -10, 8),
                ha=side,
            )
    right.set(xscale="log", yscale="log", ylim=(UNDERFLOW / 10, 30))
    right.set_yticks(
        [1e0, 1e-10, 1e-20, 1e-30, 1e-40, UNDERFLOW], labels=["1", *(f"$10^{{-{n}}}$" for n in (10, 20, 30, 40)), "0"]
    )
    name_axis(right, "Weight that reaches a hidden key", "size of the negative number", "largest attention weight")
    headline(figure, "A negative number hides a key only if its exponential underflows to 0")
    return figure


def draw_hidden_row(*, seed: int = 0, width: int = 8, n_tokens: int = 6, low: float = -1e14) -> "Figure":
    """The weights of a query that may see nothing: before, with a large negative number, with a mask."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, n_tokens, width, generator=random)
    nobody = torch.zeros(n_tokens, n_tokens, dtype=torch.bool)
    cases = {
        "nothing hidden": (attend_reference(q, k, v)[1], GREEN),
        f"{low:g} added": (attend_reference(q, k, v, logit_bias=masks.to_additive(nobody, low))[1], VERMILION),
        "Boolean mask": (attend_reference(q, k, v, nobody)[1], BLUE),
    }
    figure, all_axes = canvas("ABC", same_y=True)
    for axes, (title, (weights, colour)) in zip(all_axes, cases.items(), strict=True):
        axes.bar(range(1, n_tokens + 1), weights[0].tolist(), color=colour)
        axes.axhline(1 / n_tokens, color=BLACK, linestyle="--")
        axes.grid(axis="x", visible=False)
        axes.set_xticks(range(1, n_tokens + 1, -(-n_tokens // 8)))
        name_axis(axes, title, "key")
        label(axes, 0.98, 0.98, f"sum {weights[0].sum():.2g}", colour, xycoords="axes fraction", ha="right", va="top")
    top = max(float(weights[0].max()) for weights, _ in cases.values())
    all_axes[0].set_ylim(0, 1.2 * top)
    name_axis(all_axes[0], "nothing hidden", "key", "attention weight")
    all_axes[0].locator_params(axis="y", nbins=5)
    label(all_axes[2], 0.03, 1 / n_tokens, "1/n", xycoords=("axes fraction", "data"), offset=(0, 4))
    headline(figure, "When every key is hidden, a large negative number gives equal weights")
    return figure
