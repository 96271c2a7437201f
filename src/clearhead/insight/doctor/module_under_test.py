"""The module under test: a copy of the user's module, how it is called, and how its outputs depend on its tokens.

The copy is in eval() mode and, where possible, in float64, so that an output that must not change does not change by
a single bit. Its parameters are perturbed, because parameters initialized to zero would block signals and gradients.
Shapes: B batch, L length, Q queries or outputs, K keys.
"""

import copy
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.insight.doctor.inputs import (
    SEEDS_PER_BATCH,
    MaskConvention,
    ModelInput,
    Parameter,
    is_cross_mask,
    masks_source,
)
from clearhead.interception import MULTI_HEAD_ATTENTION, SDPA, Intercept, argument

BATCH_SIZE = 5
"""an unusual number of heads, layers or tokens, so that a mask of the wrong shape does not broadcast by accident"""
PERTURBATION = 0.05
FLOAT32_TOLERANCE = 100
"""machine epsilons"""
TOLERANCE = 4
"""a value has changed if it differs by more than this many machine epsilons of the largest one; masks are exact"""
FILL_RATIO = 1e6
"""values larger than all changed ones by this factor count as fill values, such as -1e9 for excluded ids"""
Inputs = dict[str, Tensor]
Masks = Mapping[str, tuple[MaskConvention, Tensor]]
"""by parameter: the convention, and the mask (B,Q,K) itself, True = may attend"""


@dataclass(frozen=True)
class CallPlan:
    """The arguments of forward()."""

    main: str
    """the sequence whose tokens have outputs"""
    source: str | None
    """the sequence that the main one attends to"""
    inputs: Mapping[str, ModelInput]
    lengths: Mapping[str, int]
    aliases: tuple[str, ...] = ()
    """parameters that get the main sequence as well"""
    none_args: tuple[str, ...] = ()
    """required parameters that get None"""
    flags: tuple[str, ...] = ()
    """parameters that get True"""
    masks: Mapping[str, MaskConvention] = field(default_factory=dict)
    """masks of every call; all but the causal ones mask nothing"""
    causal_masks: tuple[str, ...] = ()
    batch_first: bool = True
    scalar_outputs: bool = False
    """whether an output is a single number: outputs are (B,L)"""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """arguments that never change: those of the caller that are no sequences, and the offset of the first token"""

    def masked_sequence(self, mask: str) -> str:
        """The sequence whose tokens a mask hides. A causal mask always applies to the main sequence."""
        is_source = mask not in self.causal_masks and masks_source(mask, self.source)
        return self.source if is_source and self.source else self.main


