"""The feed-forward net of a block: the same small net at each position.

Dims: B batch, L length, E model width.
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.nn.attention import Linear, MultiHeadAttention, check_width
from clearhead.nn.cache import DecoderCache, LayerKVCache
from clearhead.nn.masks import Mask

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Activation] = {"relu": F.relu, "gelu": F.gelu}
IN_PLACE: dict[Activation, Activation] = {F.relu: F.relu_, F.gelu: torch.ops.aten.gelu_}


class MLP(nn.Module):
    """activation(norm(x W_1 + b_1)) W_2 + b_2, with dropout after the activation. (B,L,E) -> (B,L,E)

    Blocks have no norm here; the output net of some predictors does.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: Activation = F.gelu,
        dropout: float = 0.0,
        *,
        n_out: int | None = None,
        bias: bool = True,
        norm: nn.Module | None = None,
    ):
        super().__init__()
        self.widen = Linear(width, hidden, bias)
        self.norm = norm
        self.activation = activation
        self.dropout = nn.Dropout(dropout)
        self.narrow = Linear(hidden, width if n_out is None else n_out, bias)

    def forward(self, x: Tensor) -> Tensor:
        check_width(x, self.widen.in_features, "x")
        return self.narrow(self.dropout(self.activate(self.widen(x))))

    def activate(self, hidden: Tensor) -> Tensor:
        """In place where nobody else needs what was there: no gradient, no hook. The widest tensor is made once."""
        if self.norm is not None:
            return self.activation(self.norm(hidden))
        if torch.is_grad_enabled() or self.widen._forward_hooks:
            return self.activation(hidden)
        return IN_PLACE.get(self.activation, self.activation)(hidden)


# Encoder and decoder blocks: attention and feed-forward, wired by residual connections.
#
#     pre-norm    x + dropout(f(norm(x)))      trains at any depth; needs one more norm at the end
#     post-norm   norm(x + dropout(f(x)))      the wiring of 2017
#     none        x + dropout(f(x))
#
# Parts are passed in, so a variant is another part, not another flag.
# Dims: B batch, L length, Q queries, K keys, H heads, D head width, E model width.


NORMS = ("pre", "post", "none")


def drop_path(branch: Tensor, rate: float) -> Tensor:
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
            branch = drop_path(branch, self.drop_path)
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
        feedforward: MLP,
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
        cache: LayerKVCache | None = None,
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
        from clearhead.nn.interop import encoder_block_from_torch

        return encoder_block_from_torch(layer)

    def to_torch(self, *, batch_first: bool = True) -> nn.TransformerEncoderLayer:
        """A layer of torch.nn that computes the same, with a copy of these weights."""
        from clearhead.nn.interop import encoder_block_to_torch

        return encoder_block_to_torch(self, batch_first=batch_first)


class DecoderBlock(nn.Module):
    """Self-attention, attention to the encoder's output (the memory), then feed-forward."""

    def __init__(
        self,
        attention: MultiHeadAttention,
        cross_attention: MultiHeadAttention,
        feedforward: MLP,
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
        cache: LayerKVCache | None = None,
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
        from clearhead.nn.interop import decoder_block_from_torch

        return decoder_block_from_torch(layer)

    def to_torch(self, *, batch_first: bool = True) -> nn.TransformerDecoderLayer:
        """A layer of torch.nn that computes the same, with a copy of these weights."""
        from clearhead.nn.interop import decoder_block_to_torch

        return decoder_block_to_torch(self, batch_first=batch_first)


# Blocks one after the other: the encoder, the decoder, and the pair of them.
#
# All take embeddings: whatever can be turned into vectors of the model's width can be fed in.
# Dims: B batch, L length, Q queries, K keys, E model width.


class Encoder(nn.Module):
    """Blocks of self-attention, then a norm where there is one. (B,L,E) -> (B,L,E)"""

    def __init__(self, blocks: Iterable[EncoderBlock], norm: nn.Module | None = None):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.Identity() if norm is None else norm

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | None = None,
        angles: Tensor | None = None,
        logit_bias: Tensor | None = None,
        cache: DecoderCache | None = None,
        all_layers: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """The last hidden state; with all_layers=True every one: x itself and the output of each block.

        The last of them has gone through the final norm and equals what is returned without all_layers.
        """
        states = [x]
        for i, block in enumerate(self.blocks):
            layer = None if cache is None else cache.layers[i]
            x = block(x, mask=mask, angles=angles, logit_bias=logit_bias, cache=layer)
            if all_layers:
                states.append(x)
        states[-1] = self.norm(x)
        return tuple(states) if all_layers else states[-1]

    @classmethod
    def from_torch(cls, stack: nn.TransformerEncoder) -> "Encoder":
        """The same stack as this one of torch.nn, with a copy of its weights; ours is always batch first."""
        from clearhead.nn.interop import encoder_from_torch

        return encoder_from_torch(stack)

    def to_torch(self, *, batch_first: bool = True) -> nn.TransformerEncoder:
        """A stack of torch.nn that computes the same, with a copy of these weights."""
        from clearhead.nn.interop import encoder_to_torch

        return encoder_to_torch(self, batch_first=batch_first)


class Decoder(nn.Module):
    """x (B,Q,E), memory (B,K,E) -> (B,Q,E)"""

    def __init__(self, blocks: Iterable[DecoderBlock], norm: nn.Module | None = None):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.Identity() if norm is None else norm

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        *,
        mask: Mask | None = None,
        memory_mask: Mask | None = None,
        angles: Tensor | None = None,
        logit_bias: Tensor | None = None,
        cache: DecoderCache | None = None,
    ) -> Tensor:
        for i, block in enumerate(self.blocks):
            layer = None if cache is None else cache.layers[i]
            x = block(x, memory, mask=mask, memory_mask=memory_mask, angles=angles, logit_bias=logit_bias, cache=layer)
        return self.norm(x)

    @classmethod
    def from_torch(cls, stack: nn.TransformerDecoder) -> "Decoder":
        """The same stack as this one of torch.nn, with a copy of its weights; ours is always batch first."""
        from clearhead.nn.interop import decoder_from_torch

        return decoder_from_torch(stack)

    def to_torch(self, *, batch_first: bool = True) -> nn.TransformerDecoder:
        """A stack of torch.nn that computes the same, with a copy of these weights."""
        from clearhead.nn.interop import decoder_to_torch

        return decoder_to_torch(self, batch_first=batch_first)


class EncoderDecoder(nn.Module):
    """The pair of 2017, from embeddings to embeddings. source (B,K,E), target (B,Q,E) -> (B,Q,E)"""

    def __init__(self, encoder: Encoder, decoder: Decoder):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_mask: Mask | None = None,
        target_mask: Mask | None = None,
        memory_mask: Mask | None = None,
    ) -> Tensor:
        memory = self.encoder(source, mask=source_mask)
        return self.decoder(target, memory, mask=target_mask, memory_mask=memory_mask)

    @classmethod
    def from_torch(cls, transformer: nn.Transformer) -> "EncoderDecoder":
        """The same transformer as this one of torch.nn, with a copy of its weights; ours is always batch first."""
        from clearhead.nn.interop import encoder_decoder_from_torch

        return encoder_decoder_from_torch(transformer)

    def to_torch(self, *, batch_first: bool = True) -> nn.Transformer:
        """A transformer of torch.nn that computes the same, with a copy of these weights."""
        from clearhead.nn.interop import encoder_decoder_to_torch

        return encoder_decoder_to_torch(self, batch_first=batch_first)
