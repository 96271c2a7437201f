"""The parts that all models share: token and position embeddings, blocks built from a config, pooling and the head.

Dims: B batch, L length, E model width.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.models.config import PredictorConfig, StackConfig, VisionConfig
from clearhead.nn import masks
from clearhead.nn.attention import LayerScale, Linear, MultiHeadAttention, NormLayer, RMSNorm, check_width
from clearhead.nn.blocks import ACTIVATIONS, MLP, DecoderBlock, EncoderBlock, SwiGLU
from clearhead.nn.positions import (
    AlibiPosEmbed,
    LearnedPosEmbed,
    NoPosEmbed,
    PosEmbed,
    RotaryPosEmbed,
    SinusoidalPosEmbed,
)
from clearhead.nn.tokens import AttentionPooling, ClassToken, MeanPooling, NoPooling, Pooling


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


def build_encoder_blocks(config: StackConfig) -> list[EncoderBlock]:
    return [
        EncoderBlock(
            build_attention(config),
            build_mlp(config),
            width=config.width,
            norm_layer=norm_layer(config),
            layer_scale=layer_scale(config),
            norm_first=config.norm != "post",
            dropout=config.dropout,
            drop_path=drop_path,
        )
        for drop_path in drop_path_rates(config.drop_path, config.depth)
    ]


def build_decoder_blocks(config: StackConfig, depth: int) -> list[DecoderBlock]:
    return [
        DecoderBlock(
            build_attention(config),
            build_attention(config),
            build_mlp(config),
            width=config.width,
            norm_layer=norm_layer(config),
            layer_scale=layer_scale(config),
            norm_first=config.norm != "post",
            dropout=config.dropout,
            drop_path=drop_path,
        )
        for drop_path in drop_path_rates(config.drop_path, depth)
    ]


def build_attention(config: StackConfig) -> MultiHeadAttention:
    return MultiHeadAttention(
        config.width,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        qk_norm=partial(build_norm, config) if config.qk_norm else None,
        bias=config.bias,
        output_projection=config.output_projection,
        dropout=config.attention_dropout,
        beta=config.beta,
    )


def build_mlp(config: StackConfig) -> MLP | SwiGLU:
    if config.activation == "swiglu":
        return SwiGLU(config.width, config.mlp_width, config.mlp_dropout, bias=config.bias)
    activation = ACTIVATIONS[config.activation]
    return MLP(config.width, config.mlp_width, activation, config.mlp_dropout, bias=config.bias)


def build_norm(config: StackConfig, width: int) -> nn.Module:
    if config.norm_layer == "rmsnorm":
        return RMSNorm(width, config.norm_eps)
    return nn.LayerNorm(width, config.norm_eps, bias=config.bias)


def norm_layer(config: StackConfig) -> NormLayer:
    """For the norms around the sublayers of a block."""
    return nn.Identity if config.norm == "none" else partial(build_norm, config)


def layer_scale(config: StackConfig) -> NormLayer:
    return nn.Identity if config.layer_scale is None else partial(LayerScale, init=config.layer_scale)


def final_norm(config: StackConfig) -> nn.Module:
    """The norm after the last block. Only pre-norm needs one: its residual stream is not normalized."""
    return build_norm(config, config.width) if config.norm == "pre" else nn.Identity()


def drop_path_rates(last: float, depth: int) -> list[float]:
    """Stochastic depth (Huang et al., 2016): the rate increases linearly over the blocks up to `last`."""
    return [last * (i + 1) / depth for i in range(depth)]


def build_pos_embed(kind: str, context_length: int, config: StackConfig) -> PosEmbed:
    match kind:
        case "sinusoidal":
            return SinusoidalPosEmbed()
        case "learned":
            return LearnedPosEmbed(context_length, config.width)
        case "rotary":
            return RotaryPosEmbed(config.head_dim)
        case "alibi":
            return AlibiPosEmbed(config.num_heads)
        case "none":
            return NoPosEmbed()
        case _:
            raise ValueError(f"unknown pos_embed {kind!r}")


def build_pooling(config: PredictorConfig | VisionConfig) -> Pooling:
    match config.pooling:
        case "cls":
            return ClassToken(config.width)
        case "mean":
            return MeanPooling()
        case "attention":
            return AttentionPooling(config.width, config.num_heads)
        case "none":
            return NoPooling()
        case _:
            raise ValueError(f"unknown pooling {config.pooling!r}")


def build_head(config: PredictorConfig | VisionConfig, out_features: int) -> nn.Module:
    """A linear layer, or an MLP if head_mlp_dim is above 0. (...,E) -> (...,out_features)"""
    if not config.head_mlp_dim:
        return Linear(config.width, out_features)
    if config.activation == "swiglu":
        return SwiGLU(config.width, config.head_mlp_dim, config.mlp_dropout, out_features=out_features)
    has_norm = isinstance(config, PredictorConfig) and config.head_norm
    return MLP(
        config.width,
        config.head_mlp_dim,
        ACTIVATIONS[config.activation],
        config.mlp_dropout,
        out_features=out_features,
        norm=build_norm(config, config.head_mlp_dim) if has_norm else None,
    )


def input_embeddings(
    embed: Callable[[Tensor], Tensor], x: Tensor | None, inputs_embeds: Tensor | None, width: int
) -> Tensor:
    """embed(x), or inputs_embeds (B,L,E) if they are given instead of x."""
    if (x is None) == (inputs_embeds is None):
        given = "neither" if x is None else "both"
        raise ValueError(f"a model takes either its input or inputs_embeds, got {given}")
    if inputs_embeds is None:
        assert x is not None
        return embed(x)
    if not inputs_embeds.is_floating_point():
        raise ValueError(
            f"inputs_embeds must be floating point, got {inputs_embeds.dtype}; pass ids as the first argument"
        )
    check_width(inputs_embeds, width, "inputs_embeds")
    check_batched(inputs_embeds, 3, "inputs_embeds must be (batch, length, width)")
    return inputs_embeds


def check_batched(x: Tensor, n_dims: int, rule: str) -> None:
    if x.dim() != n_dims:
        raise ValueError(f"{rule}, got shape {tuple(x.shape)}; x[None] adds a batch dimension")
