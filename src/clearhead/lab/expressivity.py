"""What attention can represent: permutations, linear layers and convolutions for large beta, and message passing."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.drawing import BLACK, BLUE, GRAY, GREEN, ORANGE, PURPLE, VERMILION
from clearhead.lab.claim import Claim, Result, at_least, at_most
from clearhead.lab.constructions import (
    LARGE_BETA,
    OffsetAttention,
    convolution,
    identity,
    message_passing,
    permutation,
    pointwise,
)
from clearhead.lab.plots import (
    SMALL_SIZE,
    heat_maps,
    label,
    label_axes,
    rounding_band,
    set_headline,
    subplots,
)
from clearhead.nn.attention import attend_reference

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Errors = dict[str, Callable[[float], float]]
"""layer -> its largest error as a function of beta"""


FLOOR = 1e-17
"""lower limit of the error axis"""


TWO_TOKENS = "tokens 1, 3:"
"""label of the counterexample: self-attention over the tokens [1,0] and [3,0]"""


STYLES = {
    "conv2d": (VERMILION, "D"),
    "conv1d": (BLUE, "o"),
    "1x1": (GREEN, "s"),
    "permutation": (ORANGE, "^"),
    "identity": (PURPLE, "v"),
    TWO_TOKENS: (BLACK, "x"),
}


def max_abs(difference: Tensor) -> float:
    return difference.abs().max().item()


def simple_errors(seed: int, width: int, length: int) -> Errors:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(2, length, width, generator=random, dtype=torch.float64)
    weight = torch.randn(width, width, generator=random, dtype=torch.float64)
    order = torch.randperm(length, generator=random)
    return {
        "1x1": lambda beta: max_abs(pointwise(weight, None, length, beta)(x) - F.linear(x, weight)),
        "permutation": lambda beta: max_abs(permutation(x, order, beta) - x[:, order]),
        "identity": lambda beta: max_abs(identity(width, length, beta)(x) - x),
    }


def convolution_errors(seed: int, width: int, length: int, kernel_size: int) -> Errors:
    random = torch.Generator().manual_seed(seed)
    image_size = min(length, 6)
    sequence = torch.randn(2, width, length, generator=random, dtype=torch.float64)
    image = torch.randn(2, width, image_size, image_size, generator=random, dtype=torch.float64)
    kernel_1d = torch.randn(width, width, kernel_size, generator=random, dtype=torch.float64)
    kernel_2d = torch.randn(width, width, kernel_size, kernel_size, generator=random, dtype=torch.float64)

    def conv1d(beta: float) -> float:
        output = convolution(kernel_1d, None, (length,), beta)(sequence.mT).mT
        return max_abs(output - F.conv1d(sequence, kernel_1d, padding=kernel_size // 2))

    def conv2d(beta: float) -> float:
        output = convolution(kernel_2d, None, (image_size, image_size), beta)(image.flatten(2).mT).mT.unflatten(
            2, (image_size, image_size)
        )
        return max_abs(output - F.conv2d(image, kernel_2d, padding=kernel_size // 2))

    return {"conv2d": conv2d, "conv1d": conv1d}


@torch.no_grad()
def draw_errors(axes: "Axes", errors: Errors, beta: float) -> None:
    """Draws one line per layer on a logarithmic axis, and a vertical line at `beta`."""
    last = max(60.0, min(1.2 * beta, 200.0))
    betas = torch.linspace(0, last, 25).tolist()
    for start, (text, error) in enumerate(errors.items()):
        color, marker = STYLES[text]
        heights = [max(error(b), FLOOR) for b in betas]
        axes.plot(betas, heights, marker + "-", color=color, linewidth=2.5, markersize=9, markevery=(start, 5))
        axes.lines[-1].set_label("_" + text if text == TWO_TOKENS else text)  # labeled at the line, not in the legend
    axes.set_yscale("log")
    axes.set_ylim(FLOOR, 1e4)
    axes.set_yticks([1e0, 1e-4, 1e-8, 1e-12, 1e-16])
    rounding_band(axes, FLOOR)
    if 0 <= beta <= last:
        axes.axvline(beta, color=GRAY, linestyle="--", zorder=0)
    if len(errors) > 1:
        axes.legend(fontsize=SMALL_SIZE, loc="center right", bbox_to_anchor=(1.0, 0.55), framealpha=1)


def run_permutation(
    *, seed: int = 0, width: int = 8, num_tokens: int = 6, beta: float = LARGE_BETA, by_position: bool = True
) -> Result:
    """by_position=False uses the tokens themselves as queries and keys and relies on beta: the misconception."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(1, num_tokens, width, generator=random, dtype=torch.float64)
    order = torch.randperm(num_tokens, generator=random)
    two_tokens = torch.tensor([[1.0, 0.0], [3.0, 0.0]], dtype=torch.float64)
    with torch.no_grad():
        hard_output = attend_reference(two_tokens, two_tokens, two_tokens, beta=math.inf)[0]
        identity_output = (
            identity(width, num_tokens, beta)(x) if by_position else attend_reference(x, x, x, beta=beta)[0]
        )
        permuted_output = (
            permutation(x, order, beta) if by_position else attend_reference(x[:, order], x, x, beta=beta)[0]
        )
    return Result(
        (
            at_most("permutation: largest error", max_abs(permuted_output - x[:, order]), 1e-9),
            at_most("identity: largest error", max_abs(identity_output - x), 1e-9),
            at_most(
                "tokens [1,0] and [3,0], beta = inf: distance of both outputs from [3,0]",
                max_abs(hard_output - two_tokens[1]),
                0.0,
            ),
        )
    )


