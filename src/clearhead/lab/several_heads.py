"""The number of heads at equal width, within a training budget, in a task whose outputs depend on four positions."""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from clearhead.lab.claim import Claim, Curve, Result, at_least
from clearhead.lab.learning import Task, learning_curve, mean_over_seeds, step_budgets
from clearhead.lab.plots import draw_measured
from clearhead.models.config import PredictorConfig
from clearhead.models.predictor import SequencePredictor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTH, DIGITS, NUM_OUTPUTS = 16, 10, 4


LONG_FACTOR = 5
"""multiple of the budget after which one head nearly catches up"""


def four_digits_task(seed: int) -> Task:
    """The targets of each position are the digits at four positions, which are the same in every sequence."""
    random = torch.Generator().manual_seed(seed)
    sources = torch.stack([torch.randperm(LENGTH, generator=random) for _ in range(NUM_OUTPUTS)], dim=1)  # (L,4)

    def task(random: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
        digits = torch.randint(0, DIGITS, (n, LENGTH), generator=random)
        return digits, digits[:, sources]  # (n,L,4)

    return task


class FourDigitModel(nn.Module):
    """One encoder block with four outputs per token. ids (n,L) -> logits (n,L,4,10)"""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.predictor = SequencePredictor.from_config(
            PredictorConfig(
                width=width,
                depth=1,
                num_heads=num_heads,
                mlp_dim=2 * width,
                in_features=DIGITS,
                out_features=NUM_OUTPUTS * DIGITS,
                pos_embed="learned",
                context_length=LENGTH,
            )
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.predictor(ids).unflatten(-1, (NUM_OUTPUTS, DIGITS))


def accuracies(width: int, num_heads: int, budgets: list[int], seed: int) -> list[float]:
    """Accuracy after each number of training steps."""
    torch.manual_seed(seed)
    return learning_curve(
        FourDigitModel(width, num_heads), four_digits_task(seed), budgets=budgets, seed=seed, batch_size=32
    )


def run_several_heads(
    *, seed: int = 0, num_seeds: int = 3, width: int = 32, num_heads: int = 4, steps: int = 250
) -> Result:
    """num_heads is compared with a single head and with `width` heads of width 1."""
    budgets = step_budgets(steps, 0.25, 0.5, 1, 2, LONG_FACTOR)
    index = budgets.index(steps)
    trained_for = {width: step_budgets(steps, 0.25, 0.5, 1, 2), 1: budgets, num_heads: budgets}
    accuracy_by_heads = {
        n: mean_over_seeds(partial(accuracies, width, n, budget), seed, num_seeds) for n, budget in trained_for.items()
    }
    one, several, many = (accuracy_by_heads[n][index] for n in (1, num_heads, width))
    checks = (
        at_least(f"{num_heads} heads of width {width // num_heads}, {steps} steps: accuracy", several, 0.9),
        at_least(f"lead over one head of width {width}", several - one, 0.1),
        at_least(f"lead over {width} heads of width 1", several - many, 0.1),
        at_least(f"one head, {budgets[-1]} steps: accuracy", accuracy_by_heads[1][-1], 0.8),
    )
    return Result(
        checks, tuple(curve(n, width, trained_for[n], accuracy_by_heads[n]) for n in sorted(accuracy_by_heads))
    )


def curve(num_heads: int, width: int, budgets: list[int], accuracy: list[float]) -> Curve:
    """Accuracy against training steps."""
    plural = "head" if num_heads == 1 else "heads"
    return Curve("accuracy", f"{num_heads} {plural} of width {width // num_heads}", tuple(budgets), tuple(accuracy))


def draw_several_heads(result: Result) -> "Figure":
    return draw_measured(result, "Several heads learn faster than one wide head or many narrow heads")


SEVERAL_HEADS = Claim(
    slug="several-heads",
    lesson="Multi-head attention",
    statement="If each output depends on several positions, several heads learn the task within a training budget "
    "that is too small for a single head and for many heads of width 1, at equal total width. With five times the "
    "budget, a single head nearly catches up.",
    misconception="More heads are always better, the number of heads does not matter, or a single head cannot learn "
    "the task at all.",
    formula="num_heads · head width = width: all models have the same number of parameters",
    conditions="One encoder block of width 32, 250 training steps in float32; mean of three seeds.",
    run=run_several_heads,
    figure=draw_several_heads,
    try_next="clearhead lab several-heads --num-heads 16",
    trains=True,
    seconds=40,
)
