"""Hard and soft attention: one value, or the mean of all; and when that is the identity."""

import math

import torch

from clearhead.lab.claim import Claim, Result, at_least, at_most
from clearhead.lab.constructions import (
    SHARP,
    hard_attention_as_linear,
    permutation,
    soft_attention_as_linear,
)
from clearhead.nn.attention import attend_reference


def run(*, seed: int = 0, width: int = 8, n_queries: int = 12, n_keys: int = 6, beta: float = math.inf) -> Result:
    """beta is that of hard attention."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, width, generator=random, dtype=torch.float64) for n in (n_queries, n_keys, n_keys))
    hard, weights = attend_reference(q, k, v, beta=beta)
    soft, _ = attend_reference(q, k, v, beta=0.0)
    chosen = weights.argmax(-1)
    return Result(
        (
            at_most(
                "hard: distance from one-hot rows",
                (hard - hard_attention_as_linear(q @ k.T) @ v).abs().max().item(),
                1e-12,
            ),
            at_most("hard: different values among the outputs", len(set(chosen.tolist())), min(n_keys, n_queries)),
            at_most(
                "hard: distance of the weights' sums over keys from 1", (weights.sum(-1) - 1).abs().max().item(), 1e-12
            ),
            at_least("hard: distance of their sums over queries from 1", (weights.sum(-2) - 1).abs().max().item(), 0.5),
            at_most(
                "soft: distance from a constant row",
                (soft - soft_attention_as_linear(n_keys) @ v).abs().max().item(),
                1e-12,
            ),
        )
    )


def run_permutation(*, seed: int = 0, width: int = 8, n_tokens: int = 6, beta: float = SHARP) -> Result:
    random = torch.Generator().manual_seed(seed)
    x, order = (
        torch.randn(1, n_tokens, width, generator=random, dtype=torch.float64),
        torch.randperm(n_tokens, generator=random),
    )
    identity = torch.arange(n_tokens)
    both = torch.tensor([[1.0, 0.0], [3.0, 0.0]], dtype=torch.float64)
    same = attend_reference(both, both, both, beta=math.inf)[0]
    return Result(
        (
            at_most(
                "distance from the permuted tokens",
                (permutation(x, order, beta) - x[:, order]).abs().max().item(),
                1e-9,
            ),
            at_most(
                "distance from the tokens themselves", (permutation(x, identity, beta) - x).abs().max().item(), 1e-9
            ),
            at_most(
                "x1=[1,0], x2=[3,0] at beta inf: distance of both outputs from x2",
                (same - both[1]).abs().max().item(),
                0.0,
            ),
        )
    )


HARD_AND_SOFT = Claim(
    slug="hard-and-soft",
    rows=("R4.2", "R4.3"),
    lesson="Softargmax and its temperature",
    statement="At beta = inf each output is one of the values, repeats allowed; at beta = 0 it is the mean of all.",
    mistake="Hard attention preserves all values: rows and columns of the weights sum to 1.",
    formula="beta = inf: h_j = v_argmax;  beta = 0: h_j = (1/m) sum_i v_i",
    run=run,
    try_next="clearhead lab permutation",
)

PERMUTATION = Claim(
    slug="permutation",
    rows=("R4.9",),
    lesson="What attention can compute",
    statement="Attention is the identity or a permutation if the best keys form one; a large beta alone is not enough.",
    mistake="A large beta makes self-attention the identity.",
    formula="argmax_j q_i·k_j = order(i), W_V = W_O = I, beta large",
    run=run_permutation,
    try_next="clearhead lab permutation --beta 2",
)
