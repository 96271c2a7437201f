"""Arguments of forward(): the role of each parameter, by its name; random inputs; and masks in every convention.

Shapes: B batch, L length, Q queries, K keys, E width, C channels.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

Role = Literal["sequence", "target", "memory", "key_value", "padding", "lengths", "attention", "causal", "labels"]
"""sequence: the input; target: a decoder's input; memory: an encoder's output; key_value: keys or values of
self-attention; padding: a mask of tokens; lengths: the number of real tokens; attention: a mask of (query, key) pairs;
causal: a flag; labels: the token ids again"""

QUERY_NAME = re.compile(r"q|query|queries")
KEY_VALUE_NAME = re.compile(r"k|keys?|v|values?")
TARGET_NAME = re.compile(
    r"tgt|trg|(dec|decoder)_(x|input|inputs|input_ids)|(tgt|trg|target)_(ids|tokens|seq|input|inputs)"
)
TARGET_OR_LABELS_NAME = re.compile(r"y|target")
MEMORY_NAME = re.compile(r"memory|context|enc|encoded|(enc|encoder)_(src|out|output|outputs|states|hidden_states)")
NON_ATTENTION_MASK_NAME = re.compile(r"(.*_)?(loss|labels?|heads?|special_tokens?|completion|response)_mask")
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


def parameters_of(forward: Callable[..., Any]) -> list[Parameter]:
    """The parameters with a role; raises ValueError if a required one has none."""
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):
        raise ValueError(
            "forward() has no signature that Python can inspect; wrap the module in one with forward(self, x)"
        ) from None
    named = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not named:
        raise ValueError("forward() has no named parameters; wrap the module in one with forward(self, x)")
    parameters = []
    for i, parameter in enumerate(named):
        is_required = parameter.default is parameter.empty
        role = "sequence" if i == 0 else role_of(parameter.name.lower(), named[0].name.lower(), is_required)
        if role in ("padding", "attention", "lengths") and isinstance(parameter.default, bool):
            role = None  # has_mask=True is a flag
        if role is not None:
            parameters.append(Parameter(parameter.name, role, is_required))
        elif is_required:
            raise ValueError(
                f"no rule fills the required parameter {parameter.name!r} of forward(); write a function that returns "
                "a wrapper with forward(self, x) and examine that (see clearhead doctor --help)"
            )
    if main_and_source(parameters)[1] is None:
        return [p for p in parameters if p.is_required or not MEMORY_PREFIX.fullmatch(p.name.lower())]
    return parameters


def role_of(name: str, first: str, is_required: bool) -> Role | None:
    """The role of any parameter but the first, which is called `first`."""
    if KEY_VALUE_NAME.fullmatch(name) and QUERY_NAME.fullmatch(first):
        return "key_value"
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

    @property
    def allowed(self) -> Tensor:
        ids = [i for i in range(min(self.vocab_size, MAX_DISTINCT_IDS)) if i not in (0, self.padding_id)]
        return torch.tensor(ids if len(ids) > 1 else range(self.vocab_size))

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Tensor:
        allowed = self.allowed
        return allowed[torch.randint(len(allowed), (batch_size, length), generator=generator)]

    def resample(self, x: Tensor, generator: torch.Generator) -> Tensor:
        allowed = self.allowed
        steps = torch.randint(1, len(allowed), x.shape, generator=generator)
        return allowed[(torch.searchsorted(allowed, x.contiguous()) + steps) % len(allowed)]

    def describe(self, shape: str) -> str:
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


IMAGE_SIZES = (32, 28, 64, 224)


def candidate_inputs(model: nn.Module, width: int | None) -> Iterator[ModelInput]:
    """The inputs that a model may take, the most likely first."""
    if width is not None:
        yield FeatureInput(width)
        return
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module.num_embeddings > 1]
    sizes = [table.num_embeddings for table in tables]
    for size in dict.fromkeys([*sizes[:1], min(sizes)] if sizes else []):
        padded = [table for table in tables if table.num_embeddings >= size and table.padding_idx is not None]
        yield TokenIds(size, next((table.padding_idx for table in padded), None))
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    if not convolutions:
        yield from map(FeatureInput, candidate_widths(model) or [8])
    for channels in [convolutions[0].in_channels] if convolutions else [3, 1]:
        yield from (ImageInput(channels, size) for size in IMAGE_SIZES)


def candidate_widths(model: nn.Module, limit: int = 8) -> list[int]:
    """The feature widths that the first layers may take."""
    sizes = [size for parameter in model.parameters() if parameter.dim() == 2 for size in reversed(parameter.shape)]
    norms = [module.normalized_shape[-1] for module in model.modules() if isinstance(module, nn.LayerNorm)]
    return list(dict.fromkeys(sizes + norms))[:limit]


def candidate_lengths(model: nn.Module, length: int, limit: int = 4) -> list[int]:
    """`length`, and the lengths that position tables (1,L,E) and mask buffers (...,L,L) may require."""
    tensors = [*model.parameters(), *model.buffers()]
    positions = [x.shape[1] for x in tensors if x.dim() == 3 and x.shape[0] == 1 and 1 < x.shape[1] <= 512]
    masks = [x.shape[-1] for x in model.buffers() if x.dim() >= 2 and 1 < x.shape[-1] == x.shape[-2] <= 512]
    shorter = [n for n in (*positions, *masks) if n < length]
    return list(dict.fromkeys([length, *shorter, *positions, *masks, 4]))[:limit]


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


def mask_conventions(shapes: tuple[str, ...]) -> Iterator[MaskConvention]:
    """Every polarity in each of these shapes, the most common first."""
    for polarity in POLARITIES:
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
