"""The components of a block: feed-forward network, skip connections, layer norm and its placement."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.drawing import BLACK, BLUE, VERMILION
from clearhead.lab.claim import Claim, Curve, Result, at_least, at_most, equals, within
from clearhead.lab.constructions import feedforward_as_convolutions
from clearhead.lab.convolutions import receptive_field
from clearhead.lab.plots import (
    CORRECT,
    MISCONCEPTION,
    TEXT_SIZE,
    heat_maps,
    label_axes,
    legend_below,
    scatter_against,
    set_headline,
    subplots,
)
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.blocks import MLP, EncoderBlock

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def run_feed_forward(*, seed: int = 0, width: int = 8, num_tokens: int = 5, use_attention: bool = False) -> Result:
    """use_attention=True tests attention, which mixes positions, in place of the feed-forward network."""
    torch.manual_seed(seed)
    net, x = MLP(width, 4 * width).double(), torch.randn(2, num_tokens, width, dtype=torch.float64)
    layer = MultiHeadAttention(width, 1).double() if use_attention else net
    with torch.no_grad():
        convolved = feedforward_as_convolutions(net)(x.mT).mT
        error = (convolved - layer(x)).abs().max().item()
    return Result(
        (
            at_most("difference from two 1×1 convolutions", error, 1e-12),
            equals("number of input positions that one output depends on", receptive_field(layer, x[:1]), 1, 0),
        )
    )


def influences(layer: nn.Module, x: Tensor) -> Tensor:
    """Norm of the Jacobian of each output token with respect to each input token; largest = 1. x (1,L,E) -> (L,L)"""
    jacobian = torch.autograd.functional.jacobian(lambda tokens: layer(tokens)[0], x)  # (L,E,1,L,E)
    norms = jacobian[:, :, 0].square().sum(dim=(1, 3)).sqrt()
    return norms / norms.max()


def draw_feed_forward(*, seed: int = 0, width: int = 8, num_tokens: int = 5) -> "Figure":
    """Left: dependency of outputs on inputs, compared with attention. Right: the network as two 1×1 convolutions."""
    torch.manual_seed(seed)
    net = MLP(width, 4 * width).double()
    x = torch.randn(2, num_tokens, width, dtype=torch.float64)
    attention = MultiHeadAttention(width, 1).double()
    with torch.no_grad():
        convolved, output = feedforward_as_convolutions(net)(x.mT).mT, net(x)
    figure, (top, bottom, scatter) = subplots("AC;BC", widths=(1, 1.5))
    heat_maps(figure, [top, bottom], [influences(net, x[:1]), influences(attention, x[:1])], "influence")
    label_axes(top, "feed-forward", "", "output")
    label_axes(bottom, "attention", "input token", "output")
    scatter_against(scatter, output, {"two 1 × 1 convolutions": (convolved, CORRECT, "o")})
    label_axes(scatter, "Outputs of both", "two 1 × 1 convolutions", "feed-forward")
    set_headline(figure, "The feed-forward network is two 1 × 1 convolutions: tokens do not mix")
    return figure


FEED_FORWARD = Claim(
    slug="feed-forward",
    kind="demonstration",
    lesson="Blocks: feed-forward network, normalization, skip connections",
    statement="The feed-forward network is applied to each position separately. It equals two 1×1 convolutions with an "
    "activation between them.",
    misconception="The feed-forward network mixes positions.",
    formula="max(0, x W_1 + b_1) W_2 + b_2 = conv_1x1(max(0, conv_1x1(x)))",
    run=run_feed_forward,
    figure=draw_feed_forward,
    try_next="clearhead lab feed-forward --use-attention true",
    minimum={"num_tokens": 2},
)


SHALLOW = 2
"""depth of the reference stack"""
NUM_STACKS = 4
"""number of random initializations whose median is taken"""
VANISHING, PRESERVED = 0.7, 0.85
"""limits of the gradient ratio per layer: a gradient vanishes at or below the first, and not at or above the second"""


@dataclass(frozen=True)
class Initialization:
    """The activation of f(x) = activation(x W_1) W_2 and the initializers of its weights."""

    name: str
    activation: Callable[[Tensor], Tensor]
    init_first: Callable[[Tensor], Tensor]
    init_second: Callable[[Tensor], Tensor]


def he(weight: Tensor) -> Tensor:
    """Normal with variance 2 / fan_in (He et al., 2015), for a layer before a ReLU."""
    return nn.init.kaiming_normal_(weight, nonlinearity="relu")


def he_linear(weight: Tensor) -> Tensor:
    """Normal with variance 1 / fan_in, for a layer without a ReLU after it."""
    return nn.init.kaiming_normal_(weight, nonlinearity="linear")


XAVIER = Initialization("Xavier + GELU", F.gelu, nn.init.xavier_uniform_, nn.init.xavier_uniform_)
HE = Initialization("He + ReLU", F.relu, he, he_linear)
ORTHOGONAL = Initialization("orthogonal + tanh", torch.tanh, nn.init.orthogonal_, nn.init.orthogonal_)
INITIALIZATIONS = (XAVIER, HE, ORTHOGONAL)


def input_gradient_norm(depth: int, width: int, skip: bool, initialization: Initialization = XAVIER) -> float:
    """Norm of the gradient at the input of `depth` layers x + f(x), or f(x) without skip connections."""
    nets = [MLP(width, width, initialization.activation).double() for _ in range(depth)]
    for net in nets:
        initialization.init_first(net.fc1.weight)
        initialization.init_second(net.fc2.weight)
    x = torch.randn(8, width, dtype=torch.float64, requires_grad=True)
    h: Tensor = x
    for net in nets:
        h = h + net(h) if skip else net(h)
    h.sum().backward()
    assert x.grad is not None
    return x.grad.norm().item()


def gradient_ratio(depth: int, width: int, skip: bool, initialization: Initialization) -> float:
    """The gradient at the input of `depth` layers relative to that of SHALLOW layers: a median over NUM_STACKS."""
    ratios = [
        input_gradient_norm(depth, width, skip, initialization)
        / input_gradient_norm(SHALLOW, width, skip, initialization)
        for _ in range(NUM_STACKS)
    ]
    return torch.tensor(ratios, dtype=torch.float64).median().item()


def run_skip_connections(*, seed: int = 0, width: int = 32, depth: int = 24, skip: bool = True) -> Result:
    """skip=False removes the skip connections from both stacks that are compared: the misconception."""
    torch.manual_seed(seed)
    with_skips = {init.name: gradient_ratio(depth, width, skip, init) for init in INITIALIZATIONS}
    without_skips = {init.name: gradient_ratio(depth, width, False, init) for init in INITIALIZATIONS}

    quantity = f"gradient, {depth} layers / {SHALLOW} layers"

    def limit(factor: float) -> float:
        """factor^(depth - SHALLOW), rounded to one significant digit."""
        return float(f"{factor ** (depth - SHALLOW):.1g}")

    checks = (
        *(at_least(f"{name}, with skips: {quantity}", value, 0.1) for name, value in with_skips.items()),
        at_most(f"{XAVIER.name}, without skips: {quantity}", without_skips[XAVIER.name], limit(VANISHING)),
        at_least(f"{HE.name}, without skips: {quantity}", without_skips[HE.name], limit(PRESERVED)),
        at_least(f"{ORTHOGONAL.name}, without skips: {quantity}", without_skips[ORTHOGONAL.name], limit(PRESERVED)),
    )
    curves = [
        Curve("gradient ratio", f"{name}, {kind}", (depth,), (value,))
        for kind, measured in (("with skips", with_skips), ("without skips", without_skips))
        for name, value in measured.items()
    ]
    return Result(checks, tuple(curves))


def draw_skip_connections(*, seed: int = 0, width: int = 32, depth: int = 48, result: Result | None = None) -> "Figure":
    """The gradient at the first layer against depth; the result adds the other initializations."""
    curves = result.curves if result else ()
    depths = sorted({1, 2, *(round(depth * step / 8) for step in range(1, 9))} - {0})
    figure, (axes, *others) = subplots("AB" if curves else "A")
    for skip, color, text in ((False, MISCONCEPTION, "f(x) alone"), (True, CORRECT, "x + f(x)")):
        torch.manual_seed(seed)
        heights = [input_gradient_norm(n, width, skip) for n in depths]
        heights = [height / heights[0] for height in heights]
        axes.plot(depths, heights, "o-", color=color, linewidth=3, markersize=8, label=text)
    axes.set_yscale("log")
    label_axes(axes, "Xavier + GELU", "number of layers", "gradient norm at the input\n(1 = that of one layer)")
    for right in others:
        draw_initializations(right, curves)
    legend_below(figure, axes)
    set_headline(figure, "With skip connections the gradient reaches the first layer")
    return figure


def draw_initializations(axes: "Axes", curves: Sequence[Curve]) -> None:
    """Two bars per initialization: the gradient with and without skip connections."""
    names = list(dict.fromkeys(curve.name.rpartition(", ")[0] for curve in curves))
    for kind, color, offset in (("without skips", MISCONCEPTION, 0.2), ("with skips", CORRECT, -0.2)):
        heights = [curve.y[0] for text in names for curve in curves if curve.name == f"{text}, {kind}"]
        axes.bar([index + offset for index in range(len(names))], heights, 0.4, color=color)
    axes.set_yscale("log")
    axes.axhline(1, color=BLACK, linestyle="--")
    axes.set_xticks(range(len(names)), labels=[text.replace(" + ", "\n+ ") for text in names])
    axes.grid(axis="x", visible=False)
    depth = curves[0].x[0]
    label_axes(
        axes, f"{depth:g} layers", "initialization and activation", "gradient norm at the input\n(1 = that of 2 layers)"
    )


SKIP_CONNECTIONS = Claim(
    slug="skip-connections",
    lesson="Blocks: feed-forward network, normalization, skip connections",
    statement="With skip connections, x + f(x), the gradient at the input of a deep network does not vanish. Without "
    "them, it vanishes for Xavier initialization with GELU, but not for He initialization with ReLU or orthogonal "
    "initialization with tanh.",
    misconception="Skip connections do not affect the gradient at the first layer, or the gradient always vanishes "
    "without them.",
    formula="d(x + f(x))/dx = I + f'(x);  f(x) = activation(x W_1) W_2",
    conditions="Untrained feed-forward networks of equal width without normalization, 24 layers; the median of four "
    "random initializations.",
    run=run_skip_connections,
    figure=draw_skip_connections,
    try_next="clearhead lab skip-connections --depth 100",
    minimum={"depth": 16, "width": 32},
)


def run_layer_norm(*, seed: int = 0, width: int = 16, num_tokens: int = 5, batch_norm: bool = False) -> Result:
    """batch_norm=True tests batch norm in training mode in place of layer norm."""
    torch.manual_seed(seed)
    x = torch.randn(4, num_tokens, width, dtype=torch.float64)
    others = 10 * torch.randn_like(x)
    others[0, 0] = x[0, 0]

    def layer_norm(tokens: Tensor) -> Tensor:
        return nn.LayerNorm(width).double()(tokens)

    def batch_norm_train(tokens: Tensor) -> Tensor:
        return nn.BatchNorm1d(width).double()(tokens.mT).mT

    eval_norm = nn.BatchNorm1d(width).double()
    eval_norm(3 * torch.randn_like(x).mT + 1)  # running statistics of another batch
    eval_norm.eval()

    def batch_norm_eval(tokens: Tensor) -> Tensor:
        return eval_norm(tokens.mT).mT

    def change(norm: Callable[[Tensor], Tensor]) -> float:
        """Change of the output for one token when all other tokens of the batch change."""
        with torch.no_grad():
            return (norm(x)[0, 0] - norm(others)[0, 0]).abs().max().item()

    return Result(
        (
            at_most(
                "layer norm: change of one token's output", change(batch_norm_train if batch_norm else layer_norm), 0
            ),
            at_least("batch norm, training mode: change of one token's output", change(batch_norm_train), 0.01),
            at_most("batch norm, evaluation mode: change of one token's output", change(batch_norm_eval), 0),
        )
    )


@torch.no_grad()
def draw_layer_norm(*, seed: int = 0, width: int = 16, num_tokens: int = 5) -> "Figure":
    """The output for one token in two batches with different other tokens."""
    torch.manual_seed(seed)
    x = torch.randn(4, num_tokens, width, dtype=torch.float64)
    others = 10 * torch.randn_like(x)
    others[0, 0] = x[0, 0]
    layer = nn.LayerNorm(width).double()
    batch, eval_batch = nn.BatchNorm1d(width).double(), nn.BatchNorm1d(width).double()
    eval_batch(x.mT)  # running statistics of a batch
    eval_batch.eval()
    cases = {
        "layer norm": (layer(x), layer(others), CORRECT),
        "batch norm, training": (batch(x.mT).mT, batch(others.mT).mT, MISCONCEPTION),
        "batch norm, evaluation": (eval_batch(x.mT).mT, eval_batch(others.mT).mT, CORRECT),
    }
    figure, all_axes = subplots("ABC")
    for axes, (title, (before, after, color)) in zip(all_axes, cases.items(), strict=True):
        scatter_against(axes, after[0, 0], {title: (before[0, 0], color, "o")})
        change = (after - before)[0, 0].abs().max().item()
        label_axes(axes, f"{title}:\nchange of {change:.2g}", "output in batch 1")
    all_axes[0].set_ylabel("output in batch 2", fontsize=TEXT_SIZE)
    set_headline(figure, "Layer norm of a token does not depend on the other tokens of the batch")
    return figure


LAYER_NORM = Claim(
    slug="layer-norm",
    lesson="Blocks: feed-forward network, normalization, skip connections",
    statement="Layer norm normalizes each token separately. With batch norm, the output for a token depends on the "
    "other tokens of the batch in training mode, but not in evaluation mode, which uses running statistics.",
    misconception="Batch norm is equivalent to layer norm, or its output depends on the batch in evaluation mode as "
    "well.",
    formula="LN(x) = (x - mean(x)) / std(x), over the width of one token;  BN: over the batch in training mode, "
    "by the running mean and variance in evaluation mode",
    run=run_layer_norm,
    figure=draw_layer_norm,
    try_next="clearhead lab pre-norm",
    kind="demonstration",
)


def gradients(norm: str, depth: int, width: int) -> list[float]:
    """Norm of the gradient at the input of each of `depth` untrained blocks."""
    blocks = [
        EncoderBlock(
            MultiHeadAttention(width, 2), MLP(width, 4 * width), width=width, norm_first=norm == "pre"
        ).double()
        for _ in range(depth)
    ]
    final = nn.LayerNorm(width).double() if norm == "pre" else nn.Identity()
    h = torch.randn(16, 6, width, dtype=torch.float64, requires_grad=True)
    inputs: list[Tensor] = []
    for block in blocks:
        inputs.append(h)
        h = block(h)
    loss = (final(h) * torch.randn_like(h)).sum()
    return [gradient.norm().item() for gradient in torch.autograd.grad(loss, inputs)]


def run_pre_norm(*, seed: int = 0, width: int = 32, depth: int = 24, post_norm: bool = False) -> Result:
    """post_norm=True tests post-norm in place of pre-norm."""
    torch.manual_seed(seed)

    def last_block_gradient(norm: str) -> float:
        """Gradient at the last of `depth` blocks relative to that of a single block."""
        return gradients(norm, depth, width)[-1] / gradients(norm, 1, width)[-1]

    pre, post = last_block_gradient("post" if post_norm else "pre"), last_block_gradient("post")
    return Result(
        (
            within(
                f"pre-norm: gradient at last of {depth} blocks / single block × sqrt({depth})",
                pre * math.sqrt(depth),
                0.5,
                1.8,
            ),
            at_least("post-norm: gradient at last block / single block", post, 0.35),
        )
    )


NUM_DRAWS = 4
"""number of random initializations that are averaged"""


def draw_pre_norm(*, seed: int = 0, width: int = 32, depth: int = 24) -> "Figure":
    """Left: the gradient at the last block against depth. Right: the gradient at each block of the deepest stack."""
    depths = sorted({max(1, round(depth / divisor)) for divisor in (depth, 12, 6, 3, 1.5, 1)})
    figure, (left, right) = subplots("AB", same_y=True)
    for norm, color, marker in (("post", VERMILION, "s"), ("pre", BLUE, "o")):
        torch.manual_seed(seed)
        measured = [torch.tensor([gradients(norm, n, width) for _ in range(NUM_DRAWS)]).mean(0) for n in depths]
        style: dict[str, Any] = {"color": color, "linewidth": 3, "label": f"{norm}-norm"}
        left.plot(depths, [blocks[-1] / measured[0][0] for blocks in measured], f"{marker}-", markersize=8, **style)
        right.plot(range(1, depths[-1] + 1), measured[-1] / measured[0][0], f"{marker}-", markersize=6, **style)
    left.plot(depths, [n**-0.5 for n in depths], "--", color=BLACK, linewidth=2, label="1 / sqrt(depth)")
    left.set_xscale("log", base=2)
    left.set_xticks(depths, labels=[str(n) for n in depths])
    left.set_yscale("log")
    ticks = [0.1, 0.2, 0.5, 1, 2, 5]
    left.set_yticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    left.set_ylim(min(0.1, 0.8 * depths[-1] ** -0.5), 3)
    label_axes(
        left,
        "Last block, by depth",
        "depth (number of blocks)",
        "gradient norm at its input\n(1 = that of a single block)",
    )
    label_axes(right, f"Each block of a stack of {depths[-1]}", "block (1 = first)")
    legend_below(figure, left)
    set_headline(figure, "At initialization, pre-norm shrinks the last block's gradient; post-norm does not")
    return figure


PRE_NORM = Claim(
    slug="pre-norm",
    lesson="Blocks: feed-forward network, normalization, skip connections",
    statement="At initialization, the gradient at the last block decreases as 1/sqrt(depth) in a pre-norm transformer, "
    "but not in a post-norm transformer.",
    misconception="At initialization, the placement of the normalization layers makes no difference.",
    formula="pre-norm: |x_L| grows as sqrt(L), and the final norm divides by it;  post-norm: the input of every "
    "block has norm sqrt(d)",
    run=run_pre_norm,
    figure=draw_pre_norm,
    try_next="clearhead lab pre-norm --depth 48",
    minimum={"depth": 16, "width": 8},
    multiple_of={"width": 2},
)
