"""Does a token attend to itself most? With random weights, and in a model that was trained to reverse its input."""

import torch
from torch import Tensor

from clearhead.insight.look import look
from clearhead.lab.claim import Claim, Result, at_least, at_most
from clearhead.lab.learning import mean_over_seeds, one_thread, train_recipe
from clearhead.nn.attention import attend_reference

N_TEST = 1_000


def run(
    *,
    seed: int = 0,
    num_seeds: int = 3,
    width: int = 16,
    n_tokens: int = 8,
    steps: int = 200,
    same_projection: bool = False,
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
    right, most, own, opposite = mean_over_seeds(lambda each: of_reversal(steps, each), seed, num_seeds)
    return Result(
        (
            at_most("random weights: fraction of tokens that attend most to themselves", own_largest(weights), 0.9),
            at_least("trained to reverse: fraction of digits that are right", right, 0.95),
            at_most("trained to reverse: fraction of tokens that attend most to themselves", most, 0.1),
            at_most("trained to reverse: mean weight of a token for itself", own, 0.1),
            at_least("trained to reverse: mean weight of a token for its opposite", opposite, 0.3),
        )
    )


def own_largest(weights: Tensor) -> float:
    """The fraction of rows whose largest weight is on the diagonal. (B,L,L)"""
    return (weights.argmax(-1) == torch.arange(weights.shape[-1])).double().mean().item()


@torch.no_grad()
def of_reversal(steps: int, seed: int) -> list[float]:
    """Accuracy and attention weights of the recipe `reverse` after `steps` steps. One block, one head: token i has to
    attend to token 15 - i."""
    with one_thread(), torch.enable_grad():
        setup = train_recipe("reverse", {"seed": seed}, steps)
    digits, reversed_digits = setup.data.test.take(torch.arange(N_TEST))
    seen = look(setup.model, digits)
    (layer,) = seen
    weights = seen[layer].weights()[:, 0]  # (B,L,L)
    own, opposite = (each.diagonal(dim1=-2, dim2=-1).mean().item() for each in (weights, weights.flip(-1)))
    right = (seen.output.argmax(-1) == reversed_digits).double().mean().item()
    return [right, own_largest(weights), own, opposite]


CLAIM = Claim(
    slug="own-token",
    rows=("R1.5",),
    lesson="Attention and its weights",
    statement="A token need not attend to itself most: with random weights few tokens do, and in a model that was "
    "trained to reverse its input none.",
    mistake="The current word always has the highest weight.",
    conditions="The trained model is the recipe reverse: one block with one head, 16 digits. Float32, the mean of "
    "three seeds.",
    formula="argmax_j q_i·k_j = i only if W_Q and W_K make it so",
    run=run,
    try_next="clearhead lab own-token --same-projection true",
    least={"n_tokens": 2},
    trains=True,
    seconds=10,
)
