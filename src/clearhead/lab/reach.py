"""How far one layer sees: attention against convolution."""

import torch
from torch import Tensor, nn

from clearhead.lab.claim import Claim, Result, equals
from clearhead.nn.attention import MultiHeadAttention


def inputs_seen(layer: nn.Module, x: Tensor) -> int:
    """Places whose change reaches the output in the middle: non-zero blocks of the Jacobian. x (1,L,E)"""
    x = x.clone().requires_grad_()
    layer(x)[0, x.shape[1] // 2].square().sum().backward()
    assert x.grad is not None
    return int((x.grad[0].abs().sum(-1) > 0).sum())


class AlongTheLine(nn.Module):
    """`depth` convolutions one after the other, on tokens (1,L,E)."""

    def __init__(self, width: int, kernel: int, depth: int):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv1d(width, width, kernel, padding=kernel // 2) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.mT).mT


def run(*, seed: int = 0, width: int = 8, n_tokens: int = 21, kernel: int = 3, depth: int = 1) -> Result:
    """depth is that of the convolutions that are said to see `kernel` places."""
    if kernel > n_tokens:
        raise ValueError(f"n_tokens must be at least kernel, got {n_tokens} and {kernel}; try n_tokens={4 * kernel}")
    torch.manual_seed(seed)
    x = torch.randn(1, n_tokens, width, dtype=torch.float64)
    needed = -(-(n_tokens // 2) // (kernel // 2))
    return Result(
        (
            equals(
                "places that one attention layer sees",
                inputs_seen(MultiHeadAttention(width, 2).double(), x),
                n_tokens,
                0,
            ),
            equals(
                "places that one convolution sees",
                inputs_seen(AlongTheLine(width, kernel, depth).double(), x),
                kernel,
                0,
            ),
            equals(
                f"places that {needed} convolutions see",
                inputs_seen(AlongTheLine(width, kernel, needed).double(), x),
                n_tokens,
                0,
            ),
        )
    )


CLAIM = Claim(
    slug="reach",
    kind="demonstration",
    rows=("R1.7",),
    lesson="Images and convolutions",
    statement="One attention layer sees every token; a convolution sees its kernel, and needs depth to see everything.",
    mistake="A convolution sees the whole input at once, too.",
    formula="d h_i / d x_j is dense for attention, k wide for a convolution, 1 + depth (k-1) wide for several",
    run=run,
    try_next="clearhead lab reach --kernel 7",
    multiples={"width": 2},
    least={"kernel": 3},
)
