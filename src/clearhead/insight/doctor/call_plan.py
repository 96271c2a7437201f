"""Determines how a module can be called: from the names of its parameters, then by trial."""

import inspect
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.insight.doctor.inputs import (
    ATTENTION_SHAPES,
    IMAGE_NAME,
    LENGTHS,
    PADDING_SHAPES,
    POLARITIES,
    SOURCE_PREFIX,
    TARGET_PREFIX,
    FeatureInput,
    GivenInput,
    ImageInput,
    MaskConvention,
    ModelInput,
    Parameter,
    TokenIds,
    candidate_inputs,
    candidate_lengths,
    main_and_source,
    masks_source,
    parameters_of,
)
from clearhead.insight.doctor.module_under_test import (
    BATCH_SIZE,
    CallPlan,
    ModuleUnderTest,
    NoOutputError,
    eval_copy,
    isolated_state,
    output_change,
    perturb_parameters,
    unwrap_compiled,
)
from clearhead.insight.doctor.report import error_summary, join_names
from clearhead.interception import Intercept

LENGTH, SOURCE_EXTRA = 7, 2
"""the number of tokens, and of additional tokens in a source, so that the two sequences differ in length"""
CODE_ERRORS = (NameError, AttributeError, KeyError, ArithmeticError, ImportError, OSError, NotImplementedError)
"""exceptions that are unlikely to be caused by a wrong kind of input"""
Failure = tuple[CallPlan, Exception]


GivenInputs = Mapping[str, Any] | Sequence[Any]
"""the caller's own arguments of forward(): by name, or by position with an optional mapping of names at the end"""


def prepare(
    model: nn.Module,
    width: int | None,
    length: int | None,
    inputs: GivenInputs | None = None,
    image_size: int | None = None,
) -> ModuleUnderTest:
    """A copy of the model with a plan that works, in float64 if possible. `image_size` sets the size of images."""
    inner = unwrap_compiled(model)
    if isinstance(inner, torch.jit.ScriptModule):
        raise ValueError("a TorchScript module cannot be examined; pass the nn.Module that torch.jit was given")
    given = named_inputs(inner, inputs) if inputs is not None else {}
    parameters = [p for p in parameters_of(inner.forward, given) if p.name not in given or is_sequence(given[p.name])]
    duplicate = perturb_parameters(eval_copy(inner).cpu())
    dtype = next((p.dtype for p in duplicate.parameters() if p.is_floating_point()), torch.float32)
    plans = (
        given_plans(parameters, given) if given else candidate_plans(duplicate, parameters, width, length, image_size)
    )
    unused = eval_copy(duplicate)
    candidates = (
        ModuleUnderTest(duplicate, plan, dtype, parameters, native_dtype=dtype, unused_model=unused) for plan in plans
    )
    module, failures = first_working(candidates)
    if module is None:
        raise ValueError(refusal(inner, failures, bool(given)))
    module = pass_labels_if_needed(module)
    module = module.with_plan(scalar_outputs=True) if has_scalar_outputs(module) else module
    module = module.with_plan(batch_first=False) if is_length_first(module) else module
    return in_float64(with_padding_ids(module))


def named_inputs(model: nn.Module, inputs: GivenInputs) -> dict[str, Any]:
    """The caller's arguments by name."""
    args = (inputs,) if isinstance(inputs, Tensor) else inputs
    names = args if isinstance(args, Mapping) else {}
    if not isinstance(args, Mapping) and args and isinstance(args[-1], Mapping):
        args, names = args[:-1], args[-1]
    try:
        bound = inspect.signature(model.forward).bind(*(() if isinstance(args, Mapping) else args), **names)
    except TypeError as error:
        raise ValueError(f"the given inputs do not fit forward{inspect.signature(model.forward)}: {error}") from None
    variable = [p.name for p in bound.signature.parameters.values() if p.kind == p.VAR_KEYWORD]
    values = {name: x for name, x in bound.arguments.items() if name not in variable}
    return {**values, **{name: x for kind in variable for name, x in bound.arguments.get(kind, {}).items()}}


