"""Arguments of forward(): the role of each parameter, by its name; random inputs; and masks in every convention.

Shapes: B batch, L length, Q queries, K keys, E width, C channels.
"""

import inspect
import math
import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

Role = Literal[
    "sequence",
    "target",
    "memory",
    "key_value",
    "padding",
    "lengths",
    "attention",
    "causal",
    "labels",
    "cache",
    "offset",
]
"""sequence: the input; target: a decoder's input; memory: an encoder's output; key_value: keys or values of
self-attention; padding: a mask of tokens; lengths: the number of real tokens; attention: a mask of (query, key) pairs;
causal: a flag; labels: the token ids again; cache: keys and values of former calls; offset: the position of the first
token"""

QUERY_NAME = re.compile(r"q|query|queries")
KEY_VALUE_NAME = re.compile(r"k|keys?|v|values?")
TARGET_NAME = re.compile(
    r"tgt|trg|(dec|decoder)_(x|input|inputs|input_ids)|(tgt|trg|target)_(ids|tokens|seq|input|inputs)"
)
TARGET_OR_LABELS_NAME = re.compile(r"y|target")
MEMORY_NAME = re.compile(r"memory|context|enc|encoded|(enc|encoder)_(src|out|output|outputs|states|hidden_states)")
CACHE_NAME = re.compile(r"(past|past_kv|past_key_values?|layer_past|(kv_)?caches?|state|hx|hidden_state)")
OFFSET_NAME = re.compile(r"start_pos(ition)?|(pos_)?offset|past_length")
NON_ATTENTION_MASK_NAME = re.compile(
    r"(.*_)?(loss|labels?|heads?|special_tokens?|completion|response|global_attention)_mask"
)
"""masks that weigh a loss, disable heads or mark special tokens; they keep their default"""
ROLE_NAMES: dict[Role, re.Pattern[str]] = {
    "causal": re.compile(r"is_causal|causal"),
    "labels": re.compile(r"labels|targets"),
    "lengths": re.compile(r"(.*_)?(lengths|lens)"),
    "padding": re.compile(r".*pad.*mask|(.*_)?(attention|input|token|valid)_mask"),
    "attention": re.compile(r"(.*_)?mask"),
}

TARGET_PREFIX = re.compile(r"(tgt|trg|target|dec|decoder)_.*")
SOURCE_PREFIX = re.compile(r"(src|source|memory|context|enc|encoder|cross)_.*")
MEMORY_PREFIX = re.compile(r"(memory|context|enc|encoder|cross)_.*")
CROSS_PREFIX = re.compile(r"(memory|context|cross)_.*")
"""masks of cross-attention, which do not apply to the encoder itself"""


@dataclass(frozen=True)
class Parameter:
    """A parameter of forward() that the doctor can fill."""

    name: str
    role: Role
    is_required: bool


def parameters_of(forward: Callable[..., Any], given: Container[str] = ()) -> list[Parameter]:
    """The parameters with a role; raises ValueError if a required one has none and is not given by the caller."""
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):
        raise ValueError(
            "forward() has no signature that Python can inspect; wrap the module in one with forward(self, x)"
        ) from None
    named = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not named:
        raise ValueError("forward() has no named parameters; wrap the module in one with forward(self, x)")
    parameters, required = [], [p.name for p in named if p.default is p.empty]
    for i, parameter in enumerate(named):
        is_required = parameter.default is parameter.empty
        role = "sequence" if i == 0 else role_of(parameter.name.lower(), named[0].name.lower(), is_required)
        if role in ("padding", "attention", "lengths") and isinstance(parameter.default, bool):
            role = None  # has_mask=True is a flag
        if role is not None:
            parameters.append(Parameter(parameter.name, role, is_required))
        elif is_required and parameter.name not in given:
            example = ", ".join(f'"{name}": ...' for name in required)
            raise ValueError(
                f"no rule fills the required parameter {parameter.name!r} of forward(); pass your own inputs, "
                f"examine(module, inputs={{{example}}}) or --inputs FILE.py:NAME"
            )
    if main_and_source(parameters)[1] is None:
        return [p for p in parameters if p.is_required or not MEMORY_PREFIX.fullmatch(p.name.lower())]
    return parameters


