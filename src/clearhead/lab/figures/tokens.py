"""Which tokens attention looks at, and that it does not know their order."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from clearhead.drawing import BLUE, GREEN, GREY, VERMILION
from clearhead.lab.figures.style import canvas, heat_maps, key_below, label, name
from clearhead.nn.attention import MultiHeadAttention, attend_reference
from clearhead.nn.positions import NoPositions, Positions, SinusoidalPositions

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_own_token(*, seed: int = 0, width: int = 16, n_tokens: int = 8) -> "Figure":
    """Left: the weights of one sequence, with the largest of each row marked. Right: how often it is the own token."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(64, n_tokens, width, generator=random, dtype=torch.float64)
    w_q, w_k = torch.randn(2, width, width, generator=random, dtype=torch.float64) / width**0.5
    q, k = x @ w_q, x @ w_k
    same = q / q.norm(dim=-1, keepdim=True)
    weights = attend_reference(q, k, x)[1]
    shares = [own_share(weights), 1 / n_tokens, own_share(attend_reference(same, same, x)[1])]

    figure, (left, right) = canvas("AB", widths=(1.2, 1))
    heat_maps(figure, [left], [weights[0]], "weight")
    best = weights[0].argmax(-1)
    left.scatter(best, range(n_tokens), s=200, facecolor="none", edgecolor="white", linewidth=4)
    left.plot([-0.5, n_tokens - 0.5], [-0.5, n_tokens - 0.5], color="white", linestyle=":", linewidth=2)
    name(left, "Ring: largest of each row", "key", "query")
    right.bar(["random", "chance", "q = k"], shares, color=[BLUE, GREY, GREEN])
    for place, share in enumerate(shares):
        label(right, place, share, f"{share:.0%}", ha="center", offset=(0, 4))
    right.set_ylim(0, 1.1)
    right.grid(axis="x", visible=False)
    name(right, "Ring on the diagonal", "", "share of tokens")
    return figure


def own_share(weights: Tensor) -> float:
    return (weights.argmax(-1) == torch.arange(weights.shape[-1])).double().mean().item()


def draw_equivariance(*, seed: int = 0, width: int = 16, n_heads: int = 4, n_tokens: int = 7) -> "Figure":
    """How far the answer to shuffled tokens is from the shuffled answer, token by token."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        attention = MultiHeadAttention(width, n_heads).double()
        for parameter in attention.parameters():
            nn.init.normal_(parameter, std=width**-0.5)
        x, order = torch.randn(1, n_tokens, width, dtype=torch.float64), torch.randperm(n_tokens).roll(1)
    cases: list[tuple[str, Positions, str, str]] = [
        ("with positions", SinusoidalPositions(), VERMILION, "o"),
        ("without positions", NoPositions(), BLUE, "s"),
    ]
    figure, (axes,) = canvas()
    for text, positions, colour, marker in cases:
        with torch.no_grad():
            change = attention(positions(x[:, order])) - attention(positions(x))[:, order]
        heights = change[0].abs().amax(-1)
        axes.plot(range(1, n_tokens + 1), heights, marker, color=colour, markersize=14, label=text)
    key_below(figure, axes)
    name(
        axes,
        "Without positions, shuffled tokens give shuffled answers",
        "token",
        "answer to the shuffled\nagainst shuffled answer",
    )
    return figure
