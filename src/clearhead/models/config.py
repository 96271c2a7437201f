"""Which function a model computes: frozen configs, checked when they are made. Importing this does not import torch."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from clearhead.messages import did_you_mean
from clearhead.nn.sizes import (
    check_beta,
    check_eps,
    check_even,
    check_halvings,
    check_heads,
    check_positive,
    check_rate,
    check_waves,
)

Norm = Literal["pre", "post", "none"]
Activation = Literal["gelu", "relu"]
Places = Literal["sinusoidal", "learned", "rotary", "alibi", "none"]
GridPlaces = Literal["learned", "sinusoidal", "rotary", "none"]
FirstWeights = Literal["xavier", "bert"]
Tokenizer = Literal["patches", "convolutions", "stem"]
Pooling = Literal["class", "mean", "attention"]
PredictorReadout = Literal["each", "class", "mean", "attention"]


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """A stack of equal blocks: what every model below has in common."""

    width: int
    depth: int
    n_heads: int
    hidden: int | None = None
    """width of the feed-forward net's middle; 4 * width unless given"""
    activation: Activation = "gelu"
    norm: Norm = "pre"
    norm_eps: float = 1e-5
    """eps of every layer norm, added to the variance"""
    dropout: float = 0.0
    """on the embeddings and on what each sublayer adds"""
    attention_dropout: float = 0.0
    """on the attention weights"""
    hidden_dropout: float = 0.0
    """inside the feed-forward net, where the vision transformer has it and the one of 2017 has not"""
    drop_path: float = 0.0
    """stochastic depth: chance of leaving out the last block's sublayers; earlier blocks less, in proportion"""
    beta: float | None = None
    """inverse temperature of attention; 1/sqrt(head width) unless given"""
    output_projection: bool = True
    """mix the heads' outputs by a linear layer (W_O)"""

    def __post_init__(self) -> None:
        check_positive(width=self.width, depth=self.depth, n_heads=self.n_heads, hidden=self.feedforward_width)
        check_heads(self.width, self.n_heads)
        check_yes_or_no(output_projection=self.output_projection)
        check_choice(activation=(self.activation, Activation), norm=(self.norm, Norm))
        check_eps("norm_eps", self.norm_eps)
        if self.beta is not None:
            check_beta(self.beta)
        for name in ("dropout", "attention_dropout", "hidden_dropout", "drop_path"):
            check_rate(name, getattr(self, name))

    @property
    def feedforward_width(self) -> int:
        return 4 * self.width if self.hidden is None else self.hidden

    @property
    def head_width(self) -> int:
        return self.width // self.n_heads


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """One attention layer on its own, for `shapes`. With a key or value width of its own: one head, without W_O."""

    width: int
    n_heads: int = 1
    key_width: int | None = None
    """numbers per query and key; width unless given"""
    value_width: int | None = None
    """numbers per value; width unless given"""

    def __post_init__(self) -> None:
        check_positive(width=self.width, n_heads=self.n_heads)
        check_heads(self.width, self.n_heads)
        if self.is_single:
            check_positive(key_width=self.query_key_width, value_width=self.values_width)
            if self.n_heads != 1:
                raise ValueError(
                    f"a key_width or value_width of its own needs a single head, got n_heads={self.n_heads}; "
                    "try n_heads=1"
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

    n_inputs: int
    """different tokens, or numbers per token"""
    n_outputs: int
    context: int = 512
    """longest sequence, for learned positions"""
    positions: Places = "sinusoidal"
    readout: PredictorReadout = "each"
    input_dropout: float = 0.0
    """on the inputs, before the layer that embeds them"""
    head_hidden: int = 0
    """width of one more layer before the answer; 0 for none"""
    head_norm: bool = False
    """layer norm in the head, between its first layer and the activation; needs head_hidden"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(n_inputs=self.n_inputs, n_outputs=self.n_outputs, context=self.context)
        check_rate("input_dropout", self.input_dropout)
        check_hidden(self.head_hidden)
        check_yes_or_no(head_norm=self.head_norm)
        if self.head_norm and not self.head_hidden:
            raise ValueError(
                "head_norm normalises the head's hidden layer, got head_norm=True with head_hidden=0; "
                f"try head_hidden={self.width}"
            )
        check_choice(readout=(self.readout, PredictorReadout))
        check_places(self.positions, self)


@dataclass(frozen=True, kw_only=True)
class VisionConfig(StackConfig):
    """A vision transformer."""

    image_size: int | tuple[int, int]
    """height and width that the model is built for; others work too"""
    patch_size: int
    n_classes: int
    channels: int = 3
    tokenizer: Tokenizer = "patches"
    positions: GridPlaces = "learned"
    readout: Pooling = "class"
    head_hidden: int = 0
    """width of one more layer before the answer; 0 for none"""
    embedding_norm: bool = False
    """layer norm on the embeddings, as BERT does"""
    first_weights: FirstWeights = "xavier"
    """how weights start: by the widths of each layer, or small, as BERT's do"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.image_size, list):  # a tuple that has been in a JSON file
            object.__setattr__(self, "image_size", tuple(self.image_size))
        size = self.image_size
        if not isinstance(size, int) and not (isinstance(size, tuple) and len(size) == 2):
            raise ValueError(f"image_size must be a number or (height, width), got {size!r}; try 32")
        check_yes_or_no(embedding_norm=self.embedding_norm)
        check_hidden(self.head_hidden)
        check_positive(patch_size=self.patch_size, n_classes=self.n_classes, channels=self.channels)
        check_choice(
            tokenizer=(self.tokenizer, Tokenizer),
            positions=(self.positions, GridPlaces),
            readout=(self.readout, Pooling),
            first_weights=(self.first_weights, FirstWeights),
        )
        height, width = self.image_shape
        check_positive(image_height=height, image_width=width)
        if height % self.patch_size or width % self.patch_size:
            raise ValueError(
                f"image_size must be a multiple of patch_size, got {height} x {width} and {self.patch_size}; "
                "choose a patch size that divides both"
            )
        if self.tokenizer != "patches":
            check_halvings(self.patch_size)
        if self.positions == "rotary":
            check_even(self.head_width, 4)
        if self.positions == "sinusoidal":
            check_waves(self.width, 4)

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
    """The encoder-decoder of 2017; `depth` blocks in the encoder and, unless given, as many in the decoder."""

    n_source: int
    """different source tokens"""
    n_target: int
    """different target tokens"""
    decoder_depth: int | None = None
    context: int = 512
    """longest sequence, for learned positions"""
    positions: Places = "sinusoidal"
    tie_weights: bool = False
    """one table for the target's embedding and the output; with n_source = n_target for the source's too"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_yes_or_no(tie_weights=self.tie_weights)
        check_positive(
            n_source=self.n_source, n_target=self.n_target, context=self.context, decoder_depth=self.decoder_blocks
        )
        check_places(self.positions, self)

    @property
    def decoder_blocks(self) -> int:
        return self.depth if self.decoder_depth is None else self.decoder_depth


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(StackConfig):
    """The decoder-only language model."""

    n_tokens: int
    """different tokens"""
    context: int = 512
    """longest sequence, for learned positions"""
    positions: Places = "learned"
    tie_weights: bool = True
    """one table for the embedding and the output"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_yes_or_no(tie_weights=self.tie_weights)
        check_positive(n_tokens=self.n_tokens, context=self.context)
        check_places(self.positions, self)


ModelConfig = PredictorConfig | VisionConfig | Seq2SeqConfig | LanguageConfig


def check_hidden(head_hidden: int) -> None:
    if not isinstance(head_hidden, int) or isinstance(head_hidden, bool) or head_hidden < 0:
        raise ValueError(f"head_hidden must be a whole number of at least 0, got {head_hidden!r}; 0 for no such layer")


def check_yes_or_no(**flags: bool) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{name} must be True or False, got {flag!r}")


def check_choice(**choices: tuple[str, Any]) -> None:
    for name, (value, allowed) in choices.items():
        if value not in get_args(allowed):
            hint = did_you_mean(value, get_args(allowed))
            raise ValueError(f"{name} must be one of {', '.join(get_args(allowed))}, got {value!r}{hint}")


def check_places(positions: str, stack: StackConfig) -> None:
    check_choice(positions=(positions, Places))
    if positions == "rotary":
        check_even(stack.head_width, 2)
    if positions == "sinusoidal":
        check_waves(stack.width, 2)


def check_kind(config: object, kind: type) -> None:
    if not isinstance(config, kind):
        raise ValueError(
            f"this model is built from a {kind.__name__}, got {config!r}; "
            f"make one, or take one from clearhead.models.presets"
        )
