"""From a config to its parts: the one place where a name in a config becomes a module.

Dims: B batch, L length, E model width.
"""

from torch import nn

from clearhead.models.config import PredictorConfig, StackConfig, VisionConfig
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.blocks import DecoderBlock, EncoderBlock
from clearhead.nn.feedforward import ACTIVATIONS, FeedForward
from clearhead.nn.grid import GridPositions, LearnedGrid, NoGridPositions, RotaryGrid, SinusoidalGrid
from clearhead.nn.linear import XavierLinear
from clearhead.nn.patches import ConvolutionTokens, PatchTokens
from clearhead.nn.positions import (
    AlibiPositions,
    LearnedPositions,
    NoPositions,
    Positions,
    RotaryPositions,
    SinusoidalPositions,
)
from clearhead.nn.readout import AttentionPooling, ClassToken, EachToken, MeanPooling, Readout
from clearhead.nn.stacks import Decoder, Encoder
from clearhead.nn.stem import StemTokens


def attention(config: StackConfig) -> MultiHeadAttention:
    return MultiHeadAttention(
        config.width,
        config.n_heads,
        output_projection=config.output_projection,
        dropout=config.attention_dropout,
        beta=config.beta,
    )


def feedforward(config: StackConfig) -> FeedForward:
    activation = ACTIVATIONS[config.activation]
    return FeedForward(config.width, config.feedforward_width, activation, config.hidden_dropout)


def encoder(config: StackConfig) -> Encoder:
    return Encoder(
        [
            EncoderBlock(
                attention(config),
                feedforward(config),
                width=config.width,
                norm=config.norm,
                dropout=config.dropout,
                drop_path=drop_path,
                norm_eps=config.norm_eps,
            )
            for drop_path in rising(config.drop_path, config.depth)
        ],
        last_norm(config),
    )


def decoder(config: StackConfig, depth: int) -> Decoder:
    return Decoder(
        [
            DecoderBlock(
                attention(config),
                attention(config),
                feedforward(config),
                width=config.width,
                norm=config.norm,
                dropout=config.dropout,
                drop_path=drop_path,
                norm_eps=config.norm_eps,
            )
            for drop_path in rising(config.drop_path, depth)
        ],
        last_norm(config),
    )


def rising(last: float, depth: int) -> list[float]:
    """Stochastic depth grows in equal steps from block to block up to `last`: early blocks are needed most."""
    return [last * (i + 1) / depth for i in range(depth)]


def last_norm(config: StackConfig) -> nn.Module | None:
    """Pre-norm leaves the sum of all blocks without a norm; it gets one at the end."""
    return nn.LayerNorm(config.width, eps=config.norm_eps) if config.norm == "pre" else None


def positions(kind: str, context: int, config: StackConfig) -> Positions:
    match kind:
        case "sinusoidal":
            return SinusoidalPositions()
        case "learned":
            return LearnedPositions(context, config.width)
        case "rotary":
            return RotaryPositions(config.head_width)
        case "alibi":
            return AlibiPositions(config.n_heads)
        case _:
            return NoPositions()


def grid_positions(config: VisionConfig) -> GridPositions:
    match config.positions:
        case "sinusoidal":
            return SinusoidalGrid()
        case "learned":
            return LearnedGrid(config.grid, config.width)
        case "rotary":
            return RotaryGrid(config.head_width)
        case _:
            return NoGridPositions()


def tokenizer(config: VisionConfig) -> PatchTokens | ConvolutionTokens | StemTokens:
    sizes = config.channels, config.width, config.patch_size
    match config.tokenizer:
        case "patches":
            return PatchTokens(*sizes)
        case "convolutions":
            return ConvolutionTokens(*sizes)
        case "stem":
            return StemTokens(*sizes)


def readout(config: PredictorConfig | VisionConfig) -> Readout:
    match config.readout:
        case "class":
            return ClassToken(config.width)
        case "mean":
            return MeanPooling()
        case "attention":
            return AttentionPooling(config.width, config.n_heads)
        case _:
            return EachToken()


def head(config: PredictorConfig | VisionConfig, n_outputs: int) -> nn.Module:
    """From (…,E) to the answer's logits."""
    if not config.head_hidden:
        return XavierLinear(config.width, n_outputs)
    has_norm = isinstance(config, PredictorConfig) and config.head_norm
    return FeedForward(
        config.width,
        config.head_hidden,
        ACTIVATIONS[config.activation],
        config.hidden_dropout,
        n_out=n_outputs,
        norm=nn.LayerNorm(config.head_hidden, eps=config.norm_eps) if has_norm else None,
    )