def is_sequence(x: Any) -> bool:
    """Ids (B,L) or (B,L,...), features (B,L,E) or images; not a mask."""
    is_integer = isinstance(x, Tensor) and x.dtype in (torch.long, torch.int, torch.short, torch.uint8)
    return isinstance(x, Tensor) and x.dim() > (1 if is_integer else 2) and (is_integer or x.is_floating_point())


def given_plans(parameters: list[Parameter], given: Mapping[str, Any]) -> Iterator[CallPlan]:
    """One plan: sequences among the caller's inputs, by their role, are changed; all other inputs stay as they are."""
    roles = {p.name: p.role for p in parameters if p.role in ("sequence", "target", "memory") and p.name in given}
    names = list(roles) or [name for name, x in given.items() if is_sequence(x)][:1]
    if not names:
        raise ValueError(
            "none of the given inputs is a tensor of token ids (B,L), features (B,L,E) or images (B,C,H,W)"
        )
    main = next((name for name in names if roles.get(name) == "target"), names[0])
    source = next((name for name in names if name != main), None)
    inputs = {name: GivenInput(given[name].cpu()) for name in names}
    lengths = {name: given[name].shape[1] if given[name].dim() < 4 else 0 for name in names}
    others = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in given.items() if name not in names}
    yield CallPlan(main, source, inputs, lengths, constants=others)


def first_working(candidates: Iterator[ModuleUnderTest]) -> tuple[ModuleUnderTest | None, list[Failure]]:
    """The first with a finite output, or else the first with any output; and the errors of the others."""
    fallback, failures = None, []
    for module in candidates:
        try:
            output = module.run(module.sample_inputs(0))
        except Exception as error:
            failures.append((module.plan, error))
            continue
        if len(output) != BATCH_SIZE:
            message = f"must return one output per example, got {tuple(output.shape)} for a batch of {BATCH_SIZE}"
            failures.append((module.plan, NoOutputError(message)))
            continue
        fallback = fallback or module
        if output.isfinite().all():
            return module, failures
    return fallback, failures


def candidate_plans(
    model: nn.Module, parameters: list[Parameter], width: int | None, length: int | None, image_size: int | None = None
) -> Iterator[CallPlan]:
    """All plans to try, the most likely first."""
    main, source = main_and_source(parameters)
    aliases = tuple(parameter.name for parameter in parameters if parameter.role == "key_value")
    is_memory = any(parameter.role == "memory" for parameter in parameters)
    lengths = [length] if length else candidate_lengths(model, LENGTH)
    extras = (0,) if source is None else (SOURCE_EXTRA, 0)
    kinds = list(candidate_inputs(model, width, bool(IMAGE_NAME.fullmatch(main.lower()))))
    if image_size is not None:
        images = (kind for kind in kinds if isinstance(kind, ImageInput))
        kinds = [ImageInput(channels, image_size) for channels in dict.fromkeys(kind.channels for kind in images)]
    for extra, batch_first, kind, n in product(extras, (True, False), kinds, lengths):
        inputs = {main: kind} if source is None else {source: source_input(model, kind, is_memory), main: kind}
        sizes = {main: n} if source is None else {source: n + extra, main: n}
        if isinstance(kind, ImageInput):
            if source is not None or n != lengths[0] or not batch_first:
                continue
            sizes = {main: 0}
        offsets = {p.name: 0 for p in parameters if p.role == "offset"}
        plan = CallPlan(main, source, inputs, sizes, aliases, batch_first=batch_first, constants=offsets)
        for none_args, masks in required_arguments(parameters, source):
            yield replace(plan, none_args=none_args, masks=masks)


def source_input(model: nn.Module, main: ModelInput, is_memory: bool) -> ModelInput:
    """The same kind as the main input; for an encoder's output, features of the embedding's width."""
    if not (is_memory and isinstance(main, TokenIds)):
        return main
    return FeatureInput(next(module.embedding_dim for module in model.modules() if isinstance(module, nn.Embedding)))


