"""Skip connections: how much gradient reaches the first of many layers, and how that depends on the initialisation."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.lab.claim import Claim, Curve, Result, at_least, at_most
from clearhead.nn.feedforward import FeedForward

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
    nets = [FeedForward(width, width, initialisation.activation).double() for _ in range(depth)]
    for net in nets:
        initialisation.init_first(net.widen.weight)
        initialisation.init_second(net.narrow.weight)
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


def run(*, seed: int = 0, width: int = 32, depth: int = 24, has_skip: bool = True) -> Result:
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


CLAIM = Claim(
    slug="skip-connections",
    rows=("R4.16",),
    lesson="Blocks: feed-forward, norm, skip connections",
    statement="With x + f(x) the gradient reaches the first of many layers. With f(x) alone it vanishes under Xavier "
    "initialisation with GELU; He initialisation with ReLU and orthogonal initialisation with tanh nearly preserve it.",
    mistake="The gradient reaches the first layer as well without them; or: without them it always vanishes.",
    formula="d(x + f(x))/dx = I + f'(x);  f(x) = activation(x W_1) W_2",
    conditions="Untrained feed-forward nets of equal width without norm; the median of four stacks of random weights.",
    run=run,
    try_next="clearhead lab skip-connections --depth 100",
    least={"depth": 16, "width": 32},
)
