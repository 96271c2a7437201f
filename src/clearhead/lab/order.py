"""When positions are needed: a task of order, and one of content. Trains three small models."""

import torch
from torch import Tensor, nn

from clearhead.lab.claim import Claim, Result, at_least, at_most
from clearhead.lab.learning import learning_curve, mean_over_seeds
from clearhead.models.config import Places, PredictorConfig
from clearhead.models.predictor import SequencePredictor

LENGTH, DIGITS, POINT, N_TEST = 16, 10, 8, 2_000


def reversal(random: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
    """Digits (n,L), to be said backwards."""
    digits = torch.randint(0, DIGITS, (n, LENGTH), generator=random)
    return digits, digits.flip(1)


def odd_one_out(random: torch.Generator, n: int, width: int = POINT) -> tuple[Tensor, Tensor]:
    """Sets of points (n,L,width) around one centre, but for one point; the target (n,) is its index."""
    centre, other = 2 * torch.randn(2, n, 1, width, generator=random)
    index = torch.randint(0, LENGTH, (n,), generator=random)
    points = centre.expand(n, LENGTH, width).clone()
    points[torch.arange(n), index] = other[:, 0]
    return points + 0.3 * torch.randn(points.shape, generator=random), index


def bag_limit(random: torch.Generator, n: int) -> float:
    """The best share of right digits for who knows its own digit and the others' counts, but no place.

    Its answer is never its own place's, so the best guess is the commonest of the 15 other digits.
    """
    digits, _ = reversal(random, n)
    counts = nn.functional.one_hot(digits, DIGITS).sum(1)  # (n,DIGITS)
    others = counts[:, None] - nn.functional.one_hot(digits, DIGITS)  # (n,L,DIGITS)
    return (others.amax(-1).double() / (LENGTH - 1)).mean().item()


class Scores(nn.Module):
    """One score for each element of a set, from a predictor with one output each. (n,L,width) -> (n,L)"""

    def __init__(self, predictor: SequencePredictor):
        super().__init__()
        self.predictor = predictor

    def forward(self, points: Tensor) -> Tensor:
        return self.predictor(points).squeeze(-1)


def predictor(width: int, positions: Places, n_inputs: int, n_outputs: int) -> SequencePredictor:
    config = PredictorConfig(
        width=width,
        depth=1,
        n_heads=1,
        hidden=2 * width,
        norm="post",
        n_inputs=n_inputs,
        n_outputs=n_outputs,
        head_hidden=width,
        positions=positions,
    )
    return SequencePredictor(config)


def reversed_digits(width: int, positions: Places, steps: int, seed: int) -> float:
    """Accuracy of a model that learns to reverse digits, with these positions."""
    torch.manual_seed(seed)
    model = predictor(width, positions, DIGITS, DIGITS)
    (accuracy,) = learning_curve(model, reversal, budgets=[steps], seed=seed, batch_size=128, num_test=N_TEST)
    return accuracy


def odd_ones_found(width: int, steps: int, seed: int) -> float:
    """Accuracy of a model without positions that learns to point at the odd one out."""
    torch.manual_seed(seed)
    scores = Scores(predictor(width, "none", POINT, 1))
    (accuracy,) = learning_curve(scores, odd_one_out, budgets=[steps], seed=seed, batch_size=128, num_test=2_000)
    return accuracy


def accuracies(width: int, steps: int, positions: Places, seed: int) -> list[float]:
    """With positions, without them, that of the best guess without them, and of the task that needs none."""
    return [
        reversed_digits(width, positions, steps, seed),
        reversed_digits(width, "none", steps, seed),
        bag_limit(torch.Generator().manual_seed(seed), N_TEST),
        odd_ones_found(width, steps, seed),
    ]


def run(*, seed: int = 0, num_seeds: int = 3, width: int = 32, steps: int = 300, placed: bool = True) -> Result:
    """placed=False asks of the model without positions what holds with them."""
    positions: Places = "sinusoidal" if placed else "none"
    with_places, without, limit, found = mean_over_seeds(
        lambda each: accuracies(width, steps, positions, each), seed, num_seeds
    )
    return Result(
        (
            at_least("reversal with positions: accuracy", with_places, 0.9),
            at_most("reversal without positions: accuracy above that of the best guess", without - limit, 0.02),
            at_least("reversal without positions: accuracy", without, 0.15),
            at_least("odd one out of 16, without positions: accuracy", found, 0.9),
        )
    )


CLAIM = Claim(
    slug="positions",
    rows=("R4.8",),
    lesson="Positions and order",
    statement="Positions are needed where order matters: reversal cannot be learned without them, odd-one-out can.",
    mistake="A transformer always needs positions; or: it learns the order by itself.",
    formula="without positions the output for a token depends on its own content and the bag of the others only",
    conditions="One encoder block without a causal mask, trained for 300 steps. Float32, the mean of three seeds.",
    run=run,
    try_next="clearhead lab positions --steps 1000",
    multiples={"width": 2},
    trains=True,
    seconds=20,
)
