"""Gradient: every parameter must learn. What no gradient reaches is never trained, and nothing complains."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.insight.doctor.call_plan import LENGTH, CallableModule, said
from clearhead.insight.doctor.inputs import ExampleInput, FeatureInput, ImageInput, ModelInput, TokenIds, widths_of
from clearhead.insight.doctor.module_under_test import ModuleUnderTest, copied, generator, tensors_of, undisturbed
from clearhead.insight.doctor.parameters import MEMORY
from clearhead.insight.doctor.report import Finding, Verdict, listed
from clearhead.insight.doctor.scores import KEY_NAME

NAME = "gradient"
BATCHES, MORE_BATCHES = 3, 12
MOST_SIZES = 3
"""of parameters, that optional inputs are made to fit"""
ROUNDING_ONLY = 1e-11
"""of the largest gradient: in float64 that is what remains of an exact zero"""
KEY_BIAS = "it adds the same number to all scores of a query, which the softmax cancels; this is harmless"


def check_gradient(subject: ModuleUnderTest) -> list[Finding]:
    """Over a few batches, by a random direction of all that it returns."""
    try:
        sizes = gradient_sizes(subject)
    except Exception as error:
        if "not implemented" in str(error):  # by torch, for this device and dtype
            return [Finding(NAME, "not checked", f"torch has no gradient here: {said(error)}")]
        return [Finding(NAME, "fault", f"it cannot be trained: with gradients on, it breaks with {said(error)}")]
    if not sizes:
        return [Finding(NAME, "not checked", "it has no parameters to train")]
    broken = [name for name, size in sizes.items() if not size.isfinite().all()]
    if broken:
        return [Finding(NAME, "fault", f"the gradient of {listed(broken)} is not finite")]
    largest = max(size.max().item() for size in sizes.values())
    least = ROUNDING_ONLY * largest if subject.dtype == torch.float64 else 0.0
    still = [name for name, size in sizes.items() if size.max().item() <= least]
    keys = [name for name in still if is_key_bias(name) or (sizes[name].any() and name.endswith("bias"))]
    unreached = without_reached(subject, [name for name in still if name not in keys])
    findings = []
    lists = lists_to_choose_from(subject) if unreached else set()
    if chosen := [name for name in unreached if any(parent in lists for parent, _ in places_in_lists(name))]:
        text = f"no gradient reaches {listed(chosen)}, but others of the kind by turns: experts that no token chose?"
        findings.append(Finding(NAME, "warning", text))
    if unreached := [name for name in unreached if name not in chosen]:
        text = f"no gradient reaches {listed(unreached)}: not used, detached, or behind a step without gradient"
        findings.append(Finding(NAME, "fault", text))
    keys += [f"{name} (its keys' part)" for name, size in sizes.items() if has_still_third(size, least)]
    if keys:
        findings.append(Finding(NAME, "note", f"key bias {listed(keys)} has no gradient: {KEY_BIAS}"))
    return findings or [Finding(NAME, "fine", f"a finite gradient reaches all {len(sizes)} parameters")]


def gradient_sizes(subject: ModuleUnderTest, taken: Callable[[Any], list[Tensor]] = tensors_of) -> dict[str, Tensor]:
    """The largest |gradient| of each number of each parameter; zeros where no gradient comes."""
    sizes = {name: torch.zeros_like(p) for name, p in subject.model.named_parameters() if p.requires_grad}
    for batch in range(BATCHES):
        for name, gradient in gradients(subject, batch, taken).items():
            sizes[name] = torch.maximum(sizes[name], gradient.abs().nan_to_num(torch.inf))
    return sizes


def gradients(subject: ModuleUnderTest, batch: int, taken: Callable[[Any], list[Tensor]]) -> dict[str, Tensor]:
    """Those that one batch brings."""
    named = {name: p for name, p in subject.model.named_parameters() if p.requires_grad}
    with torch.enable_grad(), undisturbed(subject.dtype, batch):
        outputs = taken(subject.model(**subject.arguments(subject.draw(batch), {}))) if named else []
        outputs = [output for output in outputs if output.requires_grad]
        if not outputs:
            return {}
        directions = [
            torch.randn(output.shape, generator=generator(batch, 7), dtype=torch.float64).to(output)
            for output in outputs
        ]
        found = torch.autograd.grad(outputs, list(named.values()), directions, allow_unused=True)
    return {name: gradient for name, gradient in zip(named, found, strict=True) if gradient is not None}


def lists_to_choose_from(subject: ModuleUnderTest) -> set[str]:
    """The names of lists, such as experts, whose members are reached as a whole: some by one batch, some by another."""
    try:
        reached = [
            {name for name, gradient in gradients(subject, batch, tensors_of).items() if gradient.any()}
            for batch in range(MORE_BATCHES)
        ]
    except Exception:  # a module may break with other input: what is known stays
        return set()
    always, ever = set.intersection(*reached), set().union(*reached)
    fixed = {member for name in always for _, member in places_in_lists(name)}
    return {parent for name in ever - always for parent, member in places_in_lists(name) if member not in fixed}


def places_in_lists(name: str) -> list[tuple[str, str]]:
    """layers.0.experts.3.weight -> (layers, layers.0), (layers.0.experts, layers.0.experts.3)"""
    parts = name.split(".")
    return [(".".join(parts[:i]), ".".join(parts[: i + 1])) for i, part in enumerate(parts) if part.isdigit()]


def without_reached(subject: ModuleUnderTest, names: list[str]) -> list[str]:
    """Those of the names that no gradient reaches in any other use of the module, either."""
    for other in other_uses(subject, names) if names else ():
        try:
            sizes = gradient_sizes(other, tensors_within)
        except Exception:  # features of this width are not what it takes
            continue
        names = [name for name in names if not sizes[name].any()]
    return names


def other_uses(subject: ModuleUnderTest, names: list[str]) -> Iterator[ModuleUnderTest]:
    """In its training stage, which may drop and mask; and with what it may be given besides: an encoder's output, or
    ids and features that would fit the parameters of these names."""
    trained = replace(subject, model=copied(subject.model).train())
    yield trained
    plan, optional = subject.plan, inspect.signature(subject.model.forward).parameters
    filled = {*plan.feeds, *plan.same, *plan.masks, *plan.switches, *plan.nothing}
    for name in (name for name, parameter in optional.items() if parameter.default is None and name not in filled):
        is_memory = MEMORY.fullmatch(name.lower())
        fitting: list[ModelInput] = (
            [*map(FeatureInput, widths_of(subject.model))] if is_memory else feeds_of(subject, names)
        )
        for feed in fitting:
            lengths = {**plan.lengths, name: LENGTH if is_memory else subject.length or LENGTH}
            yield trained.by(feeds={**plan.feeds, name: feed}, lengths=lengths)


def feeds_of(subject: ModuleUnderTest, names: list[str]) -> list[ModelInput]:
    """For each token, or one for each example: ids for these parameters as tables, features for them as layers."""
    shapes = [p.shape for name, p in subject.model.named_parameters() if name in names and p.dim() == 2]
    tokens: list[TokenIds | FeatureInput] = []
    for n, width in list(dict.fromkeys(shapes))[:MOST_SIZES]:
        tokens += [TokenIds(n), FeatureInput(width)]
    return [*tokens, *map(ExampleInput, tokens)]


def tensors_within(output: Any) -> list[Tensor]:
    """All tensors of numbers that a module returns, however deep in lists and dicts."""
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ()
    return [*tensors_of(output), *(x for part in parts if not isinstance(part, Tensor) for x in tensors_within(part))]


def is_key_bias(name: str) -> bool:
    return name.endswith((".bias", "_bias")) and KEY_NAME.fullmatch(name.lower()[: -len("_bias")]) is not None


def has_still_third(size: Tensor, least: float) -> bool:
    """The bias of queries, keys and values in one: the middle third stays, the others move."""
    if size.dim() != 1 or len(size) % 3 or not least:
        return False
    queries, keys, values = size.chunk(3)
    return bool(keys.max() <= least < min(queries.max(), values.max()))


# Norms: one that is used twice in a pass serves two places with one scale and shift.


NORMS = "norms"


def check_norms(subject: ModuleUnderTest) -> Finding:
    uses = counted(subject)
    norms = [path for path, module in subject.model.named_modules() if is_norm(module)]
    shared = [path for path in norms if uses[path] > max(1, *(uses[outer] for outer in around(path)))]
    if not shared:
        text = (
            f"each of {len(norms)} is used once in a pass of its block" if norms else "there are none that can be seen"
        )
        return Finding(NORMS, "fine", text)
    text = f"{listed(shared)}: used {uses[shared[0]]} times in one pass; shared on purpose, or is a norm forgotten?"
    return Finding(NORMS, "warning", text)


def around(path: str) -> list[str]:
    """All modules that it is in: one that runs twice (shared blocks) runs its norms twice."""
    parts = path.split(".")
    return ["", *(".".join(parts[:n]) for n in range(1, len(parts)))]


def is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not list(module.children())


def counted(subject: ModuleUnderTest) -> Counter[str]:
    """How often each module ran in one call."""
    uses: Counter[str] = Counter()

    def count(path: str) -> Any:
        def note(*_: Any) -> None:
            uses[path] += 1

        return note

    hooks = [module.register_forward_pre_hook(count(path)) for path, module in subject.model.named_modules()]
    try:
        with torch.no_grad(), undisturbed(subject.dtype, 0):
            subject.model(**subject.arguments(subject.draw(0), {}))
    finally:
        for hook in hooks:
            hook.remove()
    return uses


# Saving and moving: names in the state_dict that will not load again, and tensors that .to(device) leaves behind.


SAVING = "saving"


def check_saving(module: nn.Module) -> list[Finding]:
    findings = []
    compiled = [name for name in module.state_dict() if "_orig_mod." in name]
    if compiled:
        text = f"names in the state_dict have _orig_mod. ({listed(compiled, 1)}) and do not load without torch.compile"
        findings.append(
            Finding(SAVING, "warning", f"{text}; use model.compile(), or save model._orig_mod.state_dict()")
        )
    plain = plain_tensors(module)
    if plain:
        text = f"{listed(plain)} is neither parameter nor buffer: not saved, and left behind by .to(device)"
        findings.append(Finding(SAVING, "warning", f"{text}; register_buffer() it"))
    return findings or [
        Finding(SAVING, "fine", "no _orig_mod. in its names, no tensor outside of parameters and buffers")
    ]


def plain_tensors(module: nn.Module) -> list[str]:
    return [
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, Tensor)
    ]


# Precision: the module in other dtypes. What is hard-coded inside breaks, or quietly turns everything into float32.


PRECISION = "dtype"
NOT_OURS = ("not implemented for", "not supported")
"""what a CPU says of operations that it lacks"""


def check_precision(called: CallableModule) -> list[Finding]:
    findings = []
    if called.breaks_in_float64:
        text = f"breaks in float64: {called.breaks_in_float64}; take dtypes from the tensors that come in"
        findings.append(Finding(PRECISION, "warning", text))
    for dtype in (torch.bfloat16, torch.float16):
        found = of_dtype(called, dtype)
        if found is not None:
            findings.append(found)
    return findings or [Finding(PRECISION, "fine", "float64, bfloat16 and float16 go in and come out")]


def of_dtype(called: CallableModule, dtype: torch.dtype) -> Finding | None:
    subject = called.subject
    name = str(dtype).removeprefix("torch.")
    twin = replace(subject, model=copied(subject.model).to(dtype), dtype=dtype)
    try:
        output = twin.answer(twin.draw(0))
    except Exception as error:
        if any(words in str(error) for words in NOT_OURS):
            return None
        what = said(error)
        return Finding(
            PRECISION, "warning", f"breaks in {name}: {what}; make masks and buffers in the dtype of what comes in"
        )
    if output.dtype != dtype:
        came = str(output.dtype).removeprefix("torch.")
        text = (
            f"{name} becomes {came} inside: on purpose for logits, else a hard-coded dtype that doubles time and memory"
        )
        return Finding(PRECISION, "warning", text)
    has_images = any(isinstance(feed, ImageInput) for feed in subject.plan.feeds.values())
    if not output.isfinite().all() and subject.answer(subject.draw(0)).isfinite().all() and not has_images:
        text = f"in {name} the answer is not finite: a number is too large for it, such as -1e9 as a mask"
        verdict: Verdict = "fault" if dtype == called.own_dtype else "warning"
        return Finding(PRECISION, verdict, f"{text}; use torch.finfo(dtype).min or a bool mask")
    return None
