"""Building blocks of transformers: tensors in, tensors out. No files, no tokens, no configuration."""

from typing import TYPE_CHECKING

from clearhead.lazy import lazy_exports

if TYPE_CHECKING:
    from clearhead.nn import masks as masks
    from clearhead.nn.attention import LayerScale as LayerScale
    from clearhead.nn.attention import Linear as Linear
    from clearhead.nn.attention import MultiHeadAttention as MultiHeadAttention
    from clearhead.nn.attention import RMSNorm as RMSNorm
    from clearhead.nn.attention import SingleHeadAttention as SingleHeadAttention
    from clearhead.nn.attention import attend_fused as attend_fused
    from clearhead.nn.attention import attend_reference as attend_reference
    from clearhead.nn.attention import softargmax as softargmax
    from clearhead.nn.blocks import MLP as MLP
    from clearhead.nn.blocks import Decoder as Decoder
    from clearhead.nn.blocks import DecoderBlock as DecoderBlock
    from clearhead.nn.blocks import Encoder as Encoder
    from clearhead.nn.blocks import EncoderBlock as EncoderBlock
    from clearhead.nn.blocks import EncoderDecoder as EncoderDecoder
    from clearhead.nn.blocks import SwiGLU as SwiGLU
    from clearhead.nn.cache import DecoderCache as DecoderCache
    from clearhead.nn.cache import KVCache as KVCache
    from clearhead.nn.cache import LayerKVCache as LayerKVCache
    from clearhead.nn.positions import AlibiPosEmbed as AlibiPosEmbed
    from clearhead.nn.positions import LearnedPosEmbed as LearnedPosEmbed
    from clearhead.nn.positions import LearnedPosEmbed2d as LearnedPosEmbed2d
    from clearhead.nn.positions import NoPosEmbed as NoPosEmbed
    from clearhead.nn.positions import NoPosEmbed2d as NoPosEmbed2d
    from clearhead.nn.positions import PosEmbed as PosEmbed
    from clearhead.nn.positions import PosEmbed2d as PosEmbed2d
    from clearhead.nn.positions import RotaryPosEmbed as RotaryPosEmbed
    from clearhead.nn.positions import RotaryPosEmbed2d as RotaryPosEmbed2d
    from clearhead.nn.positions import SinusoidalPosEmbed as SinusoidalPosEmbed
    from clearhead.nn.positions import SinusoidalPosEmbed2d as SinusoidalPosEmbed2d
    from clearhead.nn.positions import alibi_bias as alibi_bias
    from clearhead.nn.positions import apply_rotary as apply_rotary
    from clearhead.nn.positions import rotary_angles as rotary_angles
    from clearhead.nn.positions import sinusoidal as sinusoidal
    from clearhead.nn.positions import sinusoidal_2d as sinusoidal_2d
    from clearhead.nn.tokens import AttentionPooling as AttentionPooling
    from clearhead.nn.tokens import ClassToken as ClassToken
    from clearhead.nn.tokens import ConvEmbed as ConvEmbed
    from clearhead.nn.tokens import ConvStem as ConvStem
    from clearhead.nn.tokens import MeanPooling as MeanPooling
    from clearhead.nn.tokens import NoPooling as NoPooling
    from clearhead.nn.tokens import PatchEmbed as PatchEmbed
    from clearhead.nn.tokens import Pooling as Pooling
    from clearhead.nn.tokens import RegisterTokens as RegisterTokens
    from clearhead.nn.tokens import from_patches as from_patches
    from clearhead.nn.tokens import to_patches as to_patches

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "clearhead.nn.attention": (
            "softargmax",
            "attend_reference",
            "attend_fused",
            "Linear",
            "RMSNorm",
            "LayerScale",
            "SingleHeadAttention",
            "MultiHeadAttention",
        ),
        "clearhead.nn.blocks": (
            "MLP",
            "SwiGLU",
            "EncoderBlock",
            "DecoderBlock",
            "Encoder",
            "Decoder",
            "EncoderDecoder",
        ),
        "clearhead.nn.positions": (
            "PosEmbed",
            "NoPosEmbed",
            "SinusoidalPosEmbed",
            "LearnedPosEmbed",
            "RotaryPosEmbed",
            "AlibiPosEmbed",
            "PosEmbed2d",
            "NoPosEmbed2d",
            "SinusoidalPosEmbed2d",
            "LearnedPosEmbed2d",
            "RotaryPosEmbed2d",
            "sinusoidal",
            "sinusoidal_2d",
            "rotary_angles",
            "apply_rotary",
            "alibi_bias",
        ),
        "clearhead.nn.tokens": (
            "PatchEmbed",
            "ConvEmbed",
            "ConvStem",
            "to_patches",
            "from_patches",
            "Pooling",
            "NoPooling",
            "ClassToken",
            "MeanPooling",
            "AttentionPooling",
            "RegisterTokens",
        ),
        "clearhead.nn.cache": ("KVCache", "LayerKVCache", "DecoderCache"),
    },
    modules=("clearhead.nn.masks",),
)
