"""Attention as a convolution: one head for each offset."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.drawing import BLACK, BLUE, GRAY, GREEN, ORANGE, PURPLE, VERMILION
from clearhead.lab.claim import Claim, Result, at_least, at_most, equals
from clearhead.lab.constructions import (
    SHARP,
    OffsetAttention,
    convolution,
    feedforward_as_convolutions,
    identity,
    message_passing,
    patches_as_convolution,
    permutation,
    pointwise,
)
from clearhead.lab.convolutions import inputs_seen
from clearhead.lab.plots import SMALL, canvas, headline, heat_maps, label, name_axis, rounding_band
from clearhead.nn.attention import MultiHeadAttention, attend_reference
from clearhead.nn.blocks import MLP
from clearhead.nn.patch_embed import PatchEmbed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def run_convolution(
    *, seed: int = 0, width: int = 3, length: int = 9, kernel: int = 3, beta: float = SHARP, border_mask: bool = True
) -> Result:
    """border_mask=False lets heads that look beyond the border look at the nearest place instead of at nothing."""
    torch.manual_seed(seed)

    def made(weight: Tensor, grid: tuple[int, ...]) -> OffsetAttention:
        attention = convolution(weight, None, grid, beta)
        if not border_mask:
            attention.mask = torch.ones_like(attention.mask)
        return attention

    line = torch.randn(2, width, length, dtype=torch.float64)
    weight = torch.randn(width, width, kernel, dtype=torch.float64)
    error_1d = (made(weight, (length,))(line.mT).mT - F.conv1d(line, weight, padding=kernel // 2)).abs().max().item()
    side = min(length, 6)
    image = torch.randn(2, width, side, side, dtype=torch.float64)
    weight = torch.randn(width, width, kernel, kernel, dtype=torch.float64)
    out = made(weight, (side, side))(image.flatten(2).mT).mT.unflatten(2, (side, side))
    error_2d = (out - F.conv2d(image, weight, padding=kernel // 2)).abs().max().item()
    return Result(
        (
            at_most("largest difference from conv1d", error_1d, 1e-9),
            at_most("largest difference from conv2d", error_2d, 1e-9),
        )
    )


def run_linear(*, seed: int = 0, width: int = 4, length: int = 6, beta: float = SHARP) -> Result:
    torch.manual_seed(seed)
    x, weight = torch.randn(2, length, width, dtype=torch.float64), torch.randn(width, width, dtype=torch.float64)
    error = (pointwise(weight, None, length, beta)(x) - F.linear(x, weight)).abs().max().item()
    flat = pointwise(weight, None, length, beta=0.0)(x)
    return Result(
        (
            at_most("largest difference from a linear layer at each place", error, 1e-9),
            at_most("beta 0: largest difference between two places", (flat - flat[:, :1]).abs().max().item(), 1e-12),
        )
    )


CONVOLUTION = Claim(
    slug="convolution",
    kind="demonstration",
    rows=("R4.11", "R4.7"),
    lesson="What attention can compute",
    statement="One head per offset, none beyond the border, beta large: attention is any convolution of stride 1.",
    mistake="Attention cannot look at neighbours by their place.",
    formula="score = -|y + offset - y'|² + const;  W_O W_V of a head = the kernel's tap;  zero padding",
    run=run_convolution,
    try_next="clearhead lab convolution --beta 2",
)

RUNNING_LINEAR = Claim(
    slug="running-linear",
    kind="demonstration",
    rows=("R4.10",),
    lesson="What attention can compute",
    statement="Attention whose weights are the identity is a linear layer run along the sequence: a 1x1 convolution.",
    mistake="beta = 0 makes it one (that gives every place the same mean).",
    formula="A = I:  H = W X",
    run=run_linear,
    try_next="clearhead lab running-linear --beta 0",
)


# Layers under other names: feed-forward and patches as convolutions, attention as message passing on a graph.


def run_feedforward(*, seed: int = 0, width: int = 8, n_tokens: int = 5, attention: bool = False) -> Result:
    """attention asks of attention what holds of the feed-forward net: the mistake that places are mixed."""
    torch.manual_seed(seed)
    net, x = MLP(width, 4 * width).double(), torch.randn(2, n_tokens, width, dtype=torch.float64)
    layer = MultiHeadAttention(width, 1).double() if attention else net
    with torch.no_grad():
        convolved = feedforward_as_convolutions(net)(x.mT).mT
        error = (convolved - layer(x)).abs().max().item()
    return Result(
        (
            at_most("difference from two 1x1 convolutions", error, 1e-12),
            equals("places that the answer at one place depends on", inputs_seen(layer, x[:1]), 1, 0),
        )
    )


def run_patches(*, seed: int = 0, width: int = 8, patch: int = 4, side: int = 3, stride: int = 0) -> Result:
    """stride is the patch size unless given."""
    torch.manual_seed(seed)
    tokens, images = PatchEmbed(3, width, patch).double(), torch.randn(2, 3, side * patch, side * patch).double()
    conv = patches_as_convolution(tokens)
    conv.stride = (stride or patch, stride or patch)
    with torch.no_grad():
        convolved = conv(images).flatten(2).mT
        cut = tokens(images)
    error = (convolved - cut).abs().max().item() if convolved.shape == cut.shape else float("inf")
    return Result((at_most("difference of cut and projected patches from the convolution", error, 1e-12),))


def run_graph(
    *, seed: int = 0, width: int = 8, n_nodes: int = 7, share: float = 0.4, mask_edges: bool = True
) -> Result:
    """share of the edges of a random graph; mask_edges=False attends to all nodes instead."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, n_nodes, width, generator=random, dtype=torch.float64)
    edges = torch.rand(n_nodes, n_nodes, generator=random) < share
    edges[0] = False
    edges[0, 1] = True
    masked = attend_reference(q, k, v, edges if mask_edges else None, beta=1.0)[0]
    complete = attend_reference(q, k, v, beta=1.0)[0]
    return Result(
        (
            at_most(
                "difference on the complete graph", (message_passing(v, q @ k.T) - complete).abs().max().item(), 1e-12
            ),
            at_most(
                "difference on a random graph", (message_passing(v, q @ k.T, edges) - masked).abs().max().item(), 1e-12
            ),
            at_least("edges that the graph lacks", int((~edges).sum()), 1),
        )
    )


