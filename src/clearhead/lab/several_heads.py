"""Why several heads, and why not ever more: each answer needs four places at once. Trains three small models."""

import torch
from torch import Tensor, nn

from clearhead.lab.claim import Claim, Result, at_least
from clearhead.lab.learning import Task, accuracy, fit
from clearhead.models.config import PredictorConfig
from clearhead.models.predictor import SequencePredictor

LENGTH, DIGITS, N_PLACES = 16, 10, 4


def four_places(seed: int) -> Task:
    """Each place must name the digits of four other places, the same four in every sequence."""
    random = torch.Generator().manual_seed(seed)
    wanted = torch.stack([torch.randperm(LENGTH, generator=random) for _ in range(N_PLACES)], dim=1)  # (L,4)

    def task(random: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
        digits = torch.randint(0, DIGITS, (n, LENGTH), generator=random)
        return digits, digits[:, wanted]  # (n,L,4)

    return task


class FourAnswers(nn.Module):
    """A block of attention with four answers for each token. ids (n,L) -> logits (n,L,4,10)"""

    def __init__(self, width: int, n_heads: int):
        super().__init__()
        self.predictor = SequencePredictor(
            PredictorConfig(
                width=width,
                depth=1,
                n_heads=n_heads,
                hidden=2 * width,
                n_inputs=DIGITS,
                n_outputs=N_PLACES * DIGITS,
                positions="learned",
                context=LENGTH,
            )
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.predictor(ids).unflatten(-1, (N_PLACES, DIGITS))


def learnt(width: int, n_heads: int, steps: int, seed: int) -> float:
    """Right digits after training, with that many heads."""
    torch.manual_seed(seed)
    model, task = FourAnswers(width, n_heads), four_places(seed)
    fit(model, task, steps=steps, seed=seed, n_examples=64)
    return accuracy(model, task, seed=seed, n_examples=500)


def run(*, seed: int = 0, width: int = 32, n_heads: int = 4, steps: int = 300) -> Result:
    """n_heads are the "several": 1 asks of one head what holds of four."""
    one, several, many = (learnt(width, n, steps, seed) for n in (1, n_heads, width))
    return Result(
        (
            at_least(f"right digits with {n_heads} heads of width {width // n_heads}", several, 0.9),
            at_least(f"one head of width {width} gets fewer right, by", several - one, 0.1),
            at_least(f"{width} heads of width 1 get fewer right, by", several - many, 0.1),
        )
    )


CLAIM = Claim(
    slug="several-heads",
    rows=("R0.9",),
    lesson="Heads",
    statement="Where an answer needs several places at once, several heads beat one as wide; too many are worse.",
    mistake="More heads are always better, or never matter.",
    formula="equal parameters: n_heads x head width = width; a head mixes what it sees, a narrow one cannot aim",
    run=run,
    try_next="clearhead lab several-heads --n-heads 16",
    trains=True,
)
