"""The parts of a block: the feed-forward network, layer norm, skip connections, and where the norm stands."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from clearhead.drawing import BLACK, BLUE, VERMILION
from clearhead.lab.claim import Curve, Result
from clearhead.lab.constructions import feedforward_as_convolutions
from clearhead.lab.depth import first_gradient
from clearhead.lab.figures.style import (
    MISTAKE,
    TEXT,
    TRUTH,
    against,
    canvas,
    headline,
    heat_maps,
    key_below,
    name,
)
from clearhead.lab.normalisation import gradients
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.feedforward import FeedForward

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAWS = 4
"""stacks of random weights that a gradient is the mean of"""


def influences(layer: nn.Module, x: Tensor) -> Tensor:
    """Norm of the Jacobian of each output token to each input token, in units of the largest. x (1,L,E) -> (L,L)"""
    jacobian = torch.autograd.functional.jacobian(lambda tokens: layer(tokens)[0], x)  # (L,E,1,L,E)
    norms = jacobian[:, :, 0].square().sum(dim=(1, 3)).sqrt()
    return norms / norms.max()


def draw_feed_forward(*, seed: int = 0, width: int = 8, n_tokens: int = 5) -> "Figure":
    """Left: which input reaches which output, beside attention. Right: the network, and two 1x1 convolutions."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = FeedForward(width, 4 * width).double()
        x = torch.randn(2, n_tokens, width, dtype=torch.float64)
        attention = MultiHeadAttention(width, 1).double()
        with torch.no_grad():
            convolved, answer = feedforward_as_convolutions(net)(x.mT).mT, net(x)
    figure, (alone, mixed, scatter) = canvas("AC;BC", widths=(1, 1.5))
    heat_maps(figure, [alone, mixed], [influences(net, x[:1]), influences(attention, x[:1])], "influence")
    name(alone, "feed-forward", "", "output")
    name(mixed, "attention", "input token", "output")
    against(scatter, answer, {"two 1 × 1 convolutions": (convolved, TRUTH, "o")})
    name(scatter, "Outputs of both", "two 1 × 1 convolutions", "feed-forward")
    headline(figure, "The feed-forward network treats each token alone: two 1 × 1 convolutions")
    return figure


@torch.no_grad()
def draw_layer_norm(*, seed: int = 0, width: int = 16, n_tokens: int = 5) -> "Figure":
    """One token in two batches whose other tokens differ: layer norm, and batch norm in training and in evaluation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        x = torch.randn(4, n_tokens, width, dtype=torch.float64)
        others = 10 * torch.randn_like(x)
    others[0, 0] = x[0, 0]
    layer, batch, tested = nn.LayerNorm(width).double(), nn.BatchNorm1d(width).double(), nn.BatchNorm1d(width).double()
    tested(x.mT)  # its running statistics have seen a batch
    tested.eval()
    cases = {
        "layer norm": (layer(x), layer(others), TRUTH),
        "batch norm, training": (batch(x.mT).mT, batch(others.mT).mT, MISTAKE),
        "batch norm, evaluation": (tested(x.mT).mT, tested(others.mT).mT, TRUTH),
    }
    figure, all_axes = canvas("ABC")
    for axes, (title, (before, after, colour)) in zip(all_axes, cases.items(), strict=True):
        against(axes, after[0, 0], {title: (before[0, 0], colour, "o")})
        moved = (after - before)[0, 0].abs().max().item()
        name(axes, f"{title}:\nmoves by {moved:.2g}", "output in batch 1")
    all_axes[0].set_ylabel("output in batch 2", fontsize=TEXT)
    headline(figure, "Layer norm of a token does not depend on the other tokens of the batch")
    return figure


def draw_skip_connections(*, seed: int = 0, width: int = 32, depth: int = 48, result: Result | None = None) -> "Figure":
    """The gradient that reaches the first layer, against depth; with the result, for each initialisation too."""
    curves = result.curves if result else ()
    depths = sorted({1, 2, *(round(depth * step / 8) for step in range(1, 9))} - {0})
    figure, (axes, *others) = canvas("AB" if curves else "A")
    for has_skip, colour, text in ((False, MISTAKE, "f(x) alone"), (True, TRUTH, "x + f(x)")):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            heights = [first_gradient(n, width, has_skip) for n in depths]
        heights = [height / heights[0] for height in heights]
        axes.plot(depths, heights, "o-", color=colour, linewidth=3, markersize=8, label=text)
    axes.set_yscale("log")
    name(axes, "Xavier + GELU", "number of layers", "gradient norm at the input\n(1 = that of one layer)")
    for right in others:
        draw_initialisations(right, curves)
    key_below(figure, axes)
    headline(figure, "With skip connections the gradient reaches the first layer")
    return figure


def draw_initialisations(axes: "Axes", curves: Sequence[Curve]) -> None:
    """A pair of bars for each initialisation: the gradient that is left with skip connections, and without."""
    names = list(dict.fromkeys(curve.name.rpartition(", ")[0] for curve in curves))
    for kind, colour, side in (("without skips", MISTAKE, 0.2), ("with skips", TRUTH, -0.2)):
        heights = [curve.y[0] for text in names for curve in curves if curve.name == f"{text}, {kind}"]
        axes.bar([place + side for place in range(len(names))], heights, 0.4, color=colour)
    axes.set_yscale("log")
    axes.axhline(1, color=BLACK, linestyle="--")
    axes.set_xticks(range(len(names)), labels=[text.replace(" + ", "\n+ ") for text in names])
    axes.grid(axis="x", visible=False)
    depth = curves[0].x[0]
    name(
        axes, f"{depth:g} layers", "initialisation and activation", "gradient norm at the input\n(1 = that of 2 layers)"
    )


def draw_pre_norm(*, seed: int = 0, width: int = 32, depth: int = 24) -> "Figure":
    """Left: the last block's gradient against depth, beside 1/sqrt(depth). Right: that of each block of one depth."""
    depths = sorted({max(1, round(depth / share)) for share in (depth, 12, 6, 3, 1.5, 1)})
    figure, (left, right) = canvas("AB", same_y=True)
    for norm, colour, marker in (("post", VERMILION, "s"), ("pre", BLUE, "o")):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            found = [torch.tensor([gradients(norm, n, width) for _ in range(DRAWS)]).mean(0) for n in depths]
        look: dict[str, Any] = {"color": colour, "linewidth": 3, "label": f"{norm}-norm"}
        left.plot(depths, [blocks[-1] / found[0][0] for blocks in found], f"{marker}-", markersize=8, **look)
        right.plot(range(1, depths[-1] + 1), found[-1] / found[0][0], f"{marker}-", markersize=6, **look)
    left.plot(depths, [n**-0.5 for n in depths], "--", color=BLACK, linewidth=2, label="1 / sqrt(depth)")
    left.set_xscale("log", base=2)
    left.set_xticks(depths, labels=[str(n) for n in depths])
    left.set_yscale("log")
    ticks = [0.1, 0.2, 0.5, 1, 2, 5]
    left.set_yticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    left.set_ylim(min(0.1, 0.8 * depths[-1] ** -0.5), 3)
    name(
        left,
        "Last block, by depth",
        "depth (number of blocks)",
        "gradient norm at its input\n(1 = that of a single block)",
    )
    name(right, f"Each block of a stack of {depths[-1]}", "block (1 = first)")
    key_below(figure, left)
    headline(figure, "Untrained: pre-norm shrinks the last block's gradient, post-norm does not")
    return figure