FEEDFORWARD = Claim(
    slug="feed-forward",
    kind="demonstration",
    rows=("R4.13",),
    lesson="Blocks: feed-forward, norm, skip connections",
    statement="The feed-forward net is the same at each position: two 1x1 convolutions with an activation between.",
    mistake="It mixes positions.",
    formula="max(0, x W_1 + b_1) W_2 + b_2 = conv_1x1(max(0, conv_1x1(x)))",
    run=run_feedforward,
    try_next="clearhead lab feed-forward --attention true",
    least={"n_tokens": 2},
)

PATCHES = Claim(
    slug="patches",
    kind="demonstration",
    rows=("R4.15",),
    lesson="Images and convolutions",
    statement="Cutting an image into patches and projecting them is a convolution whose stride is its kernel's size.",
    mistake="A vision transformer has no convolution.",
    formula="unfold(image) W = conv(image, W, stride = patch)",
    run=run_patches,
    try_next="clearhead lab patches --stride 2",
)

GRAPH = Claim(
    slug="graph",
    kind="demonstration",
    rows=("R3.4",),
    lesson="What attention can compute",
    statement="Attention passes messages on a fully connected graph; with the edges as mask, on any graph.",
    mistake="Attention and graph networks are different things.",
    formula="h_i = sum over edges (i,j) of softargmax_j(q_i·k_j) v_j",
    run=run_graph,
    try_next="clearhead lab graph --share 0.1",
    least={"n_nodes": 2, "share": 0},
    most={"share": 1},
)


