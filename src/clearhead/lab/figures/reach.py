"""How far one layer sees: the Jacobian of one output to every input."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from clearhead.drawing import BLUE, GREEN, VERMILION
from clearhead.lab.figures.style import TEXT, canvas, name
from clearhead.lab.reach import AlongTheLine
from clearhead.nn.attention import MultiHeadAttention

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def influence(layer: nn.Module, x: Tensor) -> Tensor:
    """Norm of the Jacobian of the middle output to each input, in units of the largest. x (1,L,E) -> (L,)"""
    middle = x.shape[1] // 2
    jacobian = torch.autograd.functional.jacobian(lambda tokens: layer(tokens)[0, middle], x)  # (E,1,L,E)
    norms = jacobian[:, 0].square().sum(dim=(0, 2)).sqrt()
    return norms / norms.max()


def draw_reach(*, seed: int = 0, width: int = 8, n_tokens: int = 21, kernel: int = 3) -> "Figure":
    """Attention, one convolution, and as many as it takes to see every token."""
    needed = -(-(n_tokens // 2) // (kernel // 2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        x = torch.randn(1, n_tokens, width, dtype=torch.float64)
        layers = {
            "1 attention layer": (MultiHeadAttention(width, 2), BLUE),
            "1 convolution": (AlongTheLine(width, kernel, 1), VERMILION),
            f"{needed} convolutions": (AlongTheLine(width, kernel, needed), GREEN),
        }
    figure, all_axes = canvas("ABC", same_y=True)
    offsets = [place - n_tokens // 2 for place in range(n_tokens)]
    lowest = 1.0
    for axes, (title, (layer, colour)) in zip(all_axes, layers.items(), strict=True):
        norms = influence(layer.double(), x)
        lowest = min(lowest, norms[norms > 0].min().item())
        axes.bar(offsets, norms.tolist(), color=colour, width=0.8)
        axes.grid(axis="x", visible=False)
        name(axes, f"{title}:\nsees {int((norms > 0).sum())} of {n_tokens}", "place (0 = output)")
    all_axes[0].set_yscale("log")
    all_axes[0].set_ylim(lowest / 3, 1.5)
    all_axes[0].set_ylabel("influence (largest = 1)", fontsize=TEXT)
    return figure
