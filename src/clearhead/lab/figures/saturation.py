"""Why scores are divided by sqrt(d): without it, a wide model's softargmax is hard and passes no gradient."""

from typing import TYPE_CHECKING

import torch

from clearhead.lab.figures.style import MISTAKE, TRUTH, canvas, label, name
from clearhead.lab.saturation import Scale, measure, one_over_root, unscaled
from clearhead.nn.softargmax import softargmax

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def gradient(width: int, beta: float, n_keys: int, random: torch.Generator) -> float:
    """Norm of what a random gradient of unit variance at the weights becomes at the logits, over 512 draws."""
    q = torch.randn(512, 1, width, generator=random, dtype=torch.float64)
    k = torch.randn(512, n_keys, width, generator=random, dtype=torch.float64)
    logits = (beta * (q @ k.mT)[:, 0]).requires_grad_()
    arriving = torch.randn(512, n_keys, generator=random, dtype=torch.float64)
    softargmax(logits).backward(arriving)
    assert logits.grad is not None
    return logits.grad.norm(dim=-1).mean().item()


def draw_saturation(*, seed: int = 0, width: int = 256, n_keys: int = 16) -> "Figure":
    """Entropy of the weights, and gradient through them, against the width d."""
    last = max(width, 16)
    widths = [4**power for power in range(1, 8) if 4**power <= last / 2] + [last]
    scales: list[tuple[str, Scale, str]] = [
        ("with 1/sqrt(d)", one_over_root, TRUTH),
        ("without", unscaled, MISTAKE),
    ]
    figure, (left, right) = canvas("AB", same_x=True)
    for text, scale, colour in scales:
        random = torch.Generator().manual_seed(seed)
        entropies = [measure(d, scale(d), n_keys, random)[1] for d in widths]
        gradients = [gradient(d, scale(d), n_keys, random) for d in widths]
        for axes, heights in ((left, entropies), (right, gradients)):
            axes.plot(widths, heights, "o-", color=colour, linewidth=3, markersize=8)
            middle = len(widths) // 2
            label(axes, widths[middle], heights[middle], text, colour, offset=(4, 18))
            axes.set_ylim(0, 1.25 * max(axes.get_ylim()[1] / 1.25, *heights))
    left.set_xscale("log", base=2)
    left.set_xticks(widths, labels=[str(d) for d in widths])
    name(left, "Unscaled, weights turn hard", "width d", "entropy (1 = equal shares)")
    name(right, "... and gradients fade", "width d", "gradient norm at the logits")
    return figure
