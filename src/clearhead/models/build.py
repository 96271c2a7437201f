"""From a config to its parts: the one place where a name in a config becomes a module.

Dims: B batch, L length, E model width.
"""

from functools import partial

from torch import nn

from clearhead.models.config import PredictorConfig, StackConfig, VisionConfig
from clearhead.nn.attention import Linear, MultiHeadAttention
from clearhead.nn.blocks import ACTIVATIONS, MLP, DecoderBlock, EncoderBlock, NormLayer
from clearhead.nn.patch_embed import ConvEmbed, ConvStem, PatchEmbed
from clearhead.nn.pooling import AttentionPooling, ClassToken, MeanPooling, NoPooling, Pooling
from clearhead.nn.positions import (
    AlibiPosEmbed,
    LearnedPosEmbed,
    LearnedPosEmbed2d,
    NoPosEmbed,
    NoPosEmbed2d,
    PosEmbed,
    PosEmbed2d,
    RotaryPosEmbed,
    RotaryPosEmbed2d,
    SinusoidalPosEmbed,
    SinusoidalPosEmbed2d,
)


def build_attention(config: StackConfig) -> MultiHeadAttention:
    return MultiHeadAttention(
        config.width,
        config.num_heads,
        output_projection=config.output_projection,
        dropout=config.attention_dropout,
        beta=config.beta,
    )


def build_mlp(config: StackConfig) -> MLP:
    activation = ACTIVATIONS[config.activation]
    return MLP(config.width, config.mlp_width, activation, config.mlp_dropout)


def build_encoder_blocks(config: StackConfig) -> list[EncoderBlock]:
    return [
        EncoderBlock(
            build_attention(config),
            build_mlp(config),
            width=config.width,
            norm_layer=norm_layer(config),
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
            norm_first=config.norm != "post",
            dropout=config.dropout,
            drop_path=drop_path,
        )
        for drop_path in drop_path_rates(config.drop_path, depth)
    ]


def drop_path_rates(last: float, depth: int) -> list[float]:
    """Stochastic depth grows in equal steps from block to block up to `last`: early blocks are needed most."""
    return [last * (i + 1) / depth for i in range(depth)]


def final_norm(config: StackConfig) -> nn.Module:
    """Pre-norm leaves the sum of all blocks without a norm; it gets one at the end."""
    return nn.LayerNorm(config.width, eps=config.norm_eps) if config.norm == "pre" else nn.Identity()


def norm_layer(config: StackConfig) -> NormLayer:
    return nn.Identity if config.norm == "none" else partial(nn.LayerNorm, eps=config.norm_eps)


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
        case _:
            return NoPosEmbed()


def build_pos_embed_2d(config: VisionConfig) -> PosEmbed2d:
    match config.pos_embed:
        case "sinusoidal":
            return SinusoidalPosEmbed2d()
        case "learned":
            return LearnedPosEmbed2d(config.grid, config.width)
        case "rotary":
            return RotaryPosEmbed2d(config.head_dim)
        case _:
            return NoPosEmbed2d()


def build_patch_embed(config: VisionConfig) -> PatchEmbed | ConvEmbed | ConvStem:
    sizes = config.in_channels, config.width, config.patch_size
    match config.patch_embed:
        case "patch":
            return PatchEmbed(*sizes)
        case "conv":
            return ConvEmbed(*sizes)
        case "conv-stem":
            return ConvStem(*sizes)


def build_pooling(config: PredictorConfig | VisionConfig) -> Pooling:
    match config.pooling:
        case "cls":
            return ClassToken(config.width)
        case "mean":
            return MeanPooling()
        case "attention":
            return AttentionPooling(config.width, config.num_heads)
        case _:
            return NoPooling()


def build_head(config: PredictorConfig | VisionConfig, out_features: int) -> nn.Module:
    """From (…,E) to the answer's logits."""
    if not config.head_mlp_dim:
        return Linear(config.width, out_features)
    has_norm = isinstance(config, PredictorConfig) and config.head_norm
    return MLP(
        config.width,
        config.head_mlp_dim,
        ACTIVATIONS[config.activation],
        config.mlp_dropout,
        out_features=out_features,
        norm=nn.LayerNorm(config.head_mlp_dim, eps=config.norm_eps) if has_norm else None,
    )
