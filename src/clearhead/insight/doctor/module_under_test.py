"""How a mask is written down: ours is bool (B,Q,K), True = may attend; others turn it round, add it, drop axes.

Dims: B batch, H heads, Q queries, K keys.
"""

import copy
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clearhead.insight.doctor.inputs import ModelInput
from clearhead.insight.doctor.parameters import is_about_source, is_across
from clearhead.interception import MULTI_HEAD_ATTENTION, SDPA, Intercept

Meaning = Literal["may", "hidden", "ones", "added"]

MEANINGS: dict[Meaning, str] = {
    "hidden": "True = hidden",
    "may": "True = may attend",
    "added": "added to the scores, -inf = hidden",
    "ones": "1 = may attend",
}

SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "(B,K)": lambda seen: seen[:, 0],
    "(Q,K)": lambda seen: seen[0],
    "(B,1,1,K)": lambda seen: seen[:, None, :1],
    "(B,1,K)": lambda seen: seen[:, :1],
    "(B,Q,K)": lambda seen: seen,
    "(B,1,Q,K)": lambda seen: seen[:, None],
}
OF_TOKENS = ("(B,K)", "(B,1,1,K)", "(B,1,K)", "(B,Q,K)", "(B,1,Q,K)")
OF_PAIRS = ("(Q,K)", "(B,1,Q,K)", "(B,Q,K)")
OF_BOTH = ("(B,1,Q,K)", "(B,Q,K)")


@dataclass(frozen=True)
class MaskConvention:
    """The shape of a mask, and what its numbers mean; for lengths, the shape (B,) and the meaning "ones"."""

    shape: str
    meaning: Meaning

    def write(self, seen: Tensor, dtype: torch.dtype) -> Tensor:
        """From (B,Q,K), True = may attend."""
        if self.shape == "(B,)":
            return seen[:, 0].sum(-1)
        mask = SHAPES[self.shape](seen)
        if self.meaning == "may":
            return mask.clone()
        if self.meaning == "hidden":
            return ~mask
        if self.meaning == "ones":
            return mask.long()
        return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -math.inf)

    def __str__(self) -> str:
        return "real tokens" if self.shape == "(B,)" else f"{self.shape}, {MEANINGS[self.meaning]}"


LENGTHS = MaskConvention("(B,)", "ones")


def mask_conventions(shapes: tuple[str, ...]) -> Iterator[MaskConvention]:
    """All, the likeliest first."""
    for meaning in MEANINGS:
        for shape in shapes:
            yield MaskConvention(shape, meaning)


def usual(name: str) -> Meaning | None:
    """What a mask of this name means wherever it is used, at Hugging Face or in torch.nn; others mean either."""
    if name.endswith("attention_mask"):
        return "may"
    return "hidden" if name.endswith("key_padding_mask") else None


def is_turned(name: str, meaning: Meaning) -> bool:
    """Whether it says the opposite of what its name promises."""
    promised = usual(name)
    return promised is not None and (meaning in ("may", "ones")) != (promised == "may") and meaning != "added"


# A module under examination: a copy of it, how it is called, and what it answers.
#
# The copy is in its evaluation stage and in float64 where it can be, so that what must not move does not move at all.
# Its
# weights are shaken a little: weights that start at zero would hide what flows through them.
# Dims: B batch, L length, Q queries or outputs, K keys.


EXAMPLES = 5
"""a number that is rarely that of heads, layers or tokens, so that a mask of a wrong shape does not fit by chance"""
SHAKE = 0.05
Inputs = dict[str, Tensor]
Masks = Mapping[str, tuple[MaskConvention, Tensor]]
"""by parameter: how the mask is written, and the mask itself (B,Q,K), True = may attend"""


@dataclass(frozen=True)
class CallPlan:
    """How a module is called."""

    main: str
    """the sequence whose places the outputs have"""
    source: str | None
    """the sequence that the main one only reads from"""
    feeds: Mapping[str, ModelInput]
    lengths: Mapping[str, int]
    same: tuple[str, ...] = ()
    """parameters that get the main sequence again"""
    nothing: tuple[str, ...] = ()
    """required parameters that get None"""
    switches: tuple[str, ...] = ()
    masks: Mapping[str, MaskConvention] = field(default_factory=dict)
    """those given in every call; they hide nothing unless they are causal"""
    causal: tuple[str, ...] = ()
    batch_first: bool = True
    is_number: bool = False
    """whether each output is one number: (B,L) answers"""

    def keys_of(self, mask: str) -> str:
        """The sequence whose tokens a mask hides. One that makes the main sequence causal is its own."""
        is_source = mask not in self.causal and is_about_source(mask, self.source)
        return self.source if is_source and self.source else self.main


