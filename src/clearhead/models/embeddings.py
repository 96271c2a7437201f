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
    """A learned vector for each token, of about unit length: a table that also serves as output gives logits near 0."""
    table = nn.Embedding(vocab_size, width)
    nn.init.normal_(table.weight, std=width**-0.5)
    return table


def token_scale(pos_embed: str, width: int) -> float:
    """What token vectors are multiplied by: beside the waves of sinusoidal positions, numbers of about 1 are needed."""
    return math.sqrt(width) if pos_embed == "sinusoidal" else 1.0


class OneHotLinear(nn.Module):
    """x W + b for features x (B,L,n), and the same for ids (B,L), which stand for one-hot vectors: a row of W each.

    Dropout acts on x: on each feature, and on the single 1 of a one-hot vector, so a dropped token is embedded as b.
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
            # dropout1d drops or scales the row of a token as a whole: x W has one factor for all of it
            return F.dropout1d(rows, self.dropout, self.training) + self.bias
        check_width(x, len(self.weight), "features")
        check_batched(x, 3, "features must be (batch, length, numbers per token)")
        return F.linear(F.dropout(x, self.dropout, self.training), self.weight.T, self.bias)


def embed_ids(ids: Tensor, table: Tensor) -> Tensor:
    """The rows of the table (V,E) for ids (B,L) -> (B,L,E)"""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"ids must be whole numbers, got {ids.dtype}; embeddings go in as inputs_embeds=")
    check_batched(ids, 2, "ids must be (batch, length)")
    try:
        return F.embedding(ids.long(), table)
    except IndexError:
        wrong = ids[(ids < 0) | (ids >= len(table))][0].item()
        raise ValueError(
            f"ids must be from 0 to {len(table) - 1}, got {wrong}; build the model with as many tokens as the data has"
        ) from None


def padding_mask(lengths: Tensor | None, x: Tensor) -> Tensor | None:
    """(B,1,1,L): True at the real tokens of x (B,L,E)."""
    if lengths is None:
        return None
    if len(lengths) != len(x):
        raise ValueError(
            f"there must be one length for each example, got {len(lengths)} lengths for {len(x)}; pass lengths (B,)"
        )
    return masks.padding(lengths, x.shape[1])
