"""Transformer blocks, and stacks of them.

    pre-norm    x + drop(f(norm(x)))      trains at any depth; the stack ends with one more norm
    post-norm   norm(x + drop(f(x)))      Vaswani et al. 2017
    no norm     x + drop(f(x))            norm_layer=nn.Identity

where f is attention or the MLP, and drop is dropout; layer scale multiplies f before it. Parts are passed in, so that a
variant is another part and not another flag: MLP or SwiGLU, nn.LayerNorm or RMSNorm, one attention or another.
Dims: B batch, L length, Q queries, K keys, E model width.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.nn.attention import Linear, MultiHeadAttention, NormLayer, check_width
from clearhead.nn.cache import DecoderCache, LayerKVCache
from clearhead.nn.masks import Mask

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Activation] = {"relu": F.relu, "gelu": F.gelu}
IN_PLACE: dict[Activation, Activation] = {F.relu: F.relu_, F.gelu: torch.ops.aten.gelu_}


class MLP(nn.Module):
    """fc2(dropout(activation(norm(fc1(x))))), at each position by itself. (B,L,E) -> (B,L,out_features)

    out_features defaults to the width. Blocks have no norm here; the head of some predictors does.
    """

    def __init__(
        self,
        width: int,
        mlp_dim: int,
        activation: Activation = F.gelu,
        dropout: float = 0.0,
        *,
        out_features: int | None = None,
        bias: bool = True,
        norm: nn.Module | None = None,
    ):
        super().__init__()
        self.fc1 = Linear(width, mlp_dim, bias)
        self.norm = norm
        self.activation = activation
        self.dropout = nn.Dropout(dropout)
        self.fc2 = Linear(mlp_dim, width if out_features is None else out_features, bias)

    def forward(self, x: Tensor) -> Tensor:
        check_width(x, self.fc1.in_features, "x")
        return self.fc2(self.dropout(self.activate(self.fc1(x))))

    def activate(self, hidden: Tensor) -> Tensor:
        """Works in place if no gradient and no hook needs the input: the widest tensor of a block is allocated once."""
        if self.norm is not None:
            return self.activation(self.norm(hidden))
        if torch.is_grad_enabled() or self.fc1._forward_hooks:
            return self.activation(hidden)
        return IN_PLACE.get(self.activation, self.activation)(hidden)


class SwiGLU(nn.Module):
    """down_proj(dropout(silu(gate_proj(x)) * up_proj(x))), at each position by itself. (B,L,E) -> (B,L,out_features)

    A gated MLP (Shazeer 2020) with silu(x) = x * sigmoid(x). It has three matrices in place of two: mlp_dim = 8/3 width
    has the parameters of an MLP with mlp_dim = 4 width.
    """

    def __init__(
        self, width: int, mlp_dim: int, dropout: float = 0.0, *, out_features: int | None = None, bias: bool = True
    ):
        super().__init__()
        self.gate_proj = Linear(width, mlp_dim, bias)
        self.up_proj = Linear(width, mlp_dim, bias)
        self.dropout = nn.Dropout(dropout)
        self.down_proj = Linear(mlp_dim, width if out_features is None else out_features, bias)

    def forward(self, x: Tensor) -> Tensor:
        check_width(x, self.gate_proj.in_features, "x")
        return self.down_proj(self.dropout(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class ResidualDropout(nn.Module):
    """Dropout, then stochastic depth: what happens to a branch before it is added to the residual stream."""

    def __init__(self, dropout: float = 0.0, drop_path: float = 0.0):
        super().__init__()
        self.dropout, self.drop_path = nn.Dropout(dropout), drop_path

    def forward(self, branch: Tensor) -> Tensor:
        branch = self.dropout(branch)
        if self.drop_path and self.training:
            branch = drop_path(branch, self.drop_path)
        return branch


def drop_path(branch: Tensor, rate: float) -> Tensor:
    """Zeros the whole branch of a random fraction `rate` of the examples and scales up the rest to keep the mean."""
    if rate == 1.0:
        return torch.zeros_like(branch)
    keep = torch.empty(branch.shape[0], *[1] * (branch.dim() - 1), dtype=branch.dtype, device=branch.device)
    return branch * keep.bernoulli_(1 - rate) / (1 - rate)


class EncoderBlock(nn.Module):
    """Self-attention, then the MLP. With a causal mask it is the block of a decoder-only language model.

    x (B,L,E) -> (B,L,E). A `layer_scale` such as `LayerScale` multiplies what each of the two adds to x.
    """

    def __init__(
        self,
        attn: MultiHeadAttention,
        mlp: nn.Module,
        *,
        width: int,
        norm_layer: NormLayer = nn.LayerNorm,
        layer_scale: NormLayer = nn.Identity,
        norm_first: bool = True,
        dropout: float = 0.0,
        drop_path: float = 0.0,
    ):
        super().__init__()
        check_residual_width(attn, width, "attn")
        self.norm_first = norm_first
        self.attn, self.mlp = attn, mlp
        self.norm1, self.norm2 = norm_layer(width), norm_layer(width)
        self.ls1, self.ls2 = layer_scale(width), layer_scale(width)
        self.drop1, self.drop2 = ResidualDropout(dropout, drop_path), ResidualDropout(dropout, drop_path)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | None = None,
        rotary_angles: Tensor | None = None,
        logit_bias: Tensor | None = None,
        cache: LayerKVCache | None = None,
    ) -> Tensor:
        check_width(x, self.attn.q_proj.in_features, "x")
        self_cache = None if cache is None else cache.self_attn

        def attn(x: Tensor) -> Tensor:
            return self.attn(x, mask=mask, rotary_angles=rotary_angles, logit_bias=logit_bias, cache=self_cache)

        if self.norm_first:
            x = x + self.drop1(self.ls1(attn(self.norm1(x))))
            x = x + self.drop2(self.ls2(self.mlp(self.norm2(x))))
        else:
            x = self.norm1(x + self.drop1(self.ls1(attn(x))))
            x = self.norm2(x + self.drop2(self.ls2(self.mlp(x))))
        return x

    @classmethod
    def from_torch(cls, layer: nn.TransformerEncoderLayer) -> "EncoderBlock":
        """A block that computes the same as this torch.nn layer, with a copy of its weights; always batch first."""
        from clearhead.nn.interop import encoder_block_from_torch

        return encoder_block_from_torch(layer)

    def to_torch(self, *, batch_first: bool = True) -> nn.TransformerEncoderLayer:
        """A torch.nn layer that computes the same, with a copy of these weights."""
        from clearhead.nn.interop import encoder_block_to_torch

        return encoder_block_to_torch(self, batch_first=batch_first)


class DecoderBlock(nn.Module):
    """Self-attention, cross-attention to the encoder's output (the memory), then the MLP.

    x (B,Q,E), memory (B,K,E) -> (B,Q,E). Queries come from x; the keys and values of cross_attn from the memory.
    """

    def __init__(
        self,
        self_attn: MultiHeadAttention,
        cross_attn: MultiHeadAttention,
        mlp: nn.Module,
        *,
        width: int,
        norm_layer: NormLayer = nn.LayerNorm,
        layer_scale: NormLayer = nn.Identity,
        norm_first: bool = True,
        dropout: float = 0.0,
        drop_path: float = 0.0,
    ):
        super().__init__()
        check_residual_width(self_attn, width, "self_attn")
        check_residual_width(cross_attn, width, "cross_attn")
        self.norm_first = norm_first
        self.self_attn, self.cross_attn, self.mlp = self_attn, cross_attn, mlp
        self.norm1, self.norm2, self.norm3 = norm_layer(width), norm_layer(width), norm_layer(width)
        self.ls1, self.ls2, self.ls3 = (layer_scale(width) for _ in range(3))
        self.drop1, self.drop2, self.drop3 = (ResidualDropout(dropout, drop_path) for _ in range(3))

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        *,
        mask: Mask | None = None,
        memory_mask: Mask | None = None,
        rotary_angles: Tensor | None = None,
        logit_bias: Tensor | None = None,
        cache: LayerKVCache | None = None,
    ) -> Tensor:
        check_width(x, self.self_attn.q_proj.in_features, "x")
        self_cache, cross_cache = (None, None) if cache is None else (cache.self_attn, cache.cross_attn)

        def self_attn(x: Tensor) -> Tensor:
            return self.self_attn(x, mask=mask, rotary_angles=rotary_angles, logit_bias=logit_bias, cache=self_cache)

        def cross_attn(x: Tensor) -> Tensor:
            return self.cross_attn(x, memory, mask=memory_mask, cache=cross_cache)

        if self.norm_first:
            x = x + self.drop1(self.ls1(self_attn(self.norm1(x))))
            x = x + self.drop2(self.ls2(cross_attn(self.norm2(x))))
            x = x + self.drop3(self.ls3(self.mlp(self.norm3(x))))
        else:
            x = self.norm1(x + self.drop1(self.ls1(self_attn(x))))
            x = self.norm2(x + self.drop2(self.ls2(cross_attn(x))))
            x = self.norm3(x + self.drop3(self.ls3(self.mlp(x))))
        return x

    @classmethod
    def from_torch(cls, layer: nn.TransformerDecoderLayer) -> "DecoderBlock":
        """A block that computes the same as this torch.nn layer, with a copy of its weights; always batch first."""
        from clearhead.nn.interop import decoder_block_from_torch

        return decoder_block_from_torch(layer)

    def to_torch(self, *, batch_first: bool = True) -> nn.TransformerDecoderLayer:
        """A torch.nn layer that computes the same, with a copy of these weights."""
        from clearhead.nn.interop import decoder_block_to_torch

        return decoder_block_to_torch(self, batch_first=batch_first)


def check_residual_width(attn: MultiHeadAttention, width: int, name: str) -> None:
    """A residual connection adds the output of attention to its input: both must have the block's width."""
    layer = attn.q_proj
    if not layer.in_features == layer.out_features == width:
        raise ValueError(
            f"{name} must map the block's width to itself, got width={width} and attention from "
            f"{layer.in_features} to {layer.out_features}"
        )


