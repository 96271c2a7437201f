"""Skip connections: how much gradient reaches the first of many layers, and how that depends on the initialisation."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.drawing import BLACK, BLUE, VERMILION
from clearhead.lab.claim import Claim, Curve, Result, at_least, at_most, within
from clearhead.lab.constructions import feedforward_as_convolutions
from clearhead.lab.plots import MISTAKE, TEXT, TRUTH, against, canvas, headline, heat_maps, key_below, name_axis
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.blocks import MLP, EncoderBlock

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHALLOW = 2
"""layers of the stack that others are compared with"""
STACKS = 4
"""stacks of random weights whose median counts: a single narrow one may be an exception"""

VANISHING, PRESERVED = 0.7, 0.85
"""factor of each further layer: at most the first where the gradient vanishes, at least the second where it does not"""


@dataclass(frozen=True)
class Initialisation:
    """How the weights of f(x) = activation(x W_1) W_2 are drawn, and its activation."""

    name: str
    activation: Callable[[Tensor], Tensor]
    init_first: Callable[[Tensor], Tensor]
    init_second: Callable[[Tensor], Tensor]


def he(weight: Tensor) -> Tensor:
    """Normal with variance 2 / inputs (He et al., 2015), for the layer before a ReLU."""
    return nn.init.kaiming_normal_(weight, nonlinearity="relu")


def keeping(weight: Tensor) -> Tensor:
    """Normal with variance 1 / inputs, for the layer that no ReLU follows."""
    return nn.init.kaiming_normal_(weight, nonlinearity="linear")


XAVIER = Initialisation("Xavier + GELU", F.gelu, nn.init.xavier_uniform_, nn.init.xavier_uniform_)
HE = Initialisation("He + ReLU", F.relu, he, keeping)
ORTHOGONAL = Initialisation("orthogonal + tanh", torch.tanh, nn.init.orthogonal_, nn.init.orthogonal_)
INITIALISATIONS = (XAVIER, HE, ORTHOGONAL)


def first_gradient(depth: int, width: int, has_skip: bool, initialisation: Initialisation = XAVIER) -> float:
    """Norm of the gradient at the input of `depth` small nets, with x + f(x) or f(x) alone."""
    nets = [MLP(width, width, initialisation.activation).double() for _ in range(depth)]
    for net in nets:
        initialisation.init_first(net.fc1.weight)
        initialisation.init_second(net.fc2.weight)
    x = torch.randn(8, width, dtype=torch.float64, requires_grad=True)
    h: Tensor = x
    for net in nets:
        h = h + net(h) if has_skip else net(h)
    h.sum().backward()
    assert x.grad is not None
    return x.grad.norm().item()


def left(depth: int, width: int, has_skip: bool, initialisation: Initialisation) -> float:
    """The gradient at the input of `depth` layers relative to that of SHALLOW layers: the median of some stacks."""
    ratios = [
        first_gradient(depth, width, has_skip, initialisation)
        / first_gradient(SHALLOW, width, has_skip, initialisation)
        for _ in range(STACKS)
    ]
    return torch.tensor(ratios, dtype=torch.float64).median().item()


def run_skip_connections(*, seed: int = 0, width: int = 32, depth: int = 24, has_skip: bool = True) -> Result:
    """has_skip=False asks of the plain stack what holds with skip connections."""
    torch.manual_seed(seed)
    skipping = {each.name: left(depth, width, has_skip, each) for each in INITIALISATIONS}
    plain = {each.name: left(depth, width, False, each) for each in INITIALISATIONS}

    what = f"gradient, {depth} layers over {SHALLOW}"

    def limit(factor: float) -> float:
        """One digit is enough for a limit."""
        return float(f"{factor ** (depth - SHALLOW):.1g}")

    checks = (
        *(at_least(f"{name}, skips: {what}", value, 0.1) for name, value in skipping.items()),
        at_most(f"{XAVIER.name}, no skips: {what}", plain[XAVIER.name], limit(VANISHING)),
        at_least(f"{HE.name}, no skips: {what}", plain[HE.name], limit(PRESERVED)),
        at_least(f"{ORTHOGONAL.name}, no skips: {what}", plain[ORTHOGONAL.name], limit(PRESERVED)),
    )
    curves = [
        Curve("gradient left", f"{name}, {kind}", (depth,), (value,))
        for kind, found in (("with skips", skipping), ("without skips", plain))
        for name, value in found.items()
    ]
    return Result(checks, tuple(curves))


SKIP_CONNECTIONS = Claim(
    slug="skip-connections",
    rows=("R4.16",),
    lesson="Blocks: feed-forward, norm, skip connections",
    statement="With x + f(x) the gradient reaches the first of many layers. With f(x) alone it vanishes under Xavier "
    "initialisation with GELU; He initialisation with ReLU and orthogonal initialisation with tanh nearly preserve it.",
    mistake="The gradient reaches the first layer as well without them; or: without them it always vanishes.",
    formula="d(x + f(x))/dx = I + f'(x);  f(x) = activation(x W_1) W_2",
    conditions="Untrained feed-forward nets of equal width without norm; the median of four stacks of random weights.",
    run=run_skip_connections,
    try_next="clearhead lab skip-connections --depth 100",
    least={"depth": 16, "width": 32},
)


# Layer norm: how it differs from batch norm, and where it stands in the block.


def run_layer_norm(*, seed: int = 0, width: int = 16, n_tokens: int = 5, batch_norm: bool = False) -> Result:
    """All other tokens of the batch change. batch_norm=True asks of batch norm in training mode what holds of layer
    norm."""
    torch.manual_seed(seed)
    x = torch.randn(4, n_tokens, width, dtype=torch.float64)
    others = 10 * torch.randn_like(x)
    others[0, 0] = x[0, 0]

    def by_layer(tokens: Tensor) -> Tensor:
        return nn.LayerNorm(width).double()(tokens)

    def by_batch(tokens: Tensor) -> Tensor:
        return nn.BatchNorm1d(width).double()(tokens.mT).mT

    stored = nn.BatchNorm1d(width).double()
    stored(3 * torch.randn_like(x).mT + 1)  # one pass in training mode stores the statistics of another batch
    stored.eval()

    def by_stored(tokens: Tensor) -> Tensor:
        return stored(tokens.mT).mT

    def change(norm: Callable[[Tensor], Tensor]) -> float:
        """How far the output for one token moves when all other tokens of the batch do."""
        with torch.no_grad():
            return (norm(x)[0, 0] - norm(others)[0, 0]).abs().max().item()

    return Result(
        (
            at_most("layer norm: output for one token moves by", change(by_batch if batch_norm else by_layer), 0),
            at_least("batch norm, training mode: it moves by", change(by_batch), 0.01),
            at_most("batch norm, evaluation mode: it moves by", change(by_stored), 0),
        )
    )


def gradients(norm: str, depth: int, width: int) -> list[float]:
    """Norm of the gradient at the input of each of `depth` fresh blocks, the first of the stack first."""
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


def run_wiring(*, seed: int = 0, width: int = 32, depth: int = 24, post: bool = False) -> Result:
    """post asks of post-norm what holds of pre-norm."""
    torch.manual_seed(seed)

    def last(norm: str) -> float:
        """Gradient at the last of `depth` blocks over that at a single one."""
        return gradients(norm, depth, width)[-1] / gradients(norm, 1, width)[-1]

    shrinking, steady = last("post" if post else "pre"), last("post")
    return Result(
        (
            within(
                f"pre-norm: last of {depth} blocks over a single one, times sqrt({depth})",
                shrinking * math.sqrt(depth),
                0.5,
                1.8,
            ),
            at_least("post-norm: the last over a single one", steady, 0.35),
        )
    )


LAYER = Claim(
    slug="layer-norm",
    rows=("R4.14",),
    lesson="Blocks: feed-forward, norm, skip connections",
    statement="Layer norm treats each token by itself. With batch norm in training mode, the output for a token "
    "depends on the rest of the batch; in evaluation mode it does not, for the statistics are stored ones.",
    mistake="Batch norm would do the same; or: with batch norm, a trained model's output depends on the batch.",
    formula="LN(x) = (x - mean(x)) / std(x), over the width of one token;  BN: over the batch in training mode, "
    "by the running mean and variance in evaluation mode",
    run=run_layer_norm,
    try_next="clearhead lab pre-norm",
    kind="demonstration",
)

WIRING = Claim(
    slug="pre-norm",
    rows=("R4.14", "R0.5"),
    lesson="Blocks: feed-forward, norm, skip connections",
    statement="In a fresh pre-norm stack the last block's gradient falls as 1/sqrt(depth); with post-norm it stays.",
    mistake="Where the norm stands makes no difference to a fresh model.",
    formula="pre: |x_L| grows as sqrt(L), and the last norm divides by it;  post: every block's input has norm sqrt(d)",
    run=run_wiring,
    try_next="clearhead lab pre-norm --depth 48",
    least={"depth": 16, "width": 8},
    multiples={"width": 2},
)


# The parts of a block: the feed-forward network, layer norm, skip connections, and where the norm stands.


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
        net = MLP(width, 4 * width).double()
        x = torch.randn(2, n_tokens, width, dtype=torch.float64)
        attention = MultiHeadAttention(width, 1).double()
        with torch.no_grad():
            convolved, answer = feedforward_as_convolutions(net)(x.mT).mT, net(x)
    figure, (alone, mixed, scatter) = canvas("AC;BC", widths=(1, 1.5))
    heat_maps(figure, [alone, mixed], [influences(net, x[:1]), influences(attention, x[:1])], "influence")
    name_axis(alone, "feed-forward", "", "output")
    name_axis(mixed, "attention", "input token", "output")
    against(scatter, answer, {"two 1 × 1 convolutions": (convolved, TRUTH, "o")})
    name_axis(scatter, "Outputs of both", "two 1 × 1 convolutions", "feed-forward")
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
        name_axis(axes, f"{title}:\nmoves by {moved:.2g}", "output in batch 1")
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
    name_axis(axes, "Xavier + GELU", "number of layers", "gradient norm at the input\n(1 = that of one layer)")
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
    name_axis(
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
    name_axis(
        left,
        "Last block, by depth",
        "depth (number of blocks)",
        "gradient norm at its input\n(1 = that of a single block)",
    )
    name_axis(right, f"Each block of a stack of {depths[-1]}", "block (1 = first)")
    key_below(figure, left)
    headline(figure, "Untrained: pre-norm shrinks the last block's gradient, post-norm does not")
    return figure