@dataclass(frozen=True, eq=False)
class ModuleUnderTest:
    model: nn.Module
    plan: CallPlan
    dtype: torch.dtype
    parameters: list[Parameter]
    native_dtype: torch.dtype
    """the dtype of the user's module"""
    unused_model: nn.Module
    """a copy that has never been called"""
    float64_error: str = ""
    """the error in float64, if the module runs only in its native dtype"""

    @property
    def length(self) -> int:
        return self.plan.lengths[self.plan.main]

    @property
    def has_tokens(self) -> bool:
        return self.length > 0

    def has_output_per_token(self, output: Tensor) -> bool:
        return output.dim() > 2 and output.shape[1] == self.length and self.has_tokens

    def with_plan(self, **changes: Any) -> "ModuleUnderTest":
        """The same module, called in another way."""
        return replace(self, plan=replace(self.plan, **changes))

    def with_dtype(self, dtype: torch.dtype) -> "ModuleUnderTest":
        return replace(self, model=eval_copy(self.model).to(dtype), dtype=dtype)

    def sample_inputs(self, seed: int, batch_size: int = BATCH_SIZE) -> Inputs:
        return {
            name: kind.sample(batch_size, self.plan.lengths[name], seeded_generator(seed, i))
            for i, (name, kind) in enumerate(self.plan.inputs.items())
        }

    def replace_tokens(self, inputs: Inputs, name: str, index: Any, seed: int = 1) -> Inputs:
        """The inputs with different tokens at an index of one sequence."""
        x = inputs[name].clone()
        x[index] = self.plan.inputs[name].resample(x, seeded_generator(seed))[index]
        return {**inputs, name: x}

    def run(self, inputs: Inputs, masks: Masks | None = None, seed: int = 0) -> Tensor:
        """The output (B,Q,...), without gradients."""
        with torch.no_grad(), isolated_state(self.dtype, seed):
            return self.batch_first_output(main_output(self.model(**self.arguments(inputs, masks or {}))))

    def arguments(self, inputs: Inputs, masks: Masks) -> dict[str, Any]:
        """All arguments of forward()."""
        arguments: dict[str, Any] = {}
        for name, x in inputs.items():
            x = x.to(self.dtype if x.is_floating_point() else x.dtype, copy=True)  # forward() may modify it in place
            arguments[name] = x if self.plan.batch_first else x.transpose(0, 1)
        arguments |= dict.fromkeys(self.plan.aliases, arguments[self.plan.main])
        arguments |= dict.fromkeys(self.plan.none_args)
        arguments |= dict.fromkeys(self.plan.flags, True)
        batch_size = len(next(iter(inputs.values())))
        arguments |= {name: repeated(x, batch_size, self.dtype) for name, x in self.plan.constants.items()}
        combined = {
            name: (convention, self.plan_mask(name, batch_size)) for name, convention in self.plan.masks.items()
        }
        for name, (convention, visible) in masks.items():
            combined[name] = (convention, visible & combined[name][1] if name in combined else visible)
        for name, (convention, visible) in combined.items():  # (B,K,K) until here
            visible = visible[:, : self.length] if is_cross_mask(name, self.plan.source) else visible
            arguments[name] = convention.encode(visible, self.dtype)
        return arguments

    def plan_mask(self, name: str, batch_size: int) -> Tensor:
        """(B,K,K): the mask of every call, either causal or all True."""
        num_keys = self.plan.lengths[self.plan.masked_sequence(name)]
        visible = torch.ones(batch_size, num_keys, num_keys, dtype=torch.bool)
        return visible.tril() if name in self.plan.causal_masks else visible

    def batch_first_output(self, output: Tensor) -> Tensor:
        """(B,L,...), also from (L,B,...), (B L,V), (B,V,L) and (B,L)."""
        if self.plan.scalar_outputs:
            output = output[..., None]
        if not self.plan.batch_first and output.dim() > 2:
            output = output.transpose(0, 1)
        if output.dim() == 2 and output.shape[0] == BATCH_SIZE * self.length:
            return output.unflatten(0, (BATCH_SIZE, self.length))
        if output.dim() == 3 and output.shape[1] != self.length == output.shape[2]:
            return output.transpose(1, 2)
        return output

    def describe_call(self) -> str:
        plan, arguments = self.plan, []
        for name, kind in plan.inputs.items():
            length = plan.lengths[name]
            shape = f"({BATCH_SIZE},{length})" if plan.batch_first else f"({length},{BATCH_SIZE})"
            arguments.append(f"{name}={kind.describe(shape)}")
        arguments += [f"{name}={plan.main}" for name in plan.aliases]
        arguments += [f"{name}=True" for name in plan.flags]
        arguments += [f"{name}={'given' if isinstance(x, Tensor) else x}" for name, x in plan.constants.items()]
        for name, convention in plan.masks.items():
            arguments.append(f"{name}={'causal' if name in plan.causal_masks else 'all visible'} {convention}")
        return f"forward({'; '.join(arguments)}), eval(), {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, eq=False)
class Dependency:
    """amounts (Q,L): the largest change of output i in any example when token j changes; 0 if there is none."""

    amounts: Tensor
    is_finite: bool
    """whether all outputs were finite"""

    @property
    def on_later(self) -> Tensor:
        """The dependencies on later tokens, which a causal model must not have."""
        return self.amounts.triu(1)

    @property
    def on_earlier(self) -> Tensor:
        return self.amounts.tril(-1)

    def describe_largest(self, amounts: Tensor) -> str:
        output, token = divmod(int(amounts.argmax()), amounts.shape[1])
        return f"output {output} changes by {amounts.max().item():.2g} when token {token} changes"