def role_of(name: str, first: str, is_required: bool) -> Role | None:
    """The role of any parameter but the first, which is called `first`."""
    if KEY_VALUE_NAME.fullmatch(name) and QUERY_NAME.fullmatch(first):
        return "key_value"
    if is_required and (CACHE_NAME.fullmatch(name) or OFFSET_NAME.fullmatch(name)):
        return "cache" if CACHE_NAME.fullmatch(name) else "offset"
    if NON_ATTENTION_MASK_NAME.fullmatch(name) and not is_required:
        return None
    if TARGET_NAME.fullmatch(name):
        return "target"
    if TARGET_OR_LABELS_NAME.fullmatch(name):
        return "target" if is_required else "labels"
    if MEMORY_NAME.fullmatch(name):
        return "memory" if is_required else None
    return next((role for role, pattern in ROLE_NAMES.items() if pattern.fullmatch(name)), None)


def main_and_source(parameters: list[Parameter]) -> tuple[str, str | None]:
    """(the sequence whose tokens have outputs, the sequence that it attends to, or None)"""
    by_role = {parameter.role: parameter.name for parameter in reversed(parameters)}
    if "target" in by_role:
        return by_role["target"], by_role["sequence"]
    return by_role["sequence"], by_role.get("memory")


def masks_source(name: str, source: str | None) -> bool:
    """Whether a mask hides tokens of the source. Without a prefix, masks of a decoder apply to its own sequence."""
    if source is None or TARGET_PREFIX.fullmatch(name.lower()):
        return False
    return bool(SOURCE_PREFIX.fullmatch(name.lower())) or not MEMORY_NAME.fullmatch(source.lower())


def is_cross_mask(name: str, source: str | None) -> bool:
    """Whether a mask belongs to cross-attention: queries of the main sequence, keys of the source."""
    if source is None or not masks_source(name, source):
        return False
    return bool(MEMORY_NAME.fullmatch(source.lower()) or CROSS_PREFIX.fullmatch(name.lower()))


class ModelInput(Protocol):
    """A kind of input, drawn at random."""

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Tensor:
        """Token ids (B,L), float64 features (B,L,E) or float64 images (B,C,size,size)."""
        ...

    def resample(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """A tensor like x in which every token differs."""
        ...

    def describe(self, shape: str) -> str: ...


MAX_DISTINCT_IDS = 1000


@dataclass(frozen=True)
class TokenIds:
    """Ids below vocab_size, except for 0 and the padding id, which may mean padding, if enough others remain."""

    vocab_size: int
    padding_id: int | None = None
    codebooks: int = 0
    """several ids per token: (B,L,codebooks)"""

    @property
    def allowed(self) -> Tensor:
        ids = [i for i in range(min(self.vocab_size, MAX_DISTINCT_IDS)) if i not in (0, self.padding_id)]
        return torch.tensor(ids if len(ids) > 1 else range(self.vocab_size))

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Tensor:
        allowed, shape = self.allowed, (batch_size, length, self.codebooks)
        return allowed[torch.randint(len(allowed), shape if self.codebooks else shape[:2], generator=generator)]

    def resample(self, x: Tensor, generator: torch.Generator) -> Tensor:
        allowed = self.allowed
        steps = torch.randint(1, len(allowed), x.shape, generator=generator)
        return allowed[(torch.searchsorted(allowed, x.contiguous()) + steps) % len(allowed)]

    def describe(self, shape: str) -> str:
        shape = f"{shape[:-1]},{self.codebooks})" if self.codebooks else shape
        return f"ids {shape} below {self.vocab_size}"


@dataclass(frozen=True)
class FeatureInput:
    width: int

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Tensor:
        return torch.randn(batch_size, length, self.width, generator=generator, dtype=torch.float64)

    def resample(self, x: Tensor, generator: torch.Generator) -> Tensor:
        return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)

    def describe(self, shape: str) -> str:
        return f"features {shape[:-1]},{self.width})"


@dataclass(frozen=True)
class ImageInput:
    channels: int
    image_size: int

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Tensor:
        size = (batch_size, self.channels, self.image_size, self.image_size)
        return torch.randn(size, generator=generator, dtype=torch.float64)

    def resample(self, x: Tensor, generator: torch.Generator) -> Tensor:
        return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)

    def describe(self, shape: str) -> str:
        return f"images of {self.channels} x {self.image_size} x {self.image_size}"


@dataclass(frozen=True)
class PerExampleInput:
    """One token per example, without a length axis: ids (B,) or features (B,E)."""

    token: TokenIds | FeatureInput

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Tensor:
        return self.token.sample(batch_size, 1, generator)[:, 0]

    def resample(self, x: Tensor, generator: torch.Generator) -> Tensor:
        return self.token.resample(x[:, None], generator)[:, 0]

    def describe(self, shape: str) -> str:
        return f"{self.token.describe(shape)}, one per example"