def draw_permutation(*, seed: int = 0, width: int = 8, num_tokens: int = 6, beta: float = LARGE_BETA) -> "Figure":
    """Left: the attention weights of a permutation. Right: the errors, and two tokens that both select the longer."""
    errors = simple_errors(seed, width, num_tokens)
    two_tokens = torch.tensor([[1.0, 0.0], [3.0, 0.0]], dtype=torch.float64)
    one_hot = torch.eye(num_tokens, dtype=torch.float64)
    order = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(seed))
    figure, (left, right) = subplots("AB", widths=(1, 1.2))
    heat_maps(figure, [left], [attend_reference(one_hot[order], one_hot, one_hot, beta=beta)[1]], "attention weight")
    label_axes(left, "One key for each query", "key token", "query token")
    draw_errors(
        right,
        {
            "permutation": errors["permutation"],
            "identity": errors["identity"],
            TWO_TOKENS: lambda b: max_abs(attend_reference(two_tokens, two_tokens, two_tokens, beta=b)[0] - two_tokens),
        },
        beta,
    )
    label(right, 3, 1.0, f"{TWO_TOKENS} both select 3", offset=(0, 14))
    label_axes(right, "Error against beta", "beta (1 / temperature)", "largest error")
    set_headline(figure, "Attention permutes its tokens if the argmax keys form a permutation")
    return figure


PERMUTATION = Claim(
    slug="permutation",
    kind="demonstration",
    lesson="What attention can compute",
    statement="Attention computes the identity or another permutation of its tokens if the argmax keys form that "
    "permutation; a large beta alone is not enough.",
    misconception="A large beta alone makes self-attention the identity.",
    formula="argmax_j q_i·k_j = order(i), W_V = W_O = I, beta large",
    run=run_permutation,
    figure=draw_permutation,
    try_next="clearhead lab permutation --beta 2",
)


def run_pointwise_convolution(*, seed: int = 0, width: int = 4, length: int = 6, beta: float = LARGE_BETA) -> Result:
    torch.manual_seed(seed)
    x, weight = torch.randn(2, length, width, dtype=torch.float64), torch.randn(width, width, dtype=torch.float64)
    error = (pointwise(weight, None, length, beta)(x) - F.linear(x, weight)).abs().max().item()
    uniform = pointwise(weight, None, length, beta=0.0)(x)
    return Result(
        (
            at_most("largest difference from a linear layer at each position", error, 1e-9),
            at_most(
                "beta = 0: largest difference between two positions",
                (uniform - uniform[:, :1]).abs().max().item(),
                1e-12,
            ),
        )
    )