def required_arguments(
    parameters: list[Parameter], source: str | None
) -> Iterator[tuple[tuple[str, ...], dict[str, MaskConvention]]]:
    """(parameters that get None, masks): first None for every required mask, then all-visible masks of any kind."""
    masks = [p for p in parameters if p.is_required and p.role in ("padding", "attention")]
    lengths = {p.name: LENGTHS for p in parameters if p.is_required and p.role == "lengths"}
    others = tuple(p.name for p in parameters if p.is_required and p.role in ("labels", "causal", "cache"))
    yield (*others, *(p.name for p in masks)), lengths
    if not masks:
        return
    groups = group_by_shape(masks, source)
    shapes = [
        (*PADDING_SHAPES, "(Q,K)") if group[0].role == "padding" else ATTENTION_SHAPES + PADDING_SHAPES[:3]
        for group in groups
    ]
    for polarity, chosen in product(POLARITIES, product(*shapes)):
        conventions = {
            p.name: MaskConvention(shape, polarity) for group, shape in zip(groups, chosen, strict=True) for p in group
        }
        yield others, {**conventions, **lengths}


def group_by_shape(masks: list[Parameter], source: str | None) -> list[list[Parameter]]:
    """One or two masks are tried in all combinations of shapes. With more that takes too long, so masks of one role, or
    of one sequence if there is one role only, share their shape."""
    if len(masks) <= 2:
        return [[mask] for mask in masks]
    is_one_role, groups = len({mask.role for mask in masks}) == 1, defaultdict(list)
    for mask in masks:
        groups[masks_source(mask.name, source) if is_one_role else mask.role].append(mask)
    return list(groups.values())


def pass_labels_if_needed(module: ModuleUnderTest) -> ModuleUnderTest:
    """Some modules return an output per token only if they get labels."""
    plan = module.plan
    if not isinstance(plan.inputs[plan.main], TokenIds):
        return module
    labels = tuple(p.name for p in module.parameters if p.role == "labels")
    labeled = module.with_plan(aliases=(*plan.aliases, *labels))
    try:
        if not labels or module.has_output_per_token(module.run(module.sample_inputs(0))):
            return module
        return labeled if labeled.has_output_per_token(labeled.run(labeled.sample_inputs(0))) else module
    except Exception:
        return module


def has_scalar_outputs(module: ModuleUnderTest) -> bool:
    """Whether outputs are (B,L): then a shorter sequence gives a shorter output."""
    shorter = module.with_plan(lengths={**module.plan.lengths, module.plan.main: module.length - 1})
    try:
        return all(one.run(one.sample_inputs(0)).shape == (BATCH_SIZE, one.length) for one in (module, shorter))
    except Exception:  # images, or a module with a fixed length
        return False


def is_length_first(module: ModuleUnderTest) -> bool:
    """Whether inputs are (L,B,...): then entries along the first axis affect each other, along the second they do not.

    Both ends of each axis are changed: a causal mask hides the last token from all others, an inverted one the first.
    """
    plan = module.plan
    if plan.source is not None or not plan.batch_first or not module.has_tokens:
        return False
    inputs, every = module.sample_inputs(0), slice(None)
    ends = (0, -1, (every, 0), (every, -1))
    try:
        before = module.run(inputs)
        after = [module.run(module.replace_tokens(inputs, plan.main, end)) for end in ends]
    except Exception:  # a module may fail when it is called again
        return False
    if not module.has_output_per_token(before) or any(output.shape != before.shape for output in after):
        return False
    first_row, last_row, first_column, last_column = (output_change(before, output) for output in after)
    rows_interact = first_row[1:].any() or last_row[:-1].any()
    columns_interact = first_column[:, 1:].any() or last_column[:, :-1].any()
    return bool(rows_interact) and not bool(columns_interact)


PADDING_ID_NAME = re.compile(r"(.*_)?pad(ding)?(_?(token|word|tok))?(_?(id|idx|index))?")
COMPARISONS = {"eq", "ne", "__eq__", "__ne__", "not_equal"}