@dataclass(frozen=True)
class ModuleUnderTest:
    model: nn.Module
    plan: CallPlan
    dtype: torch.dtype

    @property
    def length(self) -> int:
        return self.plan.lengths[self.plan.main]

    def draw(self, seed: int, n_examples: int = EXAMPLES) -> Inputs:
        return {
            name: feed.draw(n_examples, self.plan.lengths[name], generator(seed, i))
            for i, (name, feed) in enumerate(self.plan.feeds.items())
        }

    def changed(self, inputs: Inputs, name: str, index: Any, seed: int = 1) -> Inputs:
        """The same with other tokens at an index of one sequence."""
        x = inputs[name].clone()
        x[index] = self.plan.feeds[name].others(x, generator(seed))[index]
        return {**inputs, name: x}

    def answer(self, inputs: Inputs, masks: Masks | None = None, seed: int = 0) -> Tensor:
        """(B,Q,...): what it answers, without gradients."""
        with torch.no_grad(), undisturbed(self.dtype, seed):
            return self.shaped(tensor_of(self.model(**self.arguments(inputs, masks or {}))))

    def arguments(self, inputs: Inputs, masks: Masks) -> dict[str, Any]:
        """All that forward() gets, as it wants it."""
        given: dict[str, Any] = {}
        for name, x in inputs.items():
            x = x.to(self.dtype if x.is_floating_point() else x.dtype, copy=True)  # forward() may write into it
            given[name] = x if self.plan.batch_first else x.transpose(0, 1)
        given |= dict.fromkeys(self.plan.same, given[self.plan.main])
        given |= dict.fromkeys(self.plan.nothing)
        given |= dict.fromkeys(self.plan.switches, True)
        n_examples = len(next(iter(inputs.values())))
        together = {name: (encoding, self.always(name, n_examples)) for name, encoding in self.plan.masks.items()}
        for name, (encoding, seen) in masks.items():
            together[name] = (encoding, seen & together[name][1] if name in together else seen)
        for name, (encoding, seen) in together.items():
            seen = seen[:, : self.length] if is_across(name, self.plan.source) else seen  # (B,K,K) until here
            given[name] = encoding.write(seen, self.dtype)
        return given

    def always(self, name: str, n_examples: int = EXAMPLES) -> Tensor:
        """The mask of every call: causal, or one that hides nothing."""
        n_keys = self.plan.lengths[self.plan.keys_of(name)]
        everything = torch.ones(n_examples, n_keys, n_keys, dtype=torch.bool)
        return everything.tril() if name in self.plan.causal else everything

    def shaped(self, output: Tensor) -> Tensor:
        """Examples first, then places; (B L,V), (B,V,L) and (B,L) are put in that order."""
        if self.plan.is_number:
            output = output[..., None]
        if not self.plan.batch_first and output.dim() > 2:
            output = output.transpose(0, 1)
        if output.dim() == 2 and output.shape[0] == EXAMPLES * self.length:
            return output.unflatten(0, (EXAMPLES, self.length))
        if output.dim() == 3 and output.shape[1] != self.length == output.shape[2]:
            return output.transpose(1, 2)
        return output

    def has_places(self, output: Tensor) -> bool:
        """Whether there is an output for each token."""
        return output.dim() > 2 and output.shape[1] == self.length and self.has_tokens

    @property
    def has_tokens(self) -> bool:
        return self.plan.lengths[self.plan.main] > 0

    def by(self, **changes: Any) -> "ModuleUnderTest":
        """The same module, called in another way."""
        return replace(self, plan=replace(self.plan, **changes))


def generator(seed: int, part: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * seed + part)