def draw_pointwise_convolution(*, seed: int = 0, width: int = 4, length: int = 6, beta: float = LARGE_BETA) -> "Figure":
    """Left: the attention weights at beta = 0 and at a large beta. Right: the error against beta."""
    maps = [offset_weights(identity(width, length, b)) for b in (0.0, beta)]
    figure, (zero, large, right) = subplots("AC;BC", widths=(1, 2))
    heat_maps(figure, [zero, large], maps, "attention weight")
    for axes, b, x in ((zero, 0.0, ""), (large, beta, "key")):
        label_axes(axes, "", x, "query")
        axes.set_title(f"beta = {b:g}", fontsize=SMALL_SIZE)
    draw_errors(right, {"1x1": simple_errors(seed, width, length)["1x1"]}, beta)
    label_axes(right, "Difference from a linear layer", "beta (1 / temperature)", "largest error")
    set_headline(figure, "With beta large and A = I, attention is a linear layer at each position")
    return figure


@torch.no_grad()
def offset_weights(layer: OffsetAttention) -> Tensor:
    """The attention weights of the first head, which depend on positions only. (L,L)"""
    attention = layer.attention
    features = torch.zeros(1, len(layer.positions), layer.out_channels, dtype=layer.positions.dtype)
    tokens = torch.cat([features, layer.positions[None]], dim=-1)
    tokens = F.pad(tokens, (0, attention.q_proj.in_features - tokens.shape[-1]))
    q, k = attention.split_heads(attention.q_proj(tokens)), attention.split_heads(attention.k_proj(tokens))
    return attend_reference(q, k, k, layer.mask, attention.beta)[1][0, 0]


POINTWISE_CONVOLUTION = Claim(
    slug="pointwise-convolution",
    kind="demonstration",
    lesson="What attention can compute",
    statement="Attention whose weights are the identity matrix is a linear layer applied at each position: a 1×1 "
    "convolution.",
    misconception="With beta = 0, attention is a linear layer at each position. (In fact, all outputs are equal.)",
    formula="A = I:  H = W X",
    run=run_pointwise_convolution,
    figure=draw_pointwise_convolution,
    try_next="clearhead lab pointwise-convolution --beta 0",
)