class Encoder(nn.Module):
    """Encoder blocks one after another, then the final norm, if any. (B,L,E) -> (B,L,E)"""

    def __init__(self, blocks: Iterable[EncoderBlock], norm: nn.Module | None = None):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.Identity() if norm is None else norm

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | None = None,
        rotary_angles: Tensor | None = None,
        logit_bias: Tensor | None = None,
        cache: DecoderCache | None = None,
        all_layers: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """The last hidden state. all_layers=True returns all of them: x and the output of each block.

        The last one has passed the final norm and equals the result without all_layers.
        """
        states = [x]
        for i, block in enumerate(self.blocks):
            layer = None if cache is None else cache.layers[i]
            x = block(x, mask=mask, rotary_angles=rotary_angles, logit_bias=logit_bias, cache=layer)
            if all_layers:
                states.append(x)
        states[-1] = self.norm(x)
        return tuple(states) if all_layers else states[-1]

    @classmethod
    def from_torch(cls, stack: nn.TransformerEncoder) -> "Encoder":
        """Our modules, computing the same as this torch.nn stack, with a copy of its weights; always batch first."""
        from clearhead.nn.interop import encoder_from_torch

        return encoder_from_torch(stack)

    def to_torch(self, *, batch_first: bool = True) -> nn.TransformerEncoder:
        """A torch.nn stack that computes the same, with a copy of these weights."""
        from clearhead.nn.interop import encoder_to_torch

        return encoder_to_torch(self, batch_first=batch_first)


