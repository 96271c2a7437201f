"""A small random step of one key: how every output moves."""

from collections.abc import Callable

import torch
from torch import Tensor

from clearhead.lab.claim import Check, Claim, Result, at_most, equals
from clearhead.nn.attention import attend_reference

Rule = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""(weights of key a (n,), eps·q (n,), v_a (t,), out (n,t), beta) -> first-order change of the outputs (n,t)"""


def first_order(weight: Tensor, step: Tensor, v_a: Tensor, out: Tensor, beta: float) -> Tensor:
    """beta A_aj (eps·q_j) (v_a - h_j)"""
    return beta * (weight * step)[:, None] * (v_a - out)


def scaled_down(weight: Tensor, step: Tensor, v_a: Tensor, out: Tensor, beta: float) -> Tensor:
    """The mistake: the weight of the key falls, whichever way the key moved."""
    return -beta * (weight * step.abs())[:, None] * (v_a - out)


def run(
    *, seed: int = 0, width: int = 8, n_keys: int = 6, beta: float = 1.0, size: float = 1e-6, rule: Rule = first_order
) -> Result:
    """Queries have variance 1/width and keys variance 1, so that beta = 1 is the usual scale."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, width, generator=random, dtype=torch.float64) for n in (5, n_keys, n_keys))
    q /= width**0.5
    eps = torch.randn(width, generator=random, dtype=torch.float64)
    eps = size * eps / eps.norm()
    out, weights = attend_reference(q, k, v, beta=beta)
    moved = k.clone()
    moved[0] += eps
    # Central difference: the terms of second order are the same on both sides, and cancel.
    back = k.clone()
    back[0] -= eps
    measured = (attend_reference(q, moved, v, beta=beta)[0] - attend_reference(q, back, v, beta=beta)[0]) / 2
    predicted = rule(weights[:, 0], q @ eps, v[0], out, beta)
    error = (measured - predicted).norm() / measured.norm()
    remainder = (beta * q @ eps).abs().max().item() ** 2 / 2  # of the terms of third order, relative to the first
    still = int((measured.norm(dim=1) == 0).sum())
    return Result(
        (
            at_most("relative error of the first-order formula", error.item(), max(1e-5, remainder)),
            at_most("outputs that did not move at all", still, 0.0),
            *second_order(random, q[0], k, v, beta),
        )
    )


def second_order(random: torch.Generator, q: Tensor, k: Tensor, v: Tensor, beta: float) -> list[Check]:
    """Random steps of variance s²: which way they move the output, and the mean against the formula."""
    out, weights = attend_reference(q[None], k, v, beta=beta)
    share = weights[0, 0]
    s = 0.05 / (beta * q.norm())  # small enough for the third order to stay away
    steps = torch.randn(20_000, 1, len(q), generator=random, dtype=torch.float64)
    steps *= s * q.norm() / (steps @ q).square().mean().sqrt()  # their spread along q is s² exactly, not nearly
    total, closer = torch.zeros_like(out), 0.0
    for sign in (1, -1):  # each step and its opposite: the first-order part, a control variate, drops out
        moved = k.repeat(len(steps), 1, 1)
        moved[:, 0] += sign * steps[:, 0]
        queries = q.expand(len(steps), 1, -1)
        outputs = attend_reference(queries, moved, v.expand(len(steps), -1, -1), beta=beta)[0]
        total += outputs.mean(0) / 2
        if sign == 1:
            closer = ((outputs - out) @ (v[0] - out[0]) > 0).double().mean().item()
    scale = 0.5 * beta**2 * s**2 * q.square().sum() * share * (v[0] - out)
    error = (total - out - scale * (1 - 2 * share)).norm() / scale.norm()
    return [
        equals("share of random steps that bring the output closer to v_a", closer, 0.5, 0.03),
        at_most("error of the second-order mean, over ½ beta² s² |q|² A_a |v_a - h|", error.item(), 0.02),
    ]


CLAIM = Claim(
    slug="moved-key",
    kind="demonstration",
    rows=("R4.4",),
    lesson="Attention and its weights",
    statement="A small random step of key a moves every output to or from v_a; to first order, zero on average.",
    conditions="The step is small: the first-order formula is off by a part of the order of (beta eps·q_j)².",
    mistake="The attention paid to the moved key is always scaled down.",
    formula="dh_j = beta A_aj (eps·q_j)(v_a - h_j);  E[dh_j] = ½ beta² s² |q_j|² A_a (1 - 2 A_a)(v_a - h_j)",
    run=run,
    try_next="clearhead lab moved-key --size 0.1",
    least={"n_keys": 2, "beta": 0.01, "size": 1e-9},
    most={"width": 1024, "beta": 2, "size": 1},
)
