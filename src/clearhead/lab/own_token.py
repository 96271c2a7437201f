"""Does a token attend to itself most? With random weights, and in a model that was trained to reverse its input."""

from dataclasses import replace

import torch
from torch import Tensor

from clearhead.insight.look import look
from clearhead.lab.claim import Check, Claim, Result, at_least, at_most
from clearhead.lab.learning import Task, accuracy, fit
from clearhead.models import presets
from clearhead.models.predictor import SequencePredictor
from clearhead.nn.attention import attend_reference

DIGITS = 10


def run(
    *, seed: int = 0, width: int = 32, n_tokens: int = 16, steps: int = 200, same_projection: bool = False
) -> Result:
    """steps are those of the model that is trained to reverse. same_projection makes queries and keys of the random
    weights equal and of one length: the misconception is then true of them."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(64, n_tokens, width, generator=random, dtype=torch.float64)
    w_q, w_k = torch.randn(2, width, width, generator=random, dtype=torch.float64) / width**0.5
    q, k = x @ w_q, x @ w_k
    if same_projection:
        k = q = q / q.norm(dim=-1, keepdim=True)
    weights = attend_reference(q, k, x)[1]
    return Result(
        (
            at_most("random weights: fraction of tokens that attend most to themselves", own_largest(weights), 0.9),
            *trained(seed, width, n_tokens, steps),
        )
    )


def own_largest(weights: Tensor) -> float:
    """The fraction of rows whose largest weight is on the diagonal. (B,L,L)"""
    return (weights.argmax(-1) == torch.arange(weights.shape[-1])).double().mean().item()


def reversal(n_tokens: int) -> Task:
    def draw(random: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
        digits = torch.randint(0, DIGITS, (n, n_tokens), generator=random)
        return digits, digits.flip(1)

    return draw


def trained(seed: int, width: int, n_tokens: int, steps: int) -> list[Check]:
    """One block with one head, as the recipe `reverse` has it: token i has to attend to token n - 1 - i."""
    torch.manual_seed(seed)
    model, task = SequencePredictor(replace(presets.reverse(), width=width, context=n_tokens)), reversal(n_tokens)
    fit(model, task, steps=steps, seed=seed)
    model.eval()
    digits, _ = task(torch.Generator().manual_seed(seed), 64)
    with torch.no_grad():
        seen = look(model, digits)
        (layer,) = seen
        weights = seen[layer].weights()[:, 0]  # (B,L,L)
    own = weights.diagonal(dim1=-2, dim2=-1).mean().item()
    return [
        at_least("trained to reverse: fraction of digits that are right", accuracy(model, task, seed=seed), 0.95),
        at_most("trained to reverse: fraction of tokens that attend most to themselves", own_largest(weights), 0.5),
        at_most("trained to reverse: mean weight of a token for itself", own, 0.5),
    ]


CLAIM = Claim(
    slug="own-token",
    rows=("R1.5",),
    lesson="Attention and its weights",
    statement="A token need not attend to itself most: with random weights few tokens do, and in a model that was "
    "trained to reverse its input next to none.",
    mistake="The current word always has the highest weight.",
    formula="argmax_j q_i·k_j = i only if W_Q and W_K make it so",
    run=run,
    try_next="clearhead lab own-token --same-projection true",
    least={"n_tokens": 2},
    most={"n_tokens": 64, "width": 256},
    multiples={"width": 2},
    trains=True,
)