def dependency(
    module: ModuleUnderTest,
    inputs: Inputs,
    masks: Masks | None = None,
    sequence: str | None = None,
    positions: Sequence[int] | None = None,
) -> Dependency:
    """Changes one token at a time, by default every token of the main sequence; one column per position."""
    sequence = module.plan.main if sequence is None else sequence
    before = module.run(inputs, masks)
    columns, is_finite = [], bool(before.isfinite().all())
    for position in range(module.plan.lengths[sequence]) if positions is None else positions:
        after = module.run(module.replace_tokens(inputs, sequence, (slice(None), position)), masks)
        is_finite &= bool(after.isfinite().all())
        columns.append(output_change(before, after).amax(0))
    return Dependency(torch.stack(columns, dim=1), is_finite)


def output_change(before: Tensor, after: Tensor, tolerance: float = TOLERANCE) -> Tensor:
    """The largest change of each output, (B,Q,...) -> (B,Q), or (B,V) -> (B,1); 0 for rounding errors.

    NaN in both is no change; NaN in one of them is an infinite change.
    """
    if before.dim() < 3:
        before, after = before[:, None], after[:, None]
    finite = before.isfinite() & after.isfinite()
    difference = (after - before).abs().masked_fill(~finite, torch.inf)
    difference = difference.masked_fill((before == after) | (before.isnan() & after.isnan()), 0.0).flatten(2)
    size = torch.maximum(before.abs(), after.abs()).where(finite, 0.0).flatten(2)
    if not difference.any():
        return difference.amax(-1)
    fill_size = FILL_RATIO * size[difference > 0].max()
    threshold = tolerance * torch.finfo(before.dtype).eps * size[size <= fill_size].max()
    return difference.where(difference > threshold, 0.0).amax(-1)


def approximate_change(before: Tensor, after: Tensor) -> Tensor:
    """output_change() for sums in another order, of a module that may compute in float32 internally."""
    return output_change(before.float(), after.float(), FLOAT32_TOLERANCE)


def repeated(x: Any, batch_size: int, dtype: torch.dtype) -> Any:
    """A given argument for this number of examples."""
    if not isinstance(x, Tensor) or not x.dim():
        return x
    x = x[torch.arange(batch_size) % len(x)]
    return x.to(dtype if x.is_floating_point() else x.dtype, copy=True)


