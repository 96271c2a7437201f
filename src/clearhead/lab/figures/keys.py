"""One key changes: what attention does, against the formula, and against the misconception."""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.drawing import BLACK
from clearhead.lab.elongated_key import divided_by_alpha, exact
from clearhead.lab.figures.style import MISTAKE, TRUTH, against, canvas, headline, key_below, label, name
from clearhead.lab.moved_key import first_order, scaled_down
from clearhead.nn.attention import attend_reference
from clearhead.nn.softargmax import softargmax

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


N_QUERIES = 12


def draw_moved_key(
    *, seed: int = 0, width: int = 8, n_keys: int = 6, beta: float = 1.0, size: float = 1e-6
) -> "Figure":
    """Left: each number of each output after one random step of key 1. Right: one output after many such steps."""
    if size == 0:
        raise ValueError("a step must have a size to be drawn, got size=0; try size=1e-6")
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, width, generator=random, dtype=torch.float64) for n in (5, n_keys, n_keys))
    q /= width**0.5
    steps = torch.randn(1000, width, generator=random, dtype=torch.float64)
    steps = size * steps / steps.norm(dim=-1, keepdim=True)
    out, weights = attend_reference(q, k, v, beta=beta)
    moved = k.repeat(len(steps), 1, 1)
    moved[:, 0] += steps
    queries, values = q.expand(len(steps), -1, -1), v.expand(len(steps), -1, -1)
    measured = (attend_reference(queries, moved, values, beta=beta)[0] - out) / size  # (steps,queries,width)
    arguments = (weights[:, 0], q @ steps[0] / size, v[0], out, beta)

    figure, (left, right) = canvas("AB")
    against(left, measured[0], rules(first_order(*arguments), scaled_down(*arguments)))
    name(left, "One step of key 1", "predicted change / |step|", "measured change / |step|")
    key_below(figure, left)
    along = measured[:, 0] @ F.normalize(v[0] - out[0], dim=0)
    right.hist(along.tolist(), bins=30, color=TRUTH)
    right.axvline(0, color=BLACK, linewidth=2)
    right.axvline(along.mean().item(), color=MISTAKE, linewidth=2, linestyle="--")
    label(right, along.mean().item(), 1.0, "mean", MISTAKE, xycoords=("data", "axes fraction"), offset=(6, -14))
    right.margins(y=0.15)
    name(right, "1000 random steps", "change towards $v_1$ / |step|", "number of steps")
    headline(figure, "A small step of a key moves the output along $v_1 - h$, zero on average")
    return figure


def draw_elongated_key(
    *, seed: int = 0, width: int = 8, n_keys: int = 6, alpha: float = 3.0, beta: float = 1.0
) -> "Figure":
    """Once key 1 is alpha times as long: the weights and outputs of some queries, and its own weight against alpha."""
    random = torch.Generator().manual_seed(seed)
    keys = torch.randn(n_keys, width, generator=random, dtype=torch.float64)
    queries = torch.randn(N_QUERIES, width, generator=random, dtype=torch.float64) / width**0.5
    values = torch.randn(n_keys, width, generator=random, dtype=torch.float64)
    scores = queries @ keys.T
    before, after = softargmax(scores, beta), softargmax(longer(scores, alpha), beta)
    formula, mistake = (
        torch.stack([rule(a, z, beta, alpha) for a, z in zip(before, scores, strict=True)])
        for rule in (exact, divided_by_alpha)
    )
    figure, (left, middle, right) = canvas("ABC")
    against(left, after, rules(formula, mistake), bins=3)
    name(left, f"Weights, alpha = {alpha:.3g}", "predicted", "measured")
    key_below(figure, left)
    against(
        middle, (after - before) @ values, rules(moved_output(before, formula, values), (mistake - before) @ values), 3
    )
    name(middle, "Change of the output", "predicted", "measured")
    draw_own_weight(right, before, scores, beta, alpha)
    headline(figure, "A longer key gains weight if its score is positive, and loses it otherwise")
    return figure


def moved_output(before: Tensor, after: Tensor, values: Tensor) -> Tensor:
    """h' - h = (A'_1 - A_1) / (1 - A_1) (v_1 - h), from the weights of key 1 alone. (Q,m), (Q,m), (m,E) -> (Q,E)"""
    gain = (after[:, :1] - before[:, :1]) / (1 - before[:, :1])
    return gain * (values[0] - before @ values)


def draw_own_weight(axes: "Axes", before: Tensor, scores: Tensor, beta: float, alpha: float) -> None:
    """The weight of the longer key against alpha, of one query with a positive score and of one with a negative."""
    low, high = min(1.0, max(alpha, 0.1)), max(alpha, 1.5)  # a shorter key is shown too
    alphas = torch.linspace(low, high, 37, dtype=torch.float64)
    own = scores[:, 0]
    for text, query in (("z > 0", own.argmax()), ("z < 0", before[:, 0].where(own < 0, -1).argmax())):
        a, z = before[query], scores[query]
        measured = [softargmax(longer(z, times), beta)[0].item() for times in alphas.tolist()]
        claimed = [divided_by_alpha(a, z, beta, times)[0].item() for times in alphas.tolist()]
        look: dict[str, Any] = {"linewidth": 3, "markersize": 8, "markevery": 9}
        axes.plot(alphas, claimed, "x--", color=MISTAKE, markeredgewidth=2, **look)
        axes.plot(alphas, measured, "o-", color=TRUTH, **look)
        label(axes, alphas[-1].item(), measured[-1], text, TRUTH, offset=(8, 0), va="center")
    axes.set_ylim(-0.05, 1.1)
    axes.set_xlim(low, low + 1.45 * (high - low))
    name(axes, "Weight, by score z", "alpha", "attention weight")
    axes.set_box_aspect(1)


def longer(scores: Tensor, alpha: float) -> Tensor:
    """The scores (...,m) once key 1 is alpha times as long."""
    return torch.cat([alpha * scores[..., :1], scores[..., 1:]], dim=-1)


def rules(formula: Tensor, mistake: Tensor) -> dict[str, tuple[Tensor, str, str]]:
    """Two predictions, as `against` draws them."""
    return {"formula": (formula, TRUTH, "o"), "misconception": (mistake, MISTAKE, "x")}