def unwrapped(module: nn.Module) -> nn.Module:
    """What torch.compile wrapped, or the module itself."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else module


def copied(module: nn.Module) -> nn.Module:
    """A copy to be examined; the module itself stays as it is."""
    if any(nn.parameter.is_lazy(tensor) or tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise ValueError(
            "a module's parameters and buffers must have numbers, got lazy ones, or ones on the meta device; "
            "call it once first, in a function that returns it"
        )
    try:
        twin = copy.deepcopy(module, calculated(module))
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"a module must be one that copy.deepcopy can copy, got {type(error).__name__}: {first}; "
            "keep only parameters, buffers and modules in it, not what was calculated from them"
        ) from None
    return twin.eval()


def calculated(module: nn.Module) -> dict[int, Any]:
    """By id, what a module has kept of its last pass (attention weights, say), without the history that forbids a
    copy."""
    kept = [value for part in module.modules() for value in vars(part).values()]
    kept += [x for value in kept if isinstance(value, list | tuple) for x in value]
    kept += [x for value in kept if isinstance(value, dict) for x in value.values()]
    return {id(x): x.detach().clone() for x in kept if isinstance(x, Tensor) and x.grad_fn is not None}


@torch.no_grad()
def shaken(module: nn.Module) -> nn.Module:
    """Rows of padding stay: they may be the zeros that a sum relies on."""
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding) and part.padding_idx is not None]
    padding = {id(table.weight): table.padding_idx for table in tables}
    for i, parameter in enumerate(module.parameters()):
        if parameter.requires_grad and parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=generator(2, i), dtype=torch.float64)
            if id(parameter) in padding:
                noise[padding[id(parameter)]] = 0.0
            parameter.add_(SHAKE * noise.to(parameter))
    return module


@contextmanager
def undisturbed(dtype: torch.dtype, seed: int) -> Iterator[None]:
    """Random numbers come from this seed, tensors are born in this dtype; afterwards everything is as before.

    torch.nn's fast path and compiled code are off: neither is exact in float64, and neither shows its attention. So is
    the detection of anomalies, which turns a NaN into an error.
    """
    was_dtype, was_fast = torch.get_default_dtype(), torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(warnings.catch_warnings())
        stack.callback(torch.set_default_dtype, was_dtype)
        stack.callback(torch.backends.mha.set_fastpath_enabled, was_fast)
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(seed)
        torch.backends.mha.set_fastpath_enabled(False)
        torch.set_default_dtype(torch.float64 if dtype == torch.float64 else torch.float32)
        yield


class NoOutputError(ValueError):
    """forward() returns nothing that could be looked at."""


def tensor_of(output: Any) -> Tensor:
    """The answer itself, where a module returns more than one thing: logits, or the first tensor of numbers."""
    for part in tensors_of(output):
        if part.dim() > 1 and part.numel():
            return part
    came = type(output).__name__
    if isinstance(output, Tensor):
        came = f"{output.dtype} {tuple(output.shape)}" + f", {output.layout}" * (output.layout != torch.strided)
        came += f", on the {output.device.type} device" * (output.device.type != "cpu")
    raise NoOutputError(
        f"must return a tensor (batch, ...), or a tuple, dict or dataclass with one, got {came}; return one"
    )


def tensors_of(output: Any) -> list[Tensor]:
    """All tensors of numbers that a module returns, the answer itself first; on the meta device there are none."""
    if isinstance(output, Tensor):
        parts = [output]
    elif isinstance(output, list | tuple):
        parts = list(output)
    else:
        named = output if isinstance(output, Mapping) else attributes(output)
        first = [name for name in ("logits", "last_hidden_state") if name in named]
        parts = [named[name] for name in dict.fromkeys([*first, *named])]
    dense = (part for part in parts if isinstance(part, Tensor) and part.layout == torch.strided)
    return [part for part in dense if part.is_floating_point() and part.device.type == "cpu"]


def attributes(output: Any) -> dict[str, Any]:
    """Of a dataclass, with slots or without, or of anything else."""
    slots = {one.name: getattr(output, one.name) for one in fields(output)} if is_dataclass(output) else {}
    return {**slots, **getattr(output, "__dict__", {})}


# Which random numbers are dropout's: one that is on in eval() is a mistake, other noise may be meant so.


class DropoutTracker:
    """Notices a dropout that is on, also within attention."""

    def __init__(self) -> None:
        self.is_on = False

    def handle(self, name: str, func: Any, args: Any, given: dict[str, Any]) -> Any:
        if "dropout" in name:  # F.dropout gives all by name; torch.dropout(input, p, train) by place
            training = given.get("training", given.get("train", args[2] if len(args) > 2 else False))
            self.is_on |= bool(training) and (given.get("p", args[1] if len(args) > 1 else 0.0) or 0.0) > 0
        if name == MULTI_HEAD_ATTENTION and len(args) > 10:  # seen from outside only
            self.is_on |= bool(given.get("training", True)) and args[10] > 0
        if name == SDPA:
            self.is_on |= given.get("dropout_p", args[4] if len(args) > 4 else 0.0) > 0
        return func(*args, **given)


def drops(subject: ModuleUnderTest) -> bool:
    """Whether a dropout is on in the evaluation stage."""
    seen = DropoutTracker()
    with torch.no_grad(), undisturbed(subject.dtype, 0), Intercept(seen.handle):
        subject.model(**subject.arguments(subject.draw(0), {}))
    return seen.is_on