@dataclass(frozen=True, eq=False)
class GivenInput:
    """The caller's own tensor (B,L,...), or an image; other tokens are drawn from its values."""

    tensor: Tensor

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Tensor:
        """The tensor itself for the first batch, repeated or cut to this number of examples and tokens."""
        x = self.tensor[torch.arange(batch_size) % len(self.tensor)]
        x = x[:, :length] if length else x
        return x.clone() if generator.initial_seed() < SEEDS_PER_BATCH else self.resample(x, generator)

    def resample(self, x: Tensor, generator: torch.Generator) -> Tensor:
        if x.is_floating_point():
            noise = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)
            return noise * self.tensor.std() + self.tensor.mean()
        values = self.tensor.unique()
        if len(values) < 2:
            return torch.where(x > 0, x - 1, x + 1)
        steps = torch.randint(1, len(values), x.shape, generator=generator)
        return values[(torch.searchsorted(values, x.contiguous()) + steps) % len(values)]

    def describe(self, shape: str) -> str:
        return f"given {str(self.tensor.dtype).removeprefix('torch.')} {tuple(self.tensor.shape)}"


SEEDS_PER_BATCH, MAX_IMAGE_SIZE = 1000, 512
IMAGE_NAME = re.compile(r"(input_)?(images?|imgs?|pixel_values|pixels)")
IMAGE_SIZES = (32, 28, 64, 224, 16, 48, 128, 256)
IMAGE_SIZE_NAME = re.compile(r"(img|image|input)_(size|resolution)")
CHANNELS_NAME = re.compile(r"(in|num|image)?_?(channels|chans)")


def candidate_inputs(model: nn.Module, width: int | None, is_image: bool = False) -> Iterator[ModelInput]:
    """The inputs that a model may take, the most likely first; no features if the name of the input says image."""
    if width is not None:
        yield FeatureInput(width)
        return
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module.num_embeddings > 1]
    sizes = [table.num_embeddings for table in tables]
    for size in dict.fromkeys([*sizes[:1], min(sizes)] if sizes else []):
        padded = [table for table in tables if table.num_embeddings >= size and table.padding_idx is not None]
        yield TokenIds(size, next((table.padding_idx for table in padded), None))
    for count in dict.fromkeys(sizes.count(size) for size in sizes[:1] if sizes.count(size) > 1):
        yield TokenIds(sizes[0], codebooks=count)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    own_sizes = list(dict.fromkeys([*named_numbers(model, IMAGE_SIZE_NAME), *grid_sizes(model)]))
    images = [
        ImageInput(channels, size)
        for channels in dict.fromkeys(
            [*(c.in_channels for c in convolutions[:1]), *named_numbers(model, CHANNELS_NAME), 3, 1]
        )
        for size in dict.fromkeys([*(n for n in own_sizes if 4 <= n <= MAX_IMAGE_SIZE), *IMAGE_SIZES])
    ]
    if not convolutions and not is_image:
        yield from map(FeatureInput, candidate_widths(model) or [8])
    yield from images if convolutions or not tables else images[: len(IMAGE_SIZES)]


def named_numbers(model: nn.Module, name: re.Pattern[str]) -> list[int]:
    """The integers that modules and their configs store under such a name; of a pair, such as a size, the larger."""
    found = []
    for part in model.modules():
        config = getattr(part, "config", None)
        stored = [*vars(part).items(), *(vars(config).items() if hasattr(config, "__dict__") else ())]
        for value in (value for key, value in stored if name.fullmatch(key)):
            numbers = value if isinstance(value, list | tuple) else (value,)
            if numbers and all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
                found.append(max(numbers))
    return list(dict.fromkeys(found))


