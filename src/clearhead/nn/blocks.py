"""Encoder and decoder blocks: attention and feed-forward, wired by residual connections.

    pre-norm    x + dropout(f(norm(x)))      trains at any depth; needs one more norm at the end
    post-norm   norm(x + dropout(f(x)))      the wiring of 2017
    none        x + dropout(f(x))

Parts are passed in, so a variant is another part, not another flag.
Dims: B batch, L length, Q queries, K keys, H heads, D head width, E model width.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.cache import LayerCache
from clearhead.nn.checks import check_width
from clearhead.nn.feedforward import FeedForward
from clearhead.nn.masks import Mask

NORMS = ("pre", "post", "none")


def stochastic_depth(branch: Tensor, rate: float) -> Tensor:
    """The branch, dropped whole for a random share `rate` of the examples; the rest is scaled up to keep the mean."""
    if rate == 1.0:
        return torch.zeros_like(branch)
    keep = torch.empty(branch.shape[0], *[1] * (branch.dim() - 1), dtype=branch.dtype, device=branch.device)
    return branch * keep.bernoulli_(1 - rate) / (1 - rate)


class Residual(nn.Module):
    """The path around a sublayer f, with norm, dropout and stochastic depth where they belong. (B,L,E) -> (B,L,E)"""

    def __init__(
        self, width: int, norm: str = "pre", dropout: float = 0.0, drop_path: float = 0.0, norm_eps: float = 1e-5
    ):
        super().__init__()
        if norm not in NORMS:
            raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {norm!r}; 'pre' is the usual choice")
        self.wiring, self.drop_path = norm, drop_path
        self.norm = nn.Identity() if norm == "none" else nn.LayerNorm(width, eps=norm_eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.wiring == "post":
            return self.norm(x + self.drop(sublayer(x)))
        return x + self.drop(sublayer(self.norm(x)))

    def drop(self, branch: Tensor) -> Tensor:
        branch = self.dropout(branch)
        if self.drop_path and self.training:
            branch = stochastic_depth(branch, self.drop_path)
        return branch


def check_residual_width(attention: MultiHeadAttention, width: int, name: str) -> None:
    """A residual connection adds the output of a sublayer to its input: both must have the block's width."""
    layer = attention.query
    if not layer.in_features == layer.out_features == width:
        raise ValueError(
            f"{name} must map the block's width to itself, got width={width} and attention from "
            f"{layer.in_features} to {layer.out_features}"
        )


class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward. Causal with a causal mask: then it is the block of a language model."""

    def __init__(
        self,
        attention: MultiHeadAttention,
        feedforward: FeedForward,
        *,
        width: int,
        norm: str = "pre",
        dropout: float = 0.0,
        drop_path: float = 0.0,
        norm_eps: float = 1e-5,
    ):
        super().__init__()
        check_residual_width(attention, width, "attention")
        self.attention, self.feedforward = attention, feedforward
        self.around_attention = Residual(width, norm, dropout, drop_path, norm_eps)
        self.around_feedforward = Residual(width, norm, dropout, drop_path, norm_eps)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | None = None,
        angles: Tensor | None = None,
        logit_bias: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        check_width(x, self.attention.query.in_features, "x")
        own = None if cache is None else cache.own
        x = self.around_attention(
            x, lambda h: self.attention(h, mask=mask, angles=angles, logit_bias=logit_bias, cache=own)
        )
        return self.around_feedforward(x, self.feedforward)

    @classmethod
    def from_torch(cls, layer: nn.TransformerEncoderLayer) -> "EncoderBlock":
        """The same layer as this one of torch.nn, with a copy of its weights; ours is always batch first."""
        from clearhead.nn.interchange_stacks import encoder_block_from_torch

        return encoder_block_from_torch(layer)

    def to_torch(self, *, batch_first: bool = True) -> nn.TransformerEncoderLayer:
        """A layer of torch.nn that computes the same, with a copy of these weights."""
        from clearhead.nn.interchange_stacks import encoder_block_to_torch

        return encoder_block_to_torch(self, batch_first=batch_first)


class DecoderBlock(nn.Module):
    """Self-attention, attention to the encoder's output (the memory), then feed-forward."""

    def __init__(
        self,
        attention: MultiHeadAttention,
        cross_attention: MultiHeadAttention,
        feedforward: FeedForward,
        *,
        width: int,
        norm: str = "pre",
        dropout: float = 0.0,
        drop_path: float = 0.0,
        norm_eps: float = 1e-5,
    ):
        super().__init__()
        check_residual_width(attention, width, "attention")
        check_residual_width(cross_attention, width, "cross_attention")
        self.attention, self.cross_attention, self.feedforward = attention, cross_attention, feedforward
        self.around_attention = Residual(width, norm, dropout, drop_path, norm_eps)
        self.around_cross_attention = Residual(width, norm, dropout, drop_path, norm_eps)
        self.around_feedforward = Residual(width, norm, dropout, drop_path, norm_eps)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        *,
        mask: Mask | None = None,
        memory_mask: Mask | None = None,
        angles: Tensor | None = None,
        logit_bias: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """x (B,Q,E), memory (B,K,E) -> (B,Q,E). Queries come from x; keys and values from the memory."""
        check_width(x, self.attention.query.in_features, "x")
        own, kept_memory = (None, None) if cache is None else (cache.own, cache.memory)
        x = self.around_attention(
            x, lambda h: self.attention(h, mask=mask, angles=angles, logit_bias=logit_bias, cache=own)
        )
        x = self.around_cross_attention(
            x, lambda h: self.cross_attention(h, memory, mask=memory_mask, cache=kept_memory)
        )
        return self.around_feedforward(x, self.feedforward)

    @classmethod
    def from_torch(cls, layer: nn.TransformerDecoderLayer) -> "DecoderBlock":
        """The same layer as this one of torch.nn, with a copy of its weights; ours is always batch first."""
        from clearhead.nn.interchange_stacks import decoder_block_from_torch

        return decoder_block_from_torch(layer)

    def to_torch(self, *, batch_first: bool = True) -> nn.TransformerDecoderLayer:
        """A layer of torch.nn that computes the same, with a copy of these weights."""
        from clearhead.nn.interchange_stacks import decoder_block_to_torch

        return decoder_block_to_torch(self, batch_first=batch_first)