# What attention can compute: how close it comes to other layers as beta grows, and messages on a graph.


Errors = dict[str, Callable[[float], float]]
"""what is imitated -> its largest error at a beta"""
FLOOR = 1e-17
BOTH = "tokens 1, 3:"
LOOKS = {
    "conv2d": (VERMILION, "D"),
    "conv1d": (BLUE, "o"),
    "1x1": (GREEN, "s"),
    "permutation": (ORANGE, "^"),
    "identity": (PURPLE, "v"),
    BOTH: (BLACK, "x"),
}


def largest(difference: Tensor) -> float:
    return difference.abs().max().item()


def simple_errors(seed: int, width: int, length: int) -> Errors:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(2, length, width, generator=random, dtype=torch.float64)
    weight = torch.randn(width, width, generator=random, dtype=torch.float64)
    order = torch.randperm(length, generator=random)
    return {
        "1x1": lambda beta: largest(pointwise(weight, None, length, beta)(x) - F.linear(x, weight)),
        "permutation": lambda beta: largest(permutation(x, order, beta) - x[:, order]),
        "identity": lambda beta: largest(identity(width, length, beta)(x) - x),
    }


def convolution_errors(seed: int, width: int, length: int, kernel: int) -> Errors:
    random = torch.Generator().manual_seed(seed)
    side = min(length, 6)
    line = torch.randn(2, width, length, generator=random, dtype=torch.float64)
    image = torch.randn(2, width, side, side, generator=random, dtype=torch.float64)
    along = torch.randn(width, width, kernel, generator=random, dtype=torch.float64)
    across = torch.randn(width, width, kernel, kernel, generator=random, dtype=torch.float64)

    def conv1d(beta: float) -> float:
        made = convolution(along, None, (length,), beta)(line.mT).mT
        return largest(made - F.conv1d(line, along, padding=kernel // 2))

    def conv2d(beta: float) -> float:
        made = convolution(across, None, (side, side), beta)(image.flatten(2).mT).mT.unflatten(2, (side, side))
        return largest(made - F.conv2d(image, across, padding=kernel // 2))

    return {"conv2d": conv2d, "conv1d": conv1d}


@torch.no_grad()
def draw_errors(axes: "Axes", errors: Errors, beta: float) -> None:
    """One line for each imitation, on a logarithmic axis, with a mark at `beta`."""
    last = max(60.0, min(1.2 * beta, 200.0))
    betas = torch.linspace(0, last, 25).tolist()
    for turn, (text, error) in enumerate(errors.items()):
        colour, marker = LOOKS[text]
        with torch.random.fork_rng(devices=[]):  # a layer is born with random weights, before ours are filled in
            heights = [max(error(b), FLOOR) for b in betas]
        axes.plot(betas, heights, marker + "-", color=colour, linewidth=2.5, markersize=9, markevery=(turn, 5))
        axes.lines[-1].set_label("_" + text if text == BOTH else text)  # it is named beside its line
    axes.set_yscale("log")
    axes.set_ylim(FLOOR, 1e4)
    axes.set_yticks([1e0, 1e-4, 1e-8, 1e-12, 1e-16])
    rounding_band(axes, FLOOR)
    if 0 <= beta <= last:
        axes.axvline(beta, color=GRAY, linestyle="--", zorder=0)
    if len(errors) > 1:
        axes.legend(fontsize=SMALL, loc="center right", bbox_to_anchor=(1.0, 0.55), framealpha=1)


def draw_convolution(
    *, seed: int = 0, width: int = 3, length: int = 9, kernel: int = 3, beta: float = SHARP
) -> "Figure":
    """The error of every construction against beta."""
    figure, (axes,) = canvas()
    draw_errors(axes, convolution_errors(seed, width, length, kernel) | simple_errors(seed, width, length), beta)
    name_axis(axes, "", "beta (1 / temperature)", "largest error")
    headline(figure, "The larger beta, the closer attention comes to each of these layers")
    return figure


def draw_permutation(*, seed: int = 0, width: int = 8, n_tokens: int = 6, beta: float = SHARP) -> "Figure":
    """The weights that permute; and two tokens for which a large beta is not enough, since both choose the longer."""
    errors = simple_errors(seed, width, n_tokens)
    both = torch.tensor([[1.0, 0.0], [3.0, 0.0]], dtype=torch.float64)
    places = torch.eye(n_tokens, dtype=torch.float64)
    order = torch.randperm(n_tokens, generator=torch.Generator().manual_seed(seed))
    figure, (left, right) = canvas("AB", widths=(1, 1.2))
    heat_maps(figure, [left], [attend_reference(places[order], places, places, beta=beta)[1]], "attention weight")
    name_axis(left, "One key for each query", "key token", "query token")
    draw_errors(
        right,
        {
            "permutation": errors["permutation"],
            "identity": errors["identity"],
            BOTH: lambda b: largest(attend_reference(both, both, both, beta=b)[0] - both),
        },
        beta,
    )
    label(right, 3, 1.0, f"{BOTH} both choose 3", offset=(0, 14))
    name_axis(right, "Error of the imitation", "beta (1 / temperature)", "largest error")
    headline(figure, "Attention permutes if the best keys do; a large beta alone is not enough")
    return figure


def draw_running_linear(*, seed: int = 0, width: int = 4, length: int = 6, beta: float = SHARP) -> "Figure":
    """The weights at beta = 0, where every place gets the mean, and at a large beta; and the error between."""
    with torch.random.fork_rng(devices=[]):
        maps = [offset_weights(identity(width, length, b)) for b in (0.0, beta)]
    figure, (zero, large, right) = canvas("AC;BC", widths=(1, 2))
    heat_maps(figure, [zero, large], maps, "attention weight")
    for axes, b, x in ((zero, 0.0, ""), (large, beta, "key")):
        name_axis(axes, "", x, "query")
        axes.set_title(f"beta = {b:g}", fontsize=SMALL)
    draw_errors(right, {"1x1": simple_errors(seed, width, length)["1x1"]}, beta)
    name_axis(right, "Difference from a linear layer", "beta (1 / temperature)", "largest error")
    headline(figure, "With a large beta, attention can be a linear layer at each position")
    return figure


@torch.no_grad()
def offset_weights(layer: OffsetAttention) -> Tensor:
    """The weights of its first head, among tokens whose features are zero: its scores look at places alone. (L,L)"""
    attention = layer.attention
    features = torch.zeros(1, len(layer.places), layer.n_out, dtype=layer.places.dtype)
    tokens = torch.cat([features, layer.places[None]], dim=-1)
    tokens = F.pad(tokens, (0, attention.q_proj.in_features - tokens.shape[-1]))
    q, k = attention.split_heads(attention.q_proj(tokens)), attention.split_heads(attention.k_proj(tokens))
    return attend_reference(q, k, k, layer.mask, attention.beta)[1][0, 0]


def draw_graph(*, seed: int = 0, width: int = 8, n_nodes: int = 6, share: float = 0.4) -> "Figure":
    """Left: without a mask everyone hears everyone. Right: with edges as the mask, the same queries and keys."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, n_nodes, width, generator=random, dtype=torch.float64)
    edges = torch.rand(n_nodes, n_nodes, generator=random) < share
    figure, (left, right) = canvas("AB")
    arrows(left, attend_reference(q, k, v)[1])
    arrows(right, attend_reference(q, k, v, edges)[1])
    name_axis(left, "No mask: complete graph", "arrow: from key to query")
    name_axis(right, "Edges as mask: any graph", "thick: large weight; ring: to itself")
    headline(figure, "Attention passes messages along the edges of a graph")
    return figure


def arrows(axes: "Axes", weights: Tensor) -> None:
    """Nodes on a circle; weights[i, j] goes from j to i. The ring of a node is its weight on itself."""
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
