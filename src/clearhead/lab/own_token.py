"""Does a token attend to itself most? With random weights, and in a model that was trained to reverse its input."""

import torch
from torch import Tensor

from clearhead.insight.look import look
from clearhead.lab.claim import Check, Claim, Result, at_least, at_most
from clearhead.lab.learning import one_thread
from clearhead.nn.attention import attend_reference
from clearhead.recipes.all import config_of
from clearhead.training.distributed import ALONE
from clearhead.training.loop import update
from clearhead.training.setup import Setup, set_up
from clearhead.training.signals import StopRequest
from clearhead.training.state import Standing

N_TEST = 1_000


def run(
    *, seed: int = 0, width: int = 16, n_tokens: int = 8, steps: int = 200, same_projection: bool = False
) -> Result:
    """width and n_tokens are those of the layer with random weights; steps are those of the recipe `reverse`.
    same_projection makes the layer's queries and keys equal and of one length: of it, the misconception is true."""
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
            *of_reversal(trained_to_reverse(steps, seed)),
        )
    )


def own_largest(weights: Tensor) -> float:
    """The fraction of rows whose largest weight is on the diagonal. (B,L,L)"""
    return (weights.argmax(-1) == torch.arange(weights.shape[-1])).double().mean().item()


def trained_to_reverse(steps: int, seed: int) -> Setup:
    """The recipe `reverse` after so many steps, with GELU: with ReLU, one seed in fifteen or so learns nothing."""
    changes = {"seed": seed, "model.activation": "gelu", "training.steps": steps, "training.precision": "float32"}
    setup, standing = set_up(config_of("reverse", changes), ALONE, shard=False, report=print), Standing()
    setup.model.train()
    with one_thread():
        while standing.step < steps:
            update(setup, standing, StopRequest())
    setup.model.eval()
    return setup


@torch.no_grad()
def of_reversal(setup: Setup) -> list[Check]:
    """One block with one head: to reverse 16 digits, token i has to attend to token 15 - i."""
    digits, reversed_digits = setup.data.test.take(torch.arange(N_TEST))
    seen = look(setup.model, digits)
    (layer,) = seen
    weights = seen[layer].weights()[:, 0]  # (B,L,L)
    own, opposite = (each.diagonal(dim1=-2, dim2=-1).mean().item() for each in (weights, weights.flip(-1)))
    right = (seen.output.argmax(-1) == reversed_digits).double().mean().item()
    return [
        at_least("trained to reverse: fraction of digits that are right", right, 0.95),
        at_most("trained to reverse: fraction of tokens that attend most to themselves", own_largest(weights), 0.1),
        at_most("trained to reverse: mean weight of a token for itself", own, 0.1),
        at_least("trained to reverse: mean weight of a token for its opposite", opposite, 0.3),
    ]


CLAIM = Claim(
    slug="own-token",
    rows=("R1.5",),
    lesson="Attention and its weights",
    statement="A token need not attend to itself most: with random weights few tokens do, and in a model that was "
    "trained to reverse its input none.",
    mistake="The current word always has the highest weight.",
    conditions="The trained model is the recipe reverse, with GELU for ReLU: one block with one head, 16 digits.",
    formula="argmax_j q_i·k_j = i only if W_Q and W_K make it so",
    run=run,
    try_next="clearhead lab own-token --same-projection true",
    least={"n_tokens": 2},
    trains=True,
)