def seeded_generator(seed: int, stream: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(SEEDS_PER_BATCH * seed + stream)


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """The module that torch.compile wrapped, or the module itself."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else module


def eval_copy(module: nn.Module) -> nn.Module:
    """A deep copy in eval() mode."""
    if any(nn.parameter.is_lazy(tensor) or tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise ValueError(
            "the module has lazy parameters, or tensors on the meta device; initialize them first, for example by "
            "calling the module once"
        )
    try:
        duplicate = copy.deepcopy(module, detached_activations(module))
    except Exception as error:
        message = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"copy.deepcopy cannot copy the module: {type(error).__name__}: {message}; keep only parameters, buffers "
            "and modules as attributes"
        ) from None
    return duplicate.eval()


def detached_activations(module: nn.Module) -> dict[int, Any]:
    """A memo for deepcopy: detached copies, by id, of tensors kept from the last forward pass (attention weights, for
    example), which deepcopy would refuse."""
    kept = [value for part in module.modules() for value in vars(part).values()]
    kept += [x for value in kept if isinstance(value, list | tuple) for x in value]
    kept += [x for value in kept if isinstance(value, dict) for x in value.values()]
    return {id(x): x.detach().clone() for x in kept if isinstance(x, Tensor) and x.grad_fn is not None}


@torch.no_grad()
def perturb_parameters(module: nn.Module) -> nn.Module:
    """Adds noise in place, except to padding rows of embeddings, whose zeros a sum may rely on."""
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding) and part.padding_idx is not None]
    padding_rows = {id(table.weight): table.padding_idx for table in tables}
    for i, parameter in enumerate(module.parameters()):
        if parameter.requires_grad and parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=seeded_generator(2, i), dtype=torch.float64)
            if id(parameter) in padding_rows:
                noise[padding_rows[id(parameter)]] = 0.0
            parameter.add_(PERTURBATION * noise.to(parameter))
    return module


@contextmanager
def isolated_state(dtype: torch.dtype, seed: int) -> Iterator[None]:
    """Seeds torch and sets the default dtype; restores everything at exit.

    The fast path of torch.nn and compiled code are disabled: they are not exact in float64, and their attention is not
    recorded. Anomaly detection is disabled too, since it turns NaN into an error.
    """
    default_dtype, fastpath = torch.get_default_dtype(), torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(warnings.catch_warnings())
        stack.callback(torch.set_default_dtype, default_dtype)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fastpath)
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(seed)
        torch.backends.mha.set_fastpath_enabled(False)
        torch.set_default_dtype(torch.float64 if dtype == torch.float64 else torch.float32)
        yield


class NoOutputError(ValueError):
    """forward() returns no tensor that can be examined."""


def main_output(output: Any) -> Tensor:
    """The tensor to examine if a module returns several: the logits, or else the first floating-point tensor."""
    for tensor in output_tensors(output):
        if tensor.dim() > 1 and tensor.numel():
            return tensor
    got = type(output).__name__
    if isinstance(output, Tensor):
        got = f"{output.dtype} {tuple(output.shape)}" + f", {output.layout}" * (output.layout != torch.strided)
        got += f", on the {output.device.type} device" * (output.device.type != "cpu")
    raise NoOutputError(
        f"must return a tensor (batch, ...), or a tuple, dict or dataclass that contains one, got {got}"
    )


def output_tensors(output: Any) -> list[Tensor]:
    """All dense floating-point CPU tensors that a module returns, logits first."""
    if isinstance(output, Tensor):
        values = [output]
    elif isinstance(output, list | tuple):
        values = list(output)
    else:
        named = output if isinstance(output, Mapping) else attributes_of(output)
        preferred = [name for name in ("logits", "last_hidden_state") if name in named]
        values = [named[name] for name in dict.fromkeys([*preferred, *named])]
    dense = (value for value in values if isinstance(value, Tensor) and value.layout == torch.strided)
    return [tensor for tensor in dense if tensor.is_floating_point() and tensor.device.type == "cpu"]


def attributes_of(output: Any) -> dict[str, Any]:
    """The attributes of any object, or the fields of a dataclass with or without slots."""
    slots = {f.name: getattr(output, f.name) for f in fields(output)} if is_dataclass(output) else {}
    return {**slots, **getattr(output, "__dict__", {})}


class DropoutTracker:
    """Records whether any dropout is active, including that of attention."""

    def __init__(self) -> None:
        self.is_active = False

    def handle(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if "dropout" in name:  # F.dropout passes keywords; torch.dropout(input, p, train) is positional
            is_training = argument(args, kwargs, 2, "training", "train", default=False)
            self.is_active |= bool(is_training) and (argument(args, kwargs, 1, "p") or 0.0) > 0
        if name == MULTI_HEAD_ATTENTION and len(args) > 10:  # its inner calls are not intercepted
            self.is_active |= bool(kwargs.get("training", True)) and args[10] > 0
        if name == SDPA:
            self.is_active |= argument(args, kwargs, 4, "dropout_p", default=0.0) > 0
        return func(*args, **kwargs)


def has_active_dropout(module: ModuleUnderTest) -> bool:
    """Whether dropout is active in eval() mode."""
    tracker = DropoutTracker()
    with torch.no_grad(), isolated_state(module.dtype, 0), Intercept(tracker.handle):
        module.model(**module.arguments(module.sample_inputs(0), {}))
    return tracker.is_active
