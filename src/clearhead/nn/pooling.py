"""Readouts: from the tokens that leave an encoder to what a head is asked about.

`begin` may add a token before the encoder, `forward` reads after it. `present` (B,L) is True at real tokens.
Dims: B batch, L length, E model width, H heads, D head width.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from clearhead.nn.attention import MultiHeadAttention


class Pooling(nn.Module, ABC):
    """One way to read an encoder's output. `n_extra` tokens are put in front of the sequence."""

    n_extra = 0

    def begin(self, x: Tensor) -> Tensor:
        return x

    @abstractmethod
    def forward(self, x: Tensor, present: Tensor | None = None) -> Tensor: ...


class NoPooling(Pooling):
    """An answer for every token. (B,L,E) -> (B,L,E)"""

    def forward(self, x: Tensor, present: Tensor | None = None) -> Tensor:
        return x


class ClassToken(Pooling):
    """A learned token, put first, that gathers what the answer needs. (B,L+1,E) -> (B,E)"""

    n_extra = 1

    def __init__(self, width: int):
        super().__init__()
        self.token = nn.Parameter(torch.empty(width))
        nn.init.normal_(self.token, std=0.02)

    def begin(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(x.shape[0], 1, -1), x], dim=1)

    def forward(self, x: Tensor, present: Tensor | None = None) -> Tensor:
        return x[:, 0]


class MeanPooling(Pooling):
    """The mean of the real tokens; zeros if there is none. (B,L,E) -> (B,E)"""

    def forward(self, x: Tensor, present: Tensor | None = None) -> Tensor:
        if present is None:
            return x.sum(dim=1) / max(1, x.shape[1])
        counts = present.sum(dim=1, keepdim=True).clamp(min=1)
        return x.masked_fill(~present[..., None], 0.0).sum(dim=1) / counts


class AttentionPooling(Pooling):
    """A learned query that attends to the real tokens. (B,L,E) -> (B,E)"""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.query = nn.Parameter(torch.empty(width))
        nn.init.normal_(self.query, std=0.02)
        self.attention = MultiHeadAttention(width, num_heads)

    def forward(self, x: Tensor, present: Tensor | None = None) -> Tensor:
        mask = None if present is None else present[:, None, None, :]
        return self.attention(self.query.expand(x.shape[0], 1, -1), x, mask=mask)[:, 0]
