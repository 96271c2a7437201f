"""Pooling: from the tokens that leave an encoder to the vector that enters the head.

`prepend_tokens` may add a token before the encoder; `forward` reads the encoder's output. `valid` (B,L) is True at real
tokens and False at padding. Register tokens stand between the tokens of the pooling and the sequence; they take part in
attention and are left out before pooling.
Dims: B batch, L length, E model width.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from clearhead.nn.attention import MultiHeadAttention


class Pooling(nn.Module, ABC):
    """Puts `num_prefix_tokens` tokens before the sequence and reduces the encoder's output."""

    num_prefix_tokens = 0

    def prepend_tokens(self, x: Tensor) -> Tensor:
        return x

    @abstractmethod
    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor: ...


class NoPooling(Pooling):
    """One output for each token. (B,L,E) -> (B,L,E)"""

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return x


class ClassToken(Pooling):
    """The output at a learned token that is put before the sequence. (B,1+L,E) -> (B,E)"""

    num_prefix_tokens = 1

    def __init__(self, width: int):
        super().__init__()
        self.cls_token = nn.Parameter(torch.empty(width))
        nn.init.normal_(self.cls_token, std=0.02)

    def prepend_tokens(self, x: Tensor) -> Tensor:
        return torch.cat([self.cls_token.expand(x.shape[0], 1, -1), x], dim=1)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return x[:, 0]


class MeanPooling(Pooling):
    """The mean over real tokens; zeros if there are none. (B,L,E) -> (B,E)"""

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        if valid is None:
            return x.sum(dim=1) / max(1, x.shape[1])
        counts = valid.sum(dim=1, keepdim=True).clamp(min=1)
        return x.masked_fill(~valid[..., None], 0.0).sum(dim=1) / counts


class AttentionPooling(Pooling):
    """Attention from one learned query to the real tokens. (B,L,E) -> (B,E)"""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.query = nn.Parameter(torch.empty(width))
        nn.init.normal_(self.query, std=0.02)
        self.attn = MultiHeadAttention(width, num_heads)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        mask = None if valid is None else valid[:, None, None, :]
        return self.attn(self.query.expand(x.shape[0], 1, -1), x, mask=mask)[:, 0]


class RegisterTokens(nn.Module):
    """Learned tokens for a model to compute with (Darcet et al. 2024). No output is read from them.

    Without them, vision transformers use patches of the background for this, whose own content is lost.
    """

    def __init__(self, num_tokens: int, width: int):
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(num_tokens, width))
        nn.init.normal_(self.tokens, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Puts the R register tokens before the sequence. (B,L,E) -> (B,R+L,E)"""
        return torch.cat([self.tokens.expand(x.shape[0], -1, -1), x], dim=1)

    def remove(self, x: Tensor, num_prefix_tokens: int) -> Tensor:
        """Removes them from behind the tokens of the pooling. (B,prefix+R+L,E) -> (B,prefix+L,E)"""
        return torch.cat([x[:, :num_prefix_tokens], x[:, num_prefix_tokens + len(self.tokens) :]], dim=1)
