"""Model configs: frozen, keyword-only dataclasses, validated when they are created. This does not import torch."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Self

from clearhead.validation import (
    check_beta,
    check_bool,
    check_choice,
    check_eps,
    check_heads,
    check_int,
    check_kv_heads,
    check_name,
    check_positive,
    check_power_of_two,
    check_range,
    check_rate,
    check_rotary_width,
    check_sinusoidal_width,
)

if TYPE_CHECKING:
    from torch import nn

Norm = Literal["pre", "post", "none"]
NormLayerName = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "relu", "swiglu"]
PosEmbedName = Literal["sinusoidal", "learned", "rotary", "alibi", "none"]
PosEmbed2dName = Literal["learned", "sinusoidal", "rotary", "none"]
InitName = Literal["xavier", "bert"]
PatchEmbedName = Literal["patch", "conv", "conv-stem"]
PoolingName = Literal["cls", "mean", "attention"]
MAX_NAME = 200
"""characters of the name of a user's class"""
PredictorPoolingName = Literal["none", "cls", "mean", "attention"]


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """A stack of equal blocks: what every model below has in common."""

    width: int
    """numbers per token, between the blocks"""
    depth: int
    """number of blocks"""
    num_heads: int
    """attention heads of each block; they share the width"""
    num_kv_heads: int | None = None
    """number of key and value heads, for grouped-query attention; num_heads unless given"""
    qk_norm: bool = False
    """normalize the queries and keys of each head"""
    mlp_dim: int | None = None
    """width of the MLP's hidden layer; 4 * width unless given, 8/3 * width for swiglu"""
    activation: Activation = "gelu"
    """activation of the MLP; swiglu is a gated MLP with three matrices"""
    norm: Norm = "pre"
    """position of the norms in a block"""
    norm_layer: NormLayerName = "layernorm"
    """kind of every norm"""
    norm_eps: float = 1e-5
    """eps of every norm, added to the variance"""
    layer_scale: float | None = None
    """initial value of layer scale, a learned factor per channel on what each sublayer adds; none unless given"""
    bias: bool = True
    """biases in the linear layers and the norms of the blocks"""
    dropout: float = 0.0
    """on the embeddings and on what each sublayer adds"""
    attention_dropout: float = 0.0
    """on the attention weights"""
    mlp_dropout: float = 0.0
    """after the activation of the MLP, as in ViT; the transformer of Vaswani et al. (2017) has none there"""
    drop_path: float = 0.0
    """stochastic depth: chance of leaving out the last block's sublayers; earlier blocks less, in proportion"""
    beta: float | None = None
    """inverse temperature of attention; 1/sqrt(head width) unless given"""
    output_projection: bool = True
    """mix the heads' outputs by a linear layer (W_O)"""

    def __post_init__(self) -> None:
        check_positive(width=self.width, depth=self.depth, num_heads=self.num_heads)
        check_positive(mlp_dim=self.mlp_width)  # computed from the width unless given
        check_heads(self.width, self.num_heads)
        check_kv_heads(self.num_heads, self.kv_heads)
        check_bool(output_projection=self.output_projection, qk_norm=self.qk_norm, bias=self.bias)
        check_choice(
            activation=(self.activation, Activation),
            norm=(self.norm, Norm),
            norm_layer=(self.norm_layer, NormLayerName),
        )
        check_eps(norm_eps=self.norm_eps)
        if self.beta is not None:
            check_beta(self.beta)
        if self.layer_scale is not None:
            check_range(0, math.inf, layer_scale=self.layer_scale)
        for name in ("dropout", "attention_dropout", "mlp_dropout", "drop_path"):
            check_rate(**{name: getattr(self, name)})

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` reverses it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """A config from the values of `to_dict`, which may have been stored as JSON."""
        names = [field.name for field in fields(cls)]
        for name in values:
            check_name(name, names, f"field of {cls.__name__}")
        return cls(**values)

    @property
    def mlp_width(self) -> int:
        if self.mlp_dim is not None:
            return self.mlp_dim
        return 8 * self.width // 3 if self.activation == "swiglu" else 4 * self.width

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """One attention layer on its own, for `shapes`. With a key or value width of its own: one head, without W_O."""

    width: int
    num_heads: int = 1
    key_width: int | None = None
    """numbers per query and key; width unless given"""
    value_width: int | None = None
    """numbers per value; width unless given"""

    def __post_init__(self) -> None:
        check_positive(width=self.width, num_heads=self.num_heads)
        check_heads(self.width, self.num_heads)
        if self.is_single:
            check_positive(key_width=self.query_key_width, value_width=self.values_width)
            if self.num_heads != 1:
                raise ValueError(
                    f"a key_width or value_width of its own needs a single head, got num_heads={self.num_heads}; "
                    "try num_heads=1"
                )

    @property
    def is_single(self) -> bool:
        return self.key_width is not None or self.value_width is not None

    @property
    def query_key_width(self) -> int:
        return self.width if self.key_width is None else self.key_width

    @property
    def values_width(self) -> int:
        return self.width if self.value_width is None else self.value_width


@dataclass(frozen=True, kw_only=True)
class PredictorConfig(StackConfig):
    """An encoder that answers for each token, or for the sequence as a whole."""

    in_features: int
    """different tokens, or numbers per token"""
    out_features: int
    """outputs per token, or per sequence with pooling: classes or numbers"""
    context_length: int = 512
    """longest sequence, for learned positions"""
    pos_embed: PosEmbedName = "sinusoidal"
    """how tokens get their positions"""
    pooling: PredictorPoolingName = "none"
    """from tokens to one vector for the sequence; none for an output at each token"""
    input_dropout: float = 0.0
    """on the inputs, before the layer that embeds them"""
    head_mlp_dim: int = 0
    """width of one more layer before the answer; 0 for none"""
    head_norm: bool = False
    """norm in the head, between its first layer and the activation; needs head_mlp_dim"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(in_features=self.in_features, out_features=self.out_features, context_length=self.context_length)
        check_rate(input_dropout=self.input_dropout)
        check_int(0, head_mlp_dim=self.head_mlp_dim)
        check_bool(head_norm=self.head_norm)
        if self.head_norm and not self.head_mlp_dim:
            raise ValueError(
                "head_norm normalizes the head's hidden layer, got head_norm=True with head_mlp_dim=0; "
                f"try head_mlp_dim={self.width}"
            )
        if self.head_norm and self.activation == "swiglu":
            raise ValueError("head_norm needs a head without gates, got head_norm=True with activation='swiglu'")
        check_choice(pooling=(self.pooling, PredictorPoolingName))
        check_pos_embed(self.pos_embed, self)


@dataclass(frozen=True, kw_only=True)
class VisionConfig(StackConfig):
    """A vision transformer."""

    image_size: int | tuple[int, int]
    """height and width that the model is built for; others work too"""
    patch_size: int
    """height and width of a patch, in pixels"""
    num_classes: int
    in_channels: int = 3
    """1 for gray images, 3 for color"""
    patch_embed: PatchEmbedName = "patch"
    """from pixels to tokens: a linear layer for each patch, strided convolutions, or convolutions with max pooling"""
    pos_embed: PosEmbed2dName = "learned"
    """how patches get their positions"""
    pooling: PoolingName = "cls"
    """from tokens to one vector for the image: the class token, their mean, or attention with a learned query"""
    num_register_tokens: int = 0
    """learned tokens that take part in attention and are left out before pooling"""
    head_mlp_dim: int = 0
    """width of one more layer before the answer; 0 for none"""
    embed_norm: bool = False
    """normalize the embeddings, as BERT does"""
    init: InitName = "xavier"
    """how weights start: by the widths of each layer, or small, as BERT's do"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.image_size, list):  # a tuple that has been in a JSON file
            object.__setattr__(self, "image_size", tuple(self.image_size))
        size = self.image_size
        if not isinstance(size, int) and not (isinstance(size, tuple) and len(size) == 2):
            raise ValueError(f"image_size must be a number or (height, width), got {size!r}; try 32")
        check_bool(embed_norm=self.embed_norm)
        check_int(0, head_mlp_dim=self.head_mlp_dim, num_register_tokens=self.num_register_tokens)
        check_positive(patch_size=self.patch_size, num_classes=self.num_classes, in_channels=self.in_channels)
        check_choice(
            patch_embed=(self.patch_embed, PatchEmbedName),
            pos_embed=(self.pos_embed, PosEmbed2dName),
            pooling=(self.pooling, PoolingName),
            init=(self.init, InitName),
        )
        height, width = self.image_shape
        check_positive(image_height=height, image_width=width)
        if height % self.patch_size or width % self.patch_size:
            raise ValueError(
                f"image_size must be a multiple of patch_size, got {height} x {width} and {self.patch_size}; "
                "choose a patch size that divides both"
            )
        if self.patch_embed != "patch":
            check_power_of_two(patch_size=self.patch_size)
        if self.pos_embed == "rotary":
            check_rotary_width(self.head_dim, 4)
        if self.pos_embed == "sinusoidal":
            check_sinusoidal_width(self.width, 4)

    @property
    def image_shape(self) -> tuple[int, int]:
        size = self.image_size
        return (size, size) if isinstance(size, int) else size

    @property
    def grid(self) -> tuple[int, int]:
        height, width = self.image_shape
        return height // self.patch_size, width // self.patch_size


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig(StackConfig):
    """The encoder-decoder of Vaswani et al. (2017); `depth` is also the decoder's unless `decoder_depth` is given."""

    src_vocab_size: int
    """different source tokens"""
    tgt_vocab_size: int
    """different target tokens"""
    decoder_depth: int | None = None
    """blocks of the decoder; depth unless given"""
    context_length: int = 512
    """longest sequence, for learned positions"""
    pos_embed: PosEmbedName = "sinusoidal"
    """how tokens get their positions"""
    tie_weights: bool = False
    """one table for the target's embedding and the output; with src_vocab_size = tgt_vocab_size for the source's too"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bool(tie_weights=self.tie_weights)
        check_positive(
            src_vocab_size=self.src_vocab_size,
            tgt_vocab_size=self.tgt_vocab_size,
            context_length=self.context_length,
            decoder_depth=self.decoder_blocks,
        )
        check_pos_embed(self.pos_embed, self)

    @property
    def decoder_blocks(self) -> int:
        return self.depth if self.decoder_depth is None else self.decoder_depth


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(StackConfig):
    """The decoder-only language model."""

    vocab_size: int
    """different tokens"""
    context_length: int = 512
    """longest sequence, for learned positions"""
    pos_embed: PosEmbedName = "learned"
    """how tokens get their positions"""
    tie_weights: bool = True
    """one table for the embedding and the output"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bool(tie_weights=self.tie_weights)
        check_positive(vocab_size=self.vocab_size, context_length=self.context_length)
        check_pos_embed(self.pos_embed, self)


@dataclass(frozen=True, kw_only=True)
class ModuleConfig:
    """A user's own nn.Module, which `clearhead.fit` trains: a description to recognize it, not to build it."""

    name: str = ""
    """the name of its class"""
    parameters: int = 0
    """number of parameters"""
    sha256: str = ""
    """of the names, types and shapes of all parameters and buffers"""
    infinite: tuple[str, ...] = ()
    """buffers that contain infinite values, such as additive masks"""

    def __post_init__(self) -> None:
        for name, value in (("name", self.name), ("sha256", self.sha256)):
            if not isinstance(value, str) or len(value) > MAX_NAME:
                raise ValueError(f"{name} must be a string of at most {MAX_NAME} characters, got {value!r:.60}")
        check_int(0, parameters=self.parameters)
        if not isinstance(self.infinite, tuple | list) or not all(isinstance(name, str) for name in self.infinite):
            raise ValueError(f"infinite must be names of buffers, got {self.infinite!r:.60}")
        object.__setattr__(self, "infinite", tuple(self.infinite))  # a list in JSON


ModelConfig = PredictorConfig | VisionConfig | Seq2SeqConfig | LanguageConfig | ModuleConfig


def build_model(config: ModelConfig) -> "nn.Module":
    """The model of a config, with random weights."""
    # The models import torch, and this module does not.
    from clearhead.models.language import LanguageModel
    from clearhead.models.predictor import SequencePredictor
    from clearhead.models.seq2seq import Seq2Seq
    from clearhead.models.vit import VisionTransformer

    match config:
        case PredictorConfig():
            return SequencePredictor.from_config(config)
        case VisionConfig():
            return VisionTransformer.from_config(config)
        case Seq2SeqConfig():
            return Seq2Seq.from_config(config)
        case LanguageConfig():
            return LanguageModel.from_config(config)
        case ModuleConfig():
            raise ValueError(f"{config.name} is a model of your own, which is not built from its description")
        case _:
            raise TypeError(
                "config must be a PredictorConfig, VisionConfig, Seq2SeqConfig or LanguageConfig, "
                f"got {type(config).__name__}"
            )


def check_pos_embed(pos_embed: str, stack: StackConfig) -> None:
    check_choice(pos_embed=(pos_embed, PosEmbedName))
    if pos_embed == "rotary":
        check_rotary_width(stack.head_dim, 2)
    if pos_embed == "sinusoidal":
        check_sinusoidal_width(stack.width, 2)


def check_kind(config: object, kind: type) -> None:
    if not isinstance(config, kind):
        raise ValueError(
            f"this model is built from a {kind.__name__}, got {config!r}; "
            f"make one, or take one from clearhead.models.presets"
        )
