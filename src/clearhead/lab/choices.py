"""Hard and soft attention: one value, or the mean of all; and when that is the identity."""

import math

import torch
from torch import Tensor

from clearhead.lab.claim import Claim, Result, at_least, at_most
from clearhead.lab.constructions import (
    SHARP,
    hard_attention_as_linear,
    identity,
    permutation,
    soft_attention_as_linear,
)
from clearhead.nn.attention import attend_reference


def run(*, seed: int = 0, width: int = 8, n_queries: int = 12, n_keys: int = 6, beta: float = math.inf) -> Result:
    """beta is that of hard attention. A finite one comes as close to a choice as the gap between scores allows."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, width, generator=random, dtype=torch.float64) for n in (n_queries, n_keys, n_keys))
    exact = 1e-12 if math.isinf(beta) else 1e-3
    checks = []
    for kind, queries in (("self", k), ("cross", q)):  # of self-attention, the keys ask as well
        hard, weights = attend_reference(queries, k, v, beta=beta)
        soft, _ = attend_reference(queries, k, v, beta=0.0)
        one_hot, constant = hard_attention_as_linear(queries @ k.T), soft_attention_as_linear(n_keys)
        checks += [
            at_most(f"hard, {kind}: distance of an output from the nearest value", furthest(hard, v), exact),
            at_most(f"hard, {kind}: distance from one-hot rows", distance(hard, one_hot @ v), exact),
            at_most(f"hard, {kind}: weight of all keys but the best", *rest_and_bound(weights, queries @ k.T, beta)),
            at_most(f"soft, {kind}: distance from a constant row", distance(soft, constant @ v), 1e-12),
        ]
    twice = attend_reference(k.roll(1, 0)[[0, *range(n_keys)]], k, v, beta=beta)[1]  # one query asks twice
    return Result(
        (
            *checks,
            at_most("hard, two best keys tie: distance from the mean of their values", tied(q[:1], k, v, beta), exact),
            at_most("soft: distance from the mean of the values", distance(soft, v.mean(0)), 1e-12),
            at_most("hard: distance of the weights' sums over keys from 1", distance(weights.sum(-1), 1.0), 1e-12),
            at_least("one query twice: distance of the sums over queries from 1", distance(twice.sum(-2), 1.0), 0.5),
        )
    )


def rest_and_bound(weights: Tensor, scores: Tensor, beta: float) -> tuple[float, float]:
    """The largest weight (of all queries) that is not the best key's; at most (m-1) e^(-beta gap), the gap being that
    between the two best scores. weights and scores (Q,K)"""
    n_keys = scores.shape[-1]
    if n_keys == 1:
        return 0.0, 0.0
    best = scores.topk(2, dim=-1)
    rest = weights.scatter(-1, best.indices[:, :1], 0.0).sum(-1).max().item()
    gap = (best.values[:, 0] - best.values[:, 1]).min().item()
    return rest, (n_keys - 1) * math.exp(-max(0.0, beta) * gap) + 1e-12


def tied(q: Tensor, k: Tensor, v: Tensor, beta: float) -> float:
    """One query (1,d) whose best key is there twice, with two values: the distance of its output from their mean."""
    q, k = (8 * q).round() / 8, (8 * k).round() / 8  # short enough for exact products: rounding would break the tie
    keys, values = torch.cat([k, k[(q @ k.T).argmax()][None]]), torch.cat([v, v.mean(0, keepdim=True) + 1])
    scores = (q @ keys.T)[0]
    return distance(attend_reference(q, keys, values, beta=beta)[0], values[scores == scores.max()].mean(0))


def distance(a: Tensor, b: Tensor | float) -> float:
    return (a - b).abs().max().item()


def furthest(outputs: Tensor, values: Tensor) -> float:
    """The largest distance of an output from the value that is nearest to it."""
    return torch.cdist(outputs, values, compute_mode="donot_use_mm_for_euclid_dist").amin(1).max().item()


def run_permutation(
    *, seed: int = 0, width: int = 8, n_tokens: int = 6, beta: float = SHARP, by_place: bool = True
) -> Result:
    """by_place=False lets the tokens themselves ask and be asked, and trusts in beta: the mistake."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(1, n_tokens, width, generator=random, dtype=torch.float64)
    order = torch.randperm(n_tokens, generator=random)
    both = torch.tensor([[1.0, 0.0], [3.0, 0.0]], dtype=torch.float64)
    with torch.no_grad():
        same = attend_reference(both, both, both, beta=math.inf)[0]
        kept = identity(width, n_tokens, beta)(x) if by_place else attend_reference(x, x, x, beta=beta)[0]
        moved = permutation(x, order, beta) if by_place else attend_reference(x[:, order], x, x, beta=beta)[0]
    return Result(
        (
            at_most("distance from the permuted tokens", distance(moved, x[:, order]), 1e-9),
            at_most("distance from the tokens themselves", distance(kept, x), 1e-9),
            at_most("x1=[1,0], x2=[3,0] at beta inf: distance of both outputs from x2", distance(same, both[1]), 0.0),
        )
    )


HARD_AND_SOFT = Claim(
    slug="hard-and-soft",
    kind="demonstration",
    rows=("R4.2", "R4.3"),
    lesson="Softargmax and its temperature",
    statement="At beta = inf each output is one of the values, repeats allowed, or the mean of several whose keys tie; "
    "at beta = 0 it is the mean of all.",
    mistake="Hard attention preserves all values: rows and columns of the weights sum to 1.",
    formula="beta = inf: h_j = mean of v_i over all i of the largest q_j·k_i;  beta = 0: h_j = (1/m) sum_i v_i;  "
    "0 < beta: all weights but the largest sum to at most (m-1) e^(-beta gap)",
    run=run,
    try_next="clearhead lab permutation",
)

PERMUTATION = Claim(
    slug="permutation",
    kind="demonstration",
    rows=("R4.9",),
    lesson="What attention can compute",
    statement="Attention is the identity or a permutation if the best keys form one; a large beta alone is not enough.",
    mistake="A large beta makes self-attention the identity.",
    formula="argmax_j q_i·k_j = order(i), W_V = W_O = I, beta large",
    run=run_permutation,
    try_next="clearhead lab permutation --beta 2",
)