class ComparisonTracker:
    """Records the numbers that integer tensors are compared with by == or !=."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()

    def handle(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        operands = [x.item() if isinstance(x, Tensor) and x.dim() == 0 else x for x in (*args, *kwargs.values())]
        if any(isinstance(x, Tensor) and not x.is_floating_point() for x in operands):
            self.numbers |= {x for x in operands if isinstance(x, int) and not isinstance(x, bool)}
        return func(*args, **kwargs)


def with_padding_ids(module: ModuleUnderTest) -> ModuleUnderTest:
    """Finds padding ids that no nn.Embedding declares: an attribute such as pad_idx that ids are compared with.

    Both are required: a convolution stores its padding under the same names, and ids are compared with other numbers.
    """
    stored, inputs = padding_id_attributes(module.model), module.plan.inputs
    if not stored or not any(isinstance(kind, TokenIds) and kind.padding_id is None for kind in inputs.values()):
        return module
    tracker = ComparisonTracker()
    try:
        with torch.no_grad(), isolated_state(module.dtype, 0), Intercept(tracker.handle, COMPARISONS):
            module.model(**module.arguments(module.sample_inputs(0), {}))
    except Exception:  # a module may fail when it is called again
        return module
    compared = {name: number for name, number in stored.items() if number in tracker.numbers}
    return module.with_plan(
        inputs={name: with_padding_id(kind, name, module.plan.source, compared) for name, kind in inputs.items()}
    )


def padding_id_attributes(model: nn.Module) -> dict[str, int]:
    """By name, the integers that the user's own modules store as padding ids; torch.nn stores padding sizes."""
    custom = (part for part in model.modules() if not type(part).__module__.startswith("torch."))
    stored = ((name, x) for part in custom for name, x in vars(part).items() if PADDING_ID_NAME.fullmatch(name.lower()))
    return {name.lower(): x for name, x in stored if isinstance(x, int) and not isinstance(x, bool)}


def with_padding_id(kind: ModelInput, sequence: str, source: str | None, ids: Mapping[str, int]) -> ModelInput:
    """Takes the id whose name has the prefix of this sequence, or else one without the prefix of the other sequence."""
    if not isinstance(kind, TokenIds) or kind.padding_id is not None:
        return kind
    matching, other = (SOURCE_PREFIX, TARGET_PREFIX) if sequence == source else (TARGET_PREFIX, SOURCE_PREFIX)
    names = [name for name in ids if source is None or not other.fullmatch(name)]
    valid = [name for name in names if 0 <= ids[name] < kind.vocab_size]
    best = min(valid, key=lambda name: not matching.fullmatch(name), default=None)
    return kind if best is None else replace(kind, padding_id=ids[best])


def in_float64(module: ModuleUnderTest) -> ModuleUnderTest:
    """The module in float64, unless only float64 fails or is not finite."""
    exact = module.with_dtype(torch.float64)
    try:
        is_finite = exact.run(exact.sample_inputs(0)).isfinite().all()
    except Exception as error:
        return replace(module, float64_error=error_summary(error))
    return exact if is_finite or not module.run(module.sample_inputs(0)).isfinite().all() else module


def refusal(model: nn.Module, failures: list[Failure], is_given: bool = False) -> str:
    """Error message if no plan works: the error of the most likely plan, and the inputs that were tried."""
    name, (likeliest, error) = type(model).__name__, failures[0]
    if is_given:
        return f"{name} does not accept the given inputs: {error_summary(error)}"
    if isinstance(error, NoOutputError):
        return f"{name} {error}"
    if {table.num_embeddings for table in model.modules() if isinstance(table, nn.Embedding)} == {1}:
        return f"{name} must know at least two token ids, got an nn.Embedding of size 1 ({error_summary(error)})"
    same_inputs = {error_summary(other) for plan, other in failures if plan.inputs == likeliest.inputs}
    if isinstance(error, CODE_ERRORS) and len(same_inputs) == 1:
        return f"{name}.forward() fails: {error_summary(error)}"
    tried: dict[ModelInput, str] = {}
    for plan, _ in failures:
        for sequence, kind in plan.inputs.items():
            tried.setdefault(kind, kind.describe(f"({BATCH_SIZE},{plan.lengths[sequence]})"))
    return (
        f"{name} accepts none of {join_names(list(tried.values()))}: {error_summary(error)}; "
        f'pass your own inputs, examine(module, inputs={{"{likeliest.main}": ...}}) or --inputs FILE.py:NAME, or set '
        "width or length (--width N, --length N)"
    )
