"""Does a token attend to itself most?"""

import torch

from clearhead.lab.claim import Claim, Result, at_least
from clearhead.nn.attention import attend_reference


def run(*, seed: int = 0, width: int = 16, n_tokens: int = 8, same_projection: bool = False) -> Result:
    """same_projection makes queries and keys equal and of one length: then the statement is true."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(64, n_tokens, width, generator=random, dtype=torch.float64)
    w_q, w_k = torch.randn(2, width, width, generator=random, dtype=torch.float64) / width**0.5
    q, k = x @ w_q, x @ w_k
    if same_projection:
        k = q = q / q.norm(dim=-1, keepdim=True)
    weights = attend_reference(q, k, x)[1]
    own = (weights.argmax(-1) == torch.arange(n_tokens)).double().mean().item()
    return Result((at_least("share of tokens whose largest weight is their own", own, 1.0),))


CLAIM = Claim(
    slug="own-token",
    rows=("R1.5",),
    lesson="Attention and its weights",
    statement="The current word always has the highest weight.",
    mistake="This sentence itself: queries and keys are different projections, and any token may fit best.",
    formula="argmax_j q_i·k_j = i only if W_Q and W_K make it so",
    run=run,
    try_next="clearhead lab own-token --same-projection true",
    least={"n_tokens": 2},
    expected="refuted",
)
