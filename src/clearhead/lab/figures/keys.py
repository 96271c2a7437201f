"""One key changes: the measured change of attention against the formula's, and against the mistaken one."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.drawing import BLACK, GREY
from clearhead.lab.elongated_key import divided_by_alpha, exact
from clearhead.lab.figures.style import MISTAKE, TRUTH, canvas, key_below, label, name
from clearhead.lab.moved_key import first_order, scaled_down
from clearhead.nn.attention import attend_reference
from clearhead.nn.softargmax import softargmax

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_moved_key(
    *, seed: int = 0, width: int = 8, n_keys: int = 6, beta: float = 0.5, size: float = 1e-6
) -> "Figure":
    """Left: each number of each output after one random step of key 1. Right: one output after many such steps."""
    if size == 0:
        raise ValueError("a step must have a size to be drawn, got size=0; try size=1e-6")
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, width, generator=random, dtype=torch.float64) for n in (5, n_keys, n_keys))
    steps = torch.randn(1000, width, generator=random, dtype=torch.float64)
    steps = size * steps / steps.norm(dim=-1, keepdim=True)
    out, weights = attend_reference(q, k, v, beta=beta)
    moved = k.repeat(len(steps), 1, 1)
    moved[:, 0] += steps
    queries, values = q.expand(len(steps), -1, -1), v.expand(len(steps), -1, -1)
    measured = (attend_reference(queries, moved, values, beta=beta)[0] - out) / size  # (steps,queries,width)
    arguments = (weights[:, 0], q @ steps[0] / size, v[0], out, beta)

    figure, (left, right) = canvas("AB")
    against(left, measured[0], first_order(*arguments), scaled_down(*arguments))
    name(left, "One step of key 1", "predicted change / |step|", "measured change / |step|")
    key_below(figure, left)
    along = measured[:, 0] @ F.normalize(v[0] - out[0], dim=0)
    right.hist(along.tolist(), bins=30, color=TRUTH)
    right.axvline(0, color=BLACK, linewidth=2)
    right.axvline(along.mean().item(), color=MISTAKE, linewidth=2, linestyle="--")
    label(right, along.mean().item(), 1.0, "mean", MISTAKE, xycoords=("data", "axes fraction"), offset=(6, -14))
    right.margins(y=0.15)
    name(right, "1000 steps: zero on average", "change towards $v_1$ / |step|", "number of steps")
    return figure


def draw_elongated_key(
    *, seed: int = 0, width: int = 8, n_keys: int = 6, alpha: float = 3.0, beta: float = 0.5
) -> "Figure":
    """Left: the weights of 20 queries once key 1 is alpha times as long. Right: its own weight against alpha."""
    random = torch.Generator().manual_seed(seed)
    keys = torch.randn(n_keys, width, generator=random, dtype=torch.float64)
    queries = torch.randn(20, width, generator=random, dtype=torch.float64)
    scores = queries @ keys.T
    before = softargmax(scores, beta)
    after = softargmax(longer(scores, alpha), beta)
    right_rule, wrong_rule = (
        torch.stack([rule(a, z, beta, alpha) for a, z in zip(before, scores, strict=True)])
        for rule in (exact, divided_by_alpha)
    )
    figure, (left, right) = canvas("AB")
    against(left, after, right_rule, wrong_rule)
    name(left, f"Weights after: alpha = {alpha:g}", "predicted weight", "measured weight")
    key_below(figure, left)

    alphas = torch.linspace(1, max(alpha, 1.5), 40, dtype=torch.float64)
    own = scores[:, 0]
    for text, query in (("score > 0", own.argmax()), ("score < 0", before[:, 0].where(own < 0, -1).argmax())):
        a, z = before[query], scores[query]
        measured = [softargmax(longer(z, times), beta)[0].item() for times in alphas.tolist()]
        claimed = [divided_by_alpha(a, z, beta, times)[0].item() for times in alphas.tolist()]
        right.plot(alphas, claimed, "--", color=MISTAKE, linewidth=3)
        right.plot(alphas, measured, color=TRUTH, linewidth=3)
        label(right, alphas[-1].item(), measured[-1], text, TRUTH, offset=(8, -5))
    right.set_xlim(1, 1 + 1.5 * (alphas[-1].item() - 1))
    name(right, "The longer key: up or down", "alpha (times as long)", "weight of the longer key")
    right.set_ylim(0, 1.05)
    return figure


def longer(scores: Tensor, alpha: float) -> Tensor:
    """The scores (...,m) once key 1 is alpha times as long."""
    return torch.cat([alpha * scores[..., :1], scores[..., 1:]], dim=-1)


def against(axes: "Axes", measured: Tensor, formula: Tensor, mistake: Tensor) -> None:
    """Measured numbers against two predictions: what is right lies on the diagonal."""
    axes.scatter(mistake.flatten(), measured.flatten(), s=70, marker="x", color=MISTAKE, label="mistake")
    axes.scatter(formula.flatten(), measured.flatten(), s=60, color=TRUTH, edgecolor="white", label="formula")
    axes.axline((0, 0), slope=1, color=GREY, linewidth=2, zorder=0)
    numbers = torch.cat([part[part.isfinite()] for part in (measured, formula, mistake)])
    room = 0.06 * (numbers.max() - numbers.min()).item() or 1.0
    limits = numbers.min().item() - room, numbers.max().item() + room
    axes.set(xlim=limits, ylim=limits)
    axes.locator_params(nbins=5)
