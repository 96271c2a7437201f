"""Why scores are divided by sqrt(d): without it, a wide model's softargmax is hard and passes no gradient."""

from typing import TYPE_CHECKING

import torch

from clearhead.lab.figures.style import MISTAKE, TRUTH, canvas, label, name
from clearhead.lab.saturation import Scale, measure, one_over_root, unscaled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_saturation(*, seed: int = 0, width: int = 256, n_keys: int = 16) -> "Figure":
    """Entropy of the weights, and gradient through them, against the width d."""
    widths = [4**power for power in range(1, 8) if 4**power <= width / 2] + [width]
    scales: list[tuple[str, Scale, str]] = [
        ("with 1/sqrt(d)", one_over_root, TRUTH),
        ("without", unscaled, MISTAKE),
    ]
    figure, (left, right) = canvas("AB", same_x=True)
    for text, scale, colour in scales:
        random = torch.Generator().manual_seed(seed)
        found = [measure(d, scale(d), n_keys, random) for d in widths]
        for axes, heights in ((left, [soft.entropy for soft in found]), (right, [soft.gradient for soft in found])):
            axes.plot(widths, heights, "o-", color=colour, linewidth=3, markersize=8)
            middle = len(widths) // 2
            label(axes, widths[middle], heights[middle], text, colour, offset=(4, 18))
            axes.set_ylim(0, 1.25 * max(axes.get_ylim()[1] / 1.25, *heights))
    left.set_xscale("log", base=2)
    left.set_xticks(widths, labels=[str(d) for d in widths])
    name(left, "Unscaled, weights turn hard", "width d", "entropy (1 = equal shares)")
    name(right, "... and gradients fade", "width d", "gradient norm at the logits")
    return figure