def grid_sizes(model: nn.Module) -> list[int]:
    """Image sizes for which a position table (1,L,E) has one row per patch and a few more."""
    lengths = [x.shape[1] for x in model.parameters() if x.dim() == 3 and x.shape[0] == 1 and x.shape[1] > 3]
    grids = [
        round((n - extra) ** 0.5) for n in lengths for extra in range(3) if math.isqrt(n - extra) ** 2 == n - extra
    ]
    strides = [part.stride[0] for part in model.modules() if isinstance(part, nn.Conv2d)]
    patches = [math.prod(strides[:n]) for n in range(1, min(len(strides), 4) + 1)]
    widths = [part.in_features for part in model.modules() if isinstance(part, nn.Linear)][:2]
    patches += [math.isqrt(n // c) for n in widths for c in (3, 1) if math.isqrt(n // c) ** 2 * c == n]
    return [grid * patch for grid in grids for patch in patches]


def candidate_widths(model: nn.Module, limit: int = 8) -> list[int]:
    """The feature widths that the first layers may take."""
    sizes = [size for parameter in model.parameters() if parameter.dim() == 2 for size in reversed(parameter.shape)]
    norms = [module.normalized_shape[-1] for module in model.modules() if isinstance(module, nn.LayerNorm)]
    return list(dict.fromkeys(sizes + norms))[:limit]


def candidate_lengths(model: nn.Module, length: int, limit: int = 6) -> list[int]:
    """`length`, and the lengths that position tables (1,L,E) and mask buffers (...,L,L) may require."""
    tensors = [*model.parameters(), *model.buffers()]
    positions = [x.shape[1] for x in tensors if x.dim() == 3 and x.shape[0] == 1 and 1 < x.shape[1] <= 512]
    masks = [x.shape[-1] for x in model.buffers() if x.dim() >= 2 and 1 < x.shape[-1] == x.shape[-2] <= 512]
    shorter = [n for n in (*positions, *masks) if n < length]
    return list(dict.fromkeys([length, *shorter, *positions[:2], *masks[:2], 4, 8]))[:limit]


Polarity = Literal["masked", "attend", "additive", "ones"]
POLARITIES: dict[Polarity, str] = {
    "masked": "True = masked",
    "attend": "True = may attend",
    "additive": "added to the scores, -inf = masked",
    "ones": "1 = may attend",
}
MASK_SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "(B,K)": lambda visible: visible[:, 0],
    "(Q,K)": lambda visible: visible[0],
    "(B,1,1,K)": lambda visible: visible[:, None, :1],
    "(B,1,K)": lambda visible: visible[:, :1],
    "(B,Q,K)": lambda visible: visible,
    "(B,1,Q,K)": lambda visible: visible[:, None],
}
PADDING_SHAPES = ("(B,K)", "(B,1,1,K)", "(B,1,K)", "(B,Q,K)", "(B,1,Q,K)")
ATTENTION_SHAPES = ("(Q,K)", "(B,1,Q,K)", "(B,Q,K)")
COMBINED_SHAPES = ("(B,1,Q,K)", "(B,Q,K)")
"""shapes that hold a padding mask and a causal mask at once"""


@dataclass(frozen=True)
class MaskConvention:
    """The shape of a mask and the meaning of its values; sequence lengths are ("(B,)", "ones")."""

    shape: str
    polarity: Polarity

    def encode(self, visible: Tensor, dtype: torch.dtype) -> Tensor:
        """Converts a mask (B,Q,K), True = may attend, to this convention."""
        if self.shape == "(B,)":
            return visible[:, 0].sum(-1)
        mask = MASK_SHAPES[self.shape](visible)
        if self.polarity == "attend":
            return mask.clone()
        if self.polarity == "masked":
            return ~mask
        if self.polarity == "ones":
            return mask.long()
        return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -math.inf)

    def __str__(self) -> str:
        return "number of real tokens" if self.shape == "(B,)" else f"{self.shape}, {POLARITIES[self.polarity]}"


LENGTHS = MaskConvention("(B,)", "ones")


def mask_conventions(shapes: tuple[str, ...], names: Sequence[str] = ()) -> Iterator[MaskConvention]:
    """Every polarity in each of these shapes: the one that a name implies first, then the most common."""
    implied = {conventional_polarity(name) for name in names}
    for polarity in sorted(POLARITIES, key=lambda polarity: polarity not in implied):
        for shape in shapes:
            yield MaskConvention(shape, polarity)


def conventional_polarity(name: str) -> Polarity | None:
    """The polarity that a name implies in Hugging Face Transformers and in torch.nn; None if both are in use."""
    if name.endswith("attention_mask"):
        return "attend"
    return "masked" if name.endswith("key_padding_mask") else None


def contradicts_name(name: str, polarity: Polarity) -> bool:
    """Whether a mask means the opposite of what its name implies."""
    expected = conventional_polarity(name)
    return (
        expected is not None and polarity != "additive" and (polarity in ("attend", "ones")) != (expected == "attend")
    )
