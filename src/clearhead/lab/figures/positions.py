"""What tells tokens where they stand: tables that are added, and what happens inside attention."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead.drawing import BLACK, BLUE, GREEN, ORANGE, VERMILION
from clearhead.lab.figures.style import SMALL, canvas, heat_maps, label
from clearhead.nn.positions import LearnedPositions, sinusoidal
from clearhead.nn.rotary import alibi, rotary_angles, rotate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def similarity(table: Tensor) -> Tensor:
    """The cosine of each two rows. (L,E) -> (L,L)"""
    rows = table / table.norm(dim=-1, keepdim=True)
    return rows @ rows.T


N_PLACES, N_HEADS = 64, 4


def draw_positions(*, seed: int = 0, width: int = 64) -> "Figure":
    """Left: two tables that are added. Middle: how alike their rows are. Right: what happens inside attention."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        learned = LearnedPositions(N_PLACES, width).table.detach()
    waves = sinusoidal(torch.arange(N_PLACES), width)
    figure, (fixed, fixed_alike, start, start_alike, turned, lowered) = canvas("ABE;CDF", widths=(1, 1, 1.2))
    heat_maps(figure, [fixed], [waves], "")
    heat_maps(figure, [start], [learned], "")
    heat_maps(figure, [fixed_alike, start_alike], [similarity(waves), similarity(learned)], "")
    titles = {
        fixed: "sinusoidal",
        fixed_alike: "cosine of rows",
        start: "learned, at start",
        start_alike: "cosine of rows",
    }
    for axes, title in titles.items():
        axes.set_title(title, fontsize=SMALL)
        across = width if axes in (fixed, start) else N_PLACES
        axes.set_xticks([0, across - 1], labels=["0", str(across - 1)])
        axes.set_yticks([0, N_PLACES - 1], labels=["0", str(N_PLACES - 1)])
        axes.set_xlabel("column" if axes in (fixed, start) else "place", fontsize=SMALL, labelpad=-14)
        axes.set_ylabel("place", fontsize=SMALL, labelpad=-18)
    draw_rotary(turned, width)
    draw_alibi(lowered)
    return figure


def draw_rotary(axes: "Axes", width: int) -> None:
    """q·k of one vector with itself at each distance, for queries at two places: the place itself does not matter."""
    turned = rotate(torch.ones(N_PLACES, width), rotary_angles(torch.arange(N_PLACES), width))
    later = N_PLACES // 4
    axes.plot(range(N_PLACES), turned @ turned[0] / width, color=BLUE, linewidth=3)
    axes.plot(range(0, N_PLACES - later, 4), (turned @ turned[later] / width)[later::4], "o", color=VERMILION)
    label(axes, 0.97, 0.95, f"dots: query at {later}", VERMILION, xycoords="axes fraction", ha="right", va="top")
    axes.set_title("rotary", fontsize=SMALL)
    axes.set_xlabel("distance (places)", fontsize=SMALL)
    axes.set_ylabel("score", fontsize=SMALL)


def draw_alibi(axes: "Axes") -> None:
    """The bias of each head against distance."""
    biases = alibi(N_HEADS, N_PLACES, N_PLACES)[:, 0]
    for head in range(N_HEADS):
        axes.plot(range(N_PLACES), biases[head], color=(BLUE, GREEN, ORANGE, BLACK)[head % 4], linewidth=3)
    label(axes, N_PLACES / 2, biases[0, N_PLACES // 2].item(), "head 1", BLUE, offset=(-10, -14), ha="right")
    axes.set_title(f"ALiBi, {N_HEADS} heads", fontsize=SMALL)
    axes.set_xlabel("distance (places)", fontsize=SMALL)
    axes.set_ylabel("bias", fontsize=SMALL)
