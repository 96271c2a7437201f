"""Token embeddings, and the padding mask of a batch of sequences.

Dims: B batch, L length, E model width.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.models.stack import check_batched
from clearhead.nn import masks
from clearhead.nn.attention import check_width


def token_embedding(vocab_size: int, width: int) -> nn.Embedding:
    """A learned embedding of about unit norm for each token, so that tied output weights give small logits."""
    table = nn.Embedding(vocab_size, width)
    nn.init.normal_(table.weight, std=width**-0.5)
    return table


def token_scale(pos_embed: str, width: int) -> float:
    """The factor of the token embeddings: sqrt(E) with sinusoidal positions (Vaswani et al., 2017), otherwise 1."""
    return math.sqrt(width) if pos_embed == "sinusoidal" else 1.0


class OneHotLinear(nn.Module):
    """x W + b for features x (B,L,in_features), or for ids (B,L), which select rows of W as one-hot vectors do.

    Dropout acts on x: on each feature, or on the single 1 of a one-hot vector, so a dropped token is embedded as b.
    """

    def __init__(self, in_features: int, width: int, dropout: float = 0.0):
        super().__init__()
        self.dropout = dropout
        self.weight = nn.Parameter(torch.empty(in_features, width))
        self.bias = nn.Parameter(torch.zeros(width))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            rows = embed_ids(x, self.weight)
            # dropout1d drops or scales the entire row of a token, as dropout of its one-hot vector does
            return F.dropout1d(rows, self.dropout, self.training) + self.bias
        check_width(x, len(self.weight), "features")
        check_batched(x, 3, "features must be (batch, length, in_features)")
        return F.linear(F.dropout(x, self.dropout, self.training), self.weight.T, self.bias)


def embed_ids(ids: Tensor, table: Tensor) -> Tensor:
    """The rows of the table (V,E) at ids (B,L) -> (B,L,E)"""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"ids must be integers, got {ids.dtype}; pass embeddings as inputs_embeds=")
    check_batched(ids, 2, "ids must be (batch, length)")
    try:
        return F.embedding(ids.long(), table)
    except IndexError:
        invalid = ids[(ids < 0) | (ids >= len(table))][0].item()
        raise ValueError(f"ids must be from 0 to {len(table) - 1}, got {invalid}") from None


def padding_mask(lengths: Tensor | None, x: Tensor) -> Tensor | None:
    """(B,1,1,L): True at the real tokens of x (B,L,E)."""
    if lengths is None:
        return None
    if len(lengths) != len(x):
        raise ValueError(
            f"lengths must have one entry for each example, got {len(lengths)} lengths for {len(x)} examples"
        )
    return masks.padding(lengths, x.shape[1])
