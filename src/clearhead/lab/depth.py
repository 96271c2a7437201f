"""Skip connections: how much gradient reaches the first of many layers."""

import torch
from torch import Tensor

from clearhead.lab.claim import Claim, Result, at_least, at_most
from clearhead.nn.feedforward import FeedForward


def first_gradient(depth: int, width: int, has_skip: bool) -> float:
    """Norm of the gradient at the input of `depth` small nets, with x + f(x) or f(x) alone."""
    nets = [FeedForward(width, width).double() for _ in range(depth)]
    x = torch.randn(8, width, dtype=torch.float64, requires_grad=True)
    h: Tensor = x
    for net in nets:
        h = h + net(h) if has_skip else net(h)
    h.sum().backward()
    assert x.grad is not None
    return x.grad.norm().item()


def run(*, seed: int = 0, width: int = 32, depth: int = 24, has_skip: bool = True) -> Result:
    """has_skip=False asks of the plain stack what holds with skip connections."""
    torch.manual_seed(seed)
    shallow, deep = first_gradient(2, width, has_skip), first_gradient(depth, width, has_skip)
    plain = first_gradient(depth, width, False) / first_gradient(2, width, False)
    return Result(
        (
            at_least(f"gradient at the input, {depth} layers over 2, with skips", deep / shallow, 0.01),
            at_most("the same without", plain, 0.01),
        )
    )


CLAIM = Claim(
    slug="skip-connections",
    rows=("R4.16",),
    lesson="Blocks: feed-forward, norm, skip connections",
    statement="With x + f(x) the gradient still reaches the first of many layers; with f(x) alone it fades.",
    mistake="The gradient reaches the first layer as well without them.",
    formula="d(x + f(x))/dx = I + f'(x)",
    run=run,
    try_next="clearhead lab skip-connections --depth 100",
    least={"depth": 16},
)