def run_convolution(
    *,
    seed: int = 0,
    width: int = 3,
    length: int = 9,
    kernel_size: int = 3,
    beta: float = LARGE_BETA,
    border_mask: bool = True,
) -> Result:
    """border_mask=False: a head whose offset points beyond the border selects the nearest position."""
    torch.manual_seed(seed)

    def build(weight: Tensor, grid: tuple[int, ...]) -> OffsetAttention:
        attention = convolution(weight, None, grid, beta)
        if not border_mask:
            attention.mask = torch.ones_like(attention.mask)
        return attention

    sequence = torch.randn(2, width, length, dtype=torch.float64)
    weight = torch.randn(width, width, kernel_size, dtype=torch.float64)
    error_1d = (
        (build(weight, (length,))(sequence.mT).mT - F.conv1d(sequence, weight, padding=kernel_size // 2))
        .abs()
        .max()
        .item()
    )
    image_size = min(length, 6)
    image = torch.randn(2, width, image_size, image_size, dtype=torch.float64)
    weight = torch.randn(width, width, kernel_size, kernel_size, dtype=torch.float64)
    out = build(weight, (image_size, image_size))(image.flatten(2).mT).mT.unflatten(2, (image_size, image_size))
    error_2d = (out - F.conv2d(image, weight, padding=kernel_size // 2)).abs().max().item()
    return Result(
        (
            at_most("largest difference from conv1d", error_1d, 1e-9),
            at_most("largest difference from conv2d", error_2d, 1e-9),
        )
    )


def draw_convolution(
    *, seed: int = 0, width: int = 3, length: int = 9, kernel_size: int = 3, beta: float = LARGE_BETA
) -> "Figure":
    """The error of every construction against beta."""
    figure, (axes,) = subplots()
    draw_errors(axes, convolution_errors(seed, width, length, kernel_size) | simple_errors(seed, width, length), beta)
    label_axes(axes, "", "beta (1 / temperature)", "largest error")
    set_headline(figure, "With increasing beta, attention approaches each of these layers")
    return figure


CONVOLUTION = Claim(
    slug="convolution",
    kind="demonstration",
    lesson="What attention can compute",
    statement="Attention with one head per kernel offset, a mask at the border and a large beta computes any "
    "convolution of stride 1 with zero padding.",
    misconception="Attention cannot select neighbors by their position.",
    formula="score = -|y + offset - y'|² + const;  W_O W_V of a head = the kernel's weights at its offset;  a head "
    "beyond the border is masked and returns zeros",
    run=run_convolution,
    figure=draw_convolution,
    try_next="clearhead lab convolution --beta 2",
)


def run_message_passing(
    *, seed: int = 0, width: int = 8, num_nodes: int = 7, edge_probability: float = 0.4, mask_edges: bool = True
) -> Result:
    """mask_edges=False attends to all nodes instead of the neighbors."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, num_nodes, width, generator=random, dtype=torch.float64)
    edges = torch.rand(num_nodes, num_nodes, generator=random) < edge_probability
    edges[0] = False
    edges[0, 1] = True
    masked = attend_reference(q, k, v, edges if mask_edges else None, beta=1.0)[0]
    complete = attend_reference(q, k, v, beta=1.0)[0]
    return Result(
        (
            at_most(
                "complete graph: difference from message passing",
                (message_passing(v, q @ k.T) - complete).abs().max().item(),
                1e-12,
            ),
            at_most(
                "random graph: difference from message passing",
                (message_passing(v, q @ k.T, edges) - masked).abs().max().item(),
                1e-12,
            ),
            at_least("number of missing edges", int((~edges).sum()), 1),
        )
    )


def draw_message_passing(
    *, seed: int = 0, width: int = 8, num_nodes: int = 6, edge_probability: float = 0.4
) -> "Figure":
    """Left: attention without a mask. Right: the same queries and keys with the edges as the mask."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, num_nodes, width, generator=random, dtype=torch.float64)
    edges = torch.rand(num_nodes, num_nodes, generator=random) < edge_probability
    figure, (left, right) = subplots("AB")
    draw_graph(left, attend_reference(q, k, v)[1])
    draw_graph(right, attend_reference(q, k, v, edges)[1])
    label_axes(left, "No mask: complete graph", "arrow: from key to query")
    label_axes(right, "Edges as mask: any graph", "thick: large weight; outline: self-weight")
    set_headline(figure, "Attention passes messages along the edges of a graph")
    return figure


def draw_graph(axes: "Axes", weights: Tensor) -> None:
    """Nodes on a circle; the arrow from j to i is weights[i, j], the outline of node i is weights[i, i]."""
    n = len(weights)
    coordinates = [(math.sin(2 * math.pi * i / n), math.cos(2 * math.pi * i / n)) for i in range(n)]
    for query, key in weights.nonzero().tolist():
        weight = weights[query, key].item()
        if query != key:
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
            axes.annotate("", coordinates[query], coordinates[key], arrowprops=arrow)
    for node, (x, y) in enumerate(coordinates):
        self_weight = weights[node, node].item()
        axes.plot(x, y, "o", markersize=30, color="white", markeredgecolor=BLACK, markeredgewidth=0.5 + 7 * self_weight)
        axes.annotate(str(node + 1), (x, y), ha="center", va="center", fontsize=SMALL_SIZE)
    axes.set_aspect("equal")
    axes.set_xlim(-1.25, 1.25)
    axes.set_ylim(-1.25, 1.25)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


MESSAGE_PASSING = Claim(
    slug="message-passing",
    kind="demonstration",
    lesson="What attention can compute",
    statement="Attention is message passing on a complete graph; with the adjacency matrix as the mask, on any graph.",
    misconception="Attention and graph neural networks are unrelated.",
    formula="h_i = sum over edges (i,j) of softargmax_j(q_i·k_j) v_j",
    run=run_message_passing,
    figure=draw_message_passing,
    try_next="clearhead lab message-passing --edge-probability 0.1",
    minimum={"num_nodes": 2, "edge_probability": 0},
    maximum={"edge_probability": 1},
)
