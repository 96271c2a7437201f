"""Without positions, attention does not know the order of its tokens."""

import torch
from torch import nn

from clearhead.lab.claim import Claim, Result, at_least, at_most
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.positions import NoPositions, Positions, SinusoidalPositions


def run(
    *, seed: int = 0, width: int = 16, n_heads: int = 4, n_tokens: int = 7, positions: Positions | None = None
) -> Result:
    torch.manual_seed(seed)
    attention = MultiHeadAttention(width, n_heads).double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=width**-0.5)
    x, cycle = torch.randn(2, n_tokens, width, dtype=torch.float64), torch.randperm(n_tokens)
    order = torch.empty_like(cycle)
    order[cycle] = cycle.roll(1)  # one round through all places: no token stays

    def change(where: Positions) -> float:
        """How far the answer to the shuffled tokens is from the shuffled answer."""
        with torch.no_grad():
            return (attention(where(x[:, order])) - attention(where(x))[:, order]).abs().max().item()

    moved = int((order != torch.arange(n_tokens)).sum())
    return Result(
        (
            at_least("tokens that changed places", moved, n_tokens),
            at_most("difference without positions", change(positions or NoPositions()), 1e-12),
            at_least("difference with positions", change(SinusoidalPositions()), 1e-3),
        )
    )


CLAIM = Claim(
    slug="equivariance",
    kind="demonstration",
    rows=("R2.6",),
    lesson="Positions and order",
    statement="Shuffling the tokens shuffles the answers of multi-head attention, and changes nothing else.",
    mistake="Attention knows which token came first.",
    formula="attention(P X) = P attention(X) for every permutation P",
    run=run,
    try_next="clearhead lab equivariance --n-tokens 50",
    multiples={"width": 2},
    least={"n_tokens": 2},
)
