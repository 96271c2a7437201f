"""What is joined after the heads."""

import torch

from clearhead.lab.claim import Claim, Result, at_least, at_most
from clearhead.nn.attention import MultiHeadAttention, attend_reference


def run(*, seed: int = 0, width: int = 16, n_heads: int = 4, n_tokens: int = 5, mix_weights: bool = False) -> Result:
    """mix_weights applies the mean of the heads' weights to all values: the mistake, as far as it can be computed."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(width, n_heads).double()
    x = 3 * torch.randn(1, n_tokens, width, dtype=torch.float64)
    with torch.no_grad():
        q, k, v = (layer.split(part(x)) for part in (layer.query, layer.key, layer.value))
        outputs, weights = attend_reference(q, k, v)  # (1,H,L,D), (1,H,L,L)
        if mix_weights:
            outputs = weights.mean(1, keepdim=True) @ v
        joined = outputs.transpose(1, 2).flatten(-2)
        error = (layer.output(joined) - layer(x)).abs().max().item()
        unscaled = attend_reference(q, k, v, beta=1.0)[0].transpose(1, 2).flatten(-2)
        without_beta = (layer.output(unscaled) - layer(x)).abs().max().item()
    spread = (weights - weights.mean(1, keepdim=True)).abs().max().item()
    scaled = [at_least("the same without beta: difference", without_beta, 1e-3)] if n_heads < width else []
    return Result(  # with a head width of 1, beta is 1
        (
            at_most("difference of W_O [O_1; ...; O_h] from the layer", error, 1e-12),
            *scaled,
            at_least("how much the heads' weights differ", spread, 0.01),
        )
    )


CLAIM = Claim(
    slug="head-outputs",
    kind="demonstration",
    rows=("R4.6",),
    lesson="Heads",
    statement="The heads' outputs are joined and mixed by one W_O; their weights never meet.",
    mistake="Attention matrices are concatenated.",
    formula="H = W_O [O_1; ...; O_h],  O_i = W_V,i V softargmax(beta (W_K,i K)ᵀ W_Q,i Q),  beta = 1/sqrt(head width)",
    run=run,
    try_next="clearhead shapes attention --width 768 --heads 12",
    least={"n_heads": 2, "n_tokens": 2},
)
