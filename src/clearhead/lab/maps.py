"""The attention map, and where queries, keys and values come from."""

import torch
from torch import Tensor

from clearhead.lab.claim import Claim, Result, at_least, at_most, equals
from clearhead.nn.attention import MultiHeadAttention, attend_reference


def run(*, seed: int = 0, width: int = 16, n_examples: int = 3, n_tokens: int = 6, mixed: bool = False) -> Result:
    """mixed lets the examples of the batch attend to each other, as one long sequence: the mistake."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(width, 1).double()
    x = torch.randn(n_examples, n_tokens, width, dtype=torch.float64)
    others = torch.cat([x[:1], torch.randn_like(x[1:])])

    def map_of(tokens: Tensor) -> Tensor:
        tokens = tokens.flatten(0, 1)[None] if mixed else tokens
        return attend_reference(layer.query(tokens), layer.key(tokens), layer.value(tokens))[1]

    with torch.no_grad():
        weights = map_of(x)
        moved = (map_of(others) - weights)[0].abs().max().item()
        by_torch, _ = layer.to_torch()(x, x, x)
        error = (layer(x) - by_torch).abs().max().item()
    return Result(
        (
            equals("first size of the map: examples", weights.shape[0], n_examples, 0),
            equals("second: tokens that ask", weights.shape[1], n_tokens, 0),
            equals("third: tokens that are asked", weights.shape[2], n_tokens, 0),
            at_most("other examples change: the first one's map moves by", moved, 0.0),
            at_most("difference of nn.MultiheadAttention(X, X, X) from self-attention", error, 1e-12),
        )
    )


def run_cross(
    *, seed: int = 0, width: int = 16, n_source: int = 7, n_target: int = 4, encoder_queries: bool = False
) -> Result:
    """encoder_queries takes the queries from the encoder's output too: the mistake."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(width, 2).double()
    memory = torch.randn(1, n_source, width, dtype=torch.float64)
    x = torch.randn(1, n_target, width, dtype=torch.float64)

    def attended(queries: Tensor, keys: Tensor) -> Tensor:
        q, k, v = (layer.split(part) for part in (layer.query(queries), layer.key(keys), layer.value(keys)))
        return layer.output(attend_reference(q, k, v)[0].transpose(1, 2).flatten(2))

    with torch.no_grad():
        expected = layer(x, memory)
        made = attended(memory if encoder_queries else x, memory)
        error = (made - expected).abs().max().item() if made.shape == expected.shape else float("inf")
        moved = (layer(x, memory + 1) - expected).abs().max().item()
    return Result(
        (
            equals("answers: as many as the decoder has tokens", made.shape[1], n_target, 0),
            at_most("difference of W_Q x, W_K memory, W_V memory from cross-attention", error, 1e-12),
            at_least("the encoder's output moves: the answer moves by", moved, 1e-3),
        )
    )


MAP = Claim(
    slug="attention-map",
    kind="demonstration",
    rows=("R3.4",),
    lesson="Attention and its weights",
    statement="The map of one head is batch x sequence x sequence, and self-attention is Attention(X, X, X).",
    mistake="The map mixes the examples of a batch.",
    formula="A = softargmax(beta X W_Q (X W_K)ᵀ)  (B,L,L)",
    run=run,
    try_next="clearhead steps",
)

CROSS = Claim(
    slug="cross-attention",
    kind="demonstration",
    rows=("R4.12",),
    lesson="Attention and its weights",
    statement="In cross-attention keys and values come from the encoder, queries from the decoder.",
    mistake="The encoder outputs keys, values and queries.",
    formula="softargmax(beta (x W_Q)(m W_K)ᵀ) m W_V;  x decoder (Q,e), m encoder's output (K,e) -> (Q,e)",
    run=run_cross,
    try_next="clearhead shapes transformer_base",
    multiples={"width": 2},
)
