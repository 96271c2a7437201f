"""The dimensions of attention when tokens are columns."""

import torch

from clearhead.lab.claim import Claim, Result, at_most, equals
from clearhead.nn.attention import attend_reference
from clearhead.nn.softargmax import softargmax


def run(*, seed: int = 0, width: int = 768, n_tokens: int = 6, keys_first: bool = True) -> Result:
    """keys_first: Kᵀ Q, the scores of tokens; otherwise Q Kᵀ, the mistake."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(width, n_tokens, generator=random, dtype=torch.float64)  # columns are tokens
    q, k, v = torch.randn(3, width, width, generator=random, dtype=torch.float64) @ x / width**0.5
    scores = k.T @ q if keys_first else q @ k.T
    weights = softargmax(scores, width**-0.5, dim=0)  # by columns
    in_rows, _ = attend_reference(q.T, k.T, v.T)
    fits = weights.shape == (n_tokens, n_tokens)
    out = v @ weights if fits else weights @ v
    error = (out - in_rows.T).abs().max().item()
    return Result(
        (
            equals("rows of Q, K and V", len(q), width, 0),
            equals("columns of Q, K and V", q.shape[1], n_tokens, 0),
            equals("rows of the weights", weights.shape[0], n_tokens, 0),
            equals("columns of the weights", weights.shape[1], n_tokens, 0),
            equals("rows of the output", len(out), width, 0),
            equals("columns of the output", out.shape[1], n_tokens, 0),
            at_most("difference of V A from the row convention", error, 1e-12),
        )
    )


CLAIM = Claim(
    slug="columns",
    kind="demonstration",
    rows=("R1.1",),
    lesson="Attention and its weights",
    statement="With tokens as columns, the weights are softargmax(Kᵀ Q / sqrt d), tokens by tokens, and out = V A.",
    mistake="Q Kᵀ is [768, 768], so the weights are as wide as the model.",
    formula="Q, K, V (d,n);  A = softargmax(Kᵀ Q / sqrt(d)) by columns (n,n);  H = V A (d,n)",
    run=run,
    try_next="clearhead shapes attention --width 768 --tokens 6 --columns",
)
