"""Several heads within a training budget: each output needs four positions at once. Trains three small models."""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from clearhead.lab.claim import Claim, Curve, Result, at_least
from clearhead.lab.learning import Task, budgets_of, learning_curve, mean_over_seeds
from clearhead.lab.plots import draw_measured
from clearhead.models.config import PredictorConfig
from clearhead.models.predictor import SequencePredictor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTH, DIGITS, N_PLACES = 16, 10, 4
LONG = 5
"""times the budget: enough for one head to catch up"""


def four_places(seed: int) -> Task:
    """Each position must name the digits of four other positions, the same four in every sequence."""
    random = torch.Generator().manual_seed(seed)
    wanted = torch.stack([torch.randperm(LENGTH, generator=random) for _ in range(N_PLACES)], dim=1)  # (L,4)

    def task(random: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
        digits = torch.randint(0, DIGITS, (n, LENGTH), generator=random)
        return digits, digits[:, wanted]  # (n,L,4)

    return task


class FourAnswers(nn.Module):
    """One encoder block with four outputs for each token. ids (n,L) -> logits (n,L,4,10)"""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.predictor = SequencePredictor(
            PredictorConfig(
                width=width,
                depth=1,
                num_heads=num_heads,
                mlp_dim=2 * width,
                in_features=DIGITS,
                out_features=N_PLACES * DIGITS,
                pos_embed="learned",
                context_length=LENGTH,
            )
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.predictor(ids).unflatten(-1, (N_PLACES, DIGITS))


def accuracies(width: int, num_heads: int, budgets: list[int], seed: int) -> list[float]:
    """Accuracy after each training budget, with that many heads."""
    torch.manual_seed(seed)
    return learning_curve(FourAnswers(width, num_heads), four_places(seed), budgets=budgets, seed=seed, batch_size=32)


def run_several_heads(
    *, seed: int = 0, num_seeds: int = 3, width: int = 32, num_heads: int = 4, steps: int = 250
) -> Result:
    """num_heads is the number of heads that is called "several"; with 1, one head is asked for what holds of four."""
    budgets = budgets_of(steps, 0.25, 0.5, 1, 2, LONG)
    at, until = budgets.index(steps), {width: budgets_of(steps, 0.25, 0.5, 1, 2), 1: budgets, num_heads: budgets}
    found = {
        n: mean_over_seeds(partial(accuracies, width, n, trained), seed, num_seeds) for n, trained in until.items()
    }
    one, several, many = (found[n][at] for n in (1, num_heads, width))
    checks = (
        at_least(f"{num_heads} heads of width {width // num_heads}, {steps} steps: accuracy", several, 0.9),
        at_least(f"their lead over one head of width {width}", several - one, 0.1),
        at_least(f"their lead over {width} heads of width 1", several - many, 0.1),
        at_least(f"one head, {budgets[-1]} steps: accuracy", found[1][-1], 0.8),
    )
    return Result(checks, tuple(curve(n, width, until[n], found[n]) for n in sorted(found)))


def curve(num_heads: int, width: int, budgets: list[int], accuracy: list[float]) -> Curve:
    """Accuracy against training steps."""
    plural = "head" if num_heads == 1 else "heads"
    return Curve("accuracy", f"{num_heads} {plural} of width {width // num_heads}", tuple(budgets), tuple(accuracy))


SEVERAL_HEADS = Claim(
    slug="several-heads",
    rows=("R0.9",),
    lesson="Heads",
    statement="Where an output depends on several positions at once, several heads learn it within a training budget "
    "that is too small for one head of the same total width, and for many heads of width 1. With five times the "
    "budget, one head nearly catches up.",
    mistake="More heads are always better, or never matter; or: one head cannot learn it at all.",
    formula="equal parameters: num_heads x head width = width; a head mixes what it sees, a narrow one cannot aim",
    conditions="One block, 250 training steps; the curve shows the accuracy over training budgets. "
    "Float32, the mean of three seeds.",
    run=run_several_heads,
    try_next="clearhead lab several-heads --num-heads 16",
    trains=True,
    seconds=40,
)


# Training: figures of what a training measured, and what training does that evaluation does not.


def draw_several_heads(result: Result) -> "Figure":
    return draw_measured(result, "Several heads need fewer training steps than one as wide, or than many")
