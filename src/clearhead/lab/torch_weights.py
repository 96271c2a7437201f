"""Where torch.nn keeps W_Q, W_K and W_V."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from clearhead.lab.claim import Claim, Result, at_most
from clearhead.nn.attention import attend_reference

Reader = Callable[[Tensor], tuple[Tensor, ...]]


def blocks(packed: Tensor) -> tuple[Tensor, ...]:
    """Three equal blocks of rows."""
    return packed.chunk(3)


def rows(packed: Tensor) -> tuple[Tensor, ...]:
    """The mistake: rows 0, 1 and 2."""
    return tuple(packed[i].expand(packed.shape[1], -1) for i in range(3))


def run(*, seed: int = 0, width: int = 16, n_tokens: int = 5, read: Reader = blocks) -> Result:
    torch.manual_seed(seed)
    module = nn.MultiheadAttention(width, 1, batch_first=True).double()
    x = torch.randn(1, n_tokens, width, dtype=torch.float64)
    with torch.no_grad():
        q, k, v = (x @ w.T for w in read(module.in_proj_weight))
        out = module.out_proj(attend_reference(q, k, v)[0])
        error = (out - module(x, x, x)[0]).abs().max().item()
    return Result((at_most("difference from nn.MultiheadAttention", error, 1e-12),))


CLAIM = Claim(
    slug="torch-weights",
    kind="demonstration",
    rows=("R0.4",),
    lesson="Heads",
    statement="W_Q, W_K and W_V are three equal row blocks of in_proj_weight.",
    mistake="They are its rows 0, 1 and 2.",
    formula="W_Q, W_K, W_V = in_proj_weight.chunk(3)",
    run=run,
    try_next="clearhead lab head-outputs",
)
