"""The gradient from the last output of an untrained encoder-decoder to its first input."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.lab.claim import Claim, Result, at_least, at_most
from clearhead.lab.rivals import N_TOKENS, NAMES, TRANSFORMER, WITH, WITHOUT, rival, spread

SHORT = 4
"""tokens of the sequence that others are compared with"""
N_EXAMPLES = 16


def end_to_end(model: nn.Module, length: int, width: int, random: torch.Generator) -> float:
    """Norm of the gradient of the last output's loss by the first input, the mean of some random sequences."""
    source = torch.randn(N_EXAMPLES, length, width, generator=random, dtype=torch.float64, requires_grad=True)
    target, answers = torch.randint(N_TOKENS, (2, N_EXAMPLES, length), generator=random)
    last: Tensor = model(None, target, inputs_embeds=source)[:, -1]
    (gradient,) = torch.autograd.grad(F.cross_entropy(last, answers[:, -1], reduction="sum"), source)
    return gradient[:, 0].norm(dim=-1).mean().item()


def fading(model: nn.Module, lengths: Sequence[int], width: int, seed: int) -> list[float]:
    """The gradient at each length, in units of that at the first of them."""
    random = torch.Generator().manual_seed(seed)
    found = [end_to_end(model, length, width, random) for length in lengths]
    return [gradient / found[0] for gradient in found]


def untrained(width: int, forget: float, seed: int) -> dict[str, nn.Module]:
    """The three models with random weights; float64, for the gradients become very small."""
    torch.manual_seed(seed)
    return {name: rival(name, width, forget=forget).double() for name in NAMES}


def run(*, seed: int = 0, width: int = 32, length: int = 64, forget: float = 1.0, attends: bool = True) -> Result:
    """attends=False asks of the LSTM without attention what holds with it; forget=8 holds the LSTMs' cells open."""
    models = untrained(width, forget, seed)
    left = {name: fading(model, (SHORT, length), width, seed)[-1] for name, model in models.items()}
    further = length / SHORT
    return Result(
        (
            at_most("parameters of the largest model over the smallest", spread(list(models.values())), 1.05),
            at_least(f"transformer: gradient left, times {further:g}", left[TRANSFORMER] * further, 0.3),
            at_least("LSTM with attention: the same", left[WITH if attends else WITHOUT] * further, 0.3),
            at_most("LSTM alone: the same", left[WITHOUT] * further, 0.01),
        )
    )


CLAIM = Claim(
    slug="gradient-path",
    rows=("R4.12",),
    lesson="Beside recurrence",
    statement="In untrained models, the gradient from the last output to the first input falls as 1/length through "
    "attention, and exponentially through an LSTM whose forget gates are not held open.",
    mistake="An LSTM's cell carries the gradient over any distance.",
    conditions="Random weights: the gradient with which training starts, not that of trained models, whose gates and "
    "attention weights may be anything.",
    formula="attention: 1 step, its weight about 1/n;  LSTM: 2n steps, each of d c_t / d c_(t-1) = f_t + ..., f_t < 1",
    run=run,
    try_next="clearhead lab gradient-path --forget 8",
    least={"width": 16, "length": 32, "forget": -10},
    most={"width": 256, "length": 256, "forget": 100},
    multiples={"width": 2},
)