class Decoder(nn.Module):
    """Decoder blocks one after another, then the final norm, if any. x (B,Q,E), memory (B,K,E) -> (B,Q,E)"""

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
        rotary_angles: Tensor | None = None,
        logit_bias: Tensor | None = None,
        cache: DecoderCache | None = None,
    ) -> Tensor:
        for i, block in enumerate(self.blocks):
            layer = None if cache is None else cache.layers[i]
            x = block(
                x,
                memory,
                mask=mask,
                memory_mask=memory_mask,
                rotary_angles=rotary_angles,
                logit_bias=logit_bias,
                cache=layer,
            )
        return self.norm(x)

    @classmethod
    def from_torch(cls, stack: nn.TransformerDecoder) -> "Decoder":
        """Our modules, computing the same as this torch.nn stack, with a copy of its weights; always batch first."""
        from clearhead.nn.interop import decoder_from_torch

        return decoder_from_torch(stack)

    def to_torch(self, *, batch_first: bool = True) -> nn.TransformerDecoder:
        """A torch.nn stack that computes the same, with a copy of these weights."""
        from clearhead.nn.interop import decoder_to_torch

        return decoder_to_torch(self, batch_first=batch_first)


class EncoderDecoder(nn.Module):
    """The transformer of Vaswani et al. 2017 between embeddings. source (B,K,E), target (B,Q,E) -> (B,Q,E)"""

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
        """Our modules, computing the same as this nn.Transformer, with a copy of its weights; always batch first."""
        from clearhead.nn.interop import encoder_decoder_from_torch

        return encoder_decoder_from_torch(transformer)

    def to_torch(self, *, batch_first: bool = True) -> nn.Transformer:
        """A torch.nn transformer that computes the same, with a copy of these weights."""
        from clearhead.nn.interop import encoder_decoder_to_torch

        return encoder_decoder_to_torch(self, batch_first=batch_first)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """model.eval() inside the `with` block; afterwards each submodule is back in its previous mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
