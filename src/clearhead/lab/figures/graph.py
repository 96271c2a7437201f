"""Attention as messages on a graph: an arrow for each weight, as thick as it is large."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead.drawing import BLACK, BLUE
from clearhead.lab.figures.style import SMALL, canvas, name
from clearhead.nn.attention import attend_reference

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_graph(*, seed: int = 0, width: int = 8, n_nodes: int = 6, share: float = 0.4) -> "Figure":
    """Left: without a mask everyone hears everyone. Right: with edges as the mask, the same queries and keys."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, n_nodes, width, generator=random, dtype=torch.float64)
    edges = torch.rand(n_nodes, n_nodes, generator=random) < share
    figure, (left, right) = canvas("AB")
    arrows(left, attend_reference(q, k, v)[1])
    arrows(right, attend_reference(q, k, v, edges)[1])
    name(left, "No mask: all hear all", "arrow: from speaker to hearer")
    name(right, "Edges as mask: any graph", "thick: large weight; ring: itself")
    return figure


def arrows(axes: "Axes", weights: Tensor) -> None:
    """Nodes on a circle; weights[i, j] goes from j to i. A node that hears itself has a ring."""
    n = len(weights)
    places = [(math.sin(2 * math.pi * i / n), math.cos(2 * math.pi * i / n)) for i in range(n)]
    for hearer, speaker in weights.nonzero().tolist():
        weight = weights[hearer, speaker].item()
        if hearer != speaker:
            tail, head = 0.05 + 0.4 * weight, 0.4 + 0.5 * weight
            arrow = {
                "arrowstyle": f"simple,tail_width={tail},head_width={head},head_length=0.7",
                "connectionstyle": "arc3,rad=0.12",
                "mutation_scale": 18,
                "linewidth": 0,
                "color": BLUE,
                "alpha": min(1.0, 0.4 + 0.6 * weight),
                "shrinkA": 15,
                "shrinkB": 17,
            }
            axes.annotate("", places[hearer], places[speaker], arrowprops=arrow)
    for node, (x, y) in enumerate(places):
        ring = weights[node, node].item()
        axes.plot(x, y, "o", markersize=30, color="white", markeredgecolor=BLACK, markeredgewidth=0.5 + 7 * ring)
        axes.annotate(str(node + 1), (x, y), ha="center", va="center", fontsize=SMALL)
    axes.set_aspect("equal")
    axes.set_xlim(-1.25, 1.25)
    axes.set_ylim(-1.25, 1.25)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
