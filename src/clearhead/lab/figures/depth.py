"""Gradients and depth: with and without skip connections, with the norm before and after the sublayer."""

from typing import TYPE_CHECKING

import torch

from clearhead.drawing import BLUE, VERMILION
from clearhead.lab.depth import first_gradient
from clearhead.lab.figures.style import MISTAKE, TRUTH, canvas, label, name
from clearhead.lab.normalisation import gradients

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWS = 4
"""stacks of random weights that a gradient is the mean of"""


def draw_skip_connections(*, seed: int = 0, width: int = 32, depth: int = 48) -> "Figure":
    """The gradient that reaches the first layer, against the number of layers, in units of that of one layer."""
    depths = sorted({1, 2, *(round(depth * step / 8) for step in range(1, 9))} - {0})
    figure, (axes,) = canvas()
    for has_skip, colour, text in ((True, TRUTH, "x + f(x)"), (False, MISTAKE, "f(x) alone")):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            heights = [first_gradient(n, width, has_skip) for n in depths]
        heights = [height / heights[0] for height in heights]
        axes.plot(depths, heights, "o-", color=colour, linewidth=3, markersize=8)
        label(axes, depths[-1], heights[-1], text, colour, offset=(10, -5))
    axes.set_yscale("log")
    axes.set_xlim(0, depths[-1] * 1.2)
    name(
        axes,
        "With skip connections the gradient reaches the first layer",
        "number of layers",
        "gradient at the input\n(1 = that of one layer)",
    )
    return figure


def draw_pre_norm(*, seed: int = 0, width: int = 32, depth: int = 24) -> "Figure":
    """Left: the last block's gradient against depth. Right: the gradient at each block of one depth."""
    depths = sorted({max(1, depth // share) for share in (8, 4, 2, 1)})
    figure, (left, right) = canvas("AB")
    for norm, colour in (("post", VERMILION), ("pre", BLUE)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            all_blocks = [torch.tensor([gradients(norm, n, width) for _ in range(DRAWS)]).mean(0) for n in depths]
        last = [blocks[-1].item() for blocks in all_blocks]
        left.plot(depths, last, "o-", color=colour, linewidth=3, markersize=8)
        label(left, depths[-1], last[-1], f"{norm}-norm", colour, offset=(10, -5))
        right.plot(range(1, depths[-1] + 1), all_blocks[-1], "o-", color=colour, linewidth=3, markersize=6)
        label(right, depths[-1], all_blocks[-1][-1].item(), f"{norm}-norm", colour, offset=(10, -5))
        for axes, heights in ((left, last), (right, all_blocks[-1].tolist())):
            axes.set_ylim(0, 1.2 * max(axes.get_ylim()[1] / 1.2, *heights))
            axes.set_xlim(0, 1.45 * depths[-1])
            axes.locator_params(nbins=6)
    name(left, "Gradient at the last block", "number of blocks", "norm at its input")
    name(right, f"At each of {depths[-1]} blocks", "block", "norm at its input")
    return figure
