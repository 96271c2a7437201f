"""Gradient: every parameter must learn. What no gradient reaches is never trained, and nothing complains."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from clearhead.insight.doctor.calling import LENGTH, said
from clearhead.insight.doctor.feeds import Features, Feed, Ids, OfExample, widths_of
from clearhead.insight.doctor.parameters import MEMORY
from clearhead.insight.doctor.report import Finding, listed
from clearhead.insight.doctor.scores import KEY_NAME
from clearhead.insight.doctor.subject import Subject, copied, generator, tensors_of, undisturbed

NAME = "gradient"
BATCHES, MORE_BATCHES = 3, 12
MOST_SIZES = 3
"""of parameters, that optional inputs are made to fit"""
ROUNDING_ONLY = 1e-11
"""of the largest gradient: in float64 that is what remains of an exact zero"""
KEY_BIAS = "it adds the same number to all scores of a query, which the softmax cancels; this is harmless"


def check_gradient(subject: Subject) -> list[Finding]:
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


def gradient_sizes(subject: Subject, taken: Callable[[Any], list[Tensor]] = tensors_of) -> dict[str, Tensor]:
    """The largest |gradient| of each number of each parameter; zeros where no gradient comes."""
    sizes = {name: torch.zeros_like(p) for name, p in subject.model.named_parameters() if p.requires_grad}
    for batch in range(BATCHES):
        for name, gradient in gradients(subject, batch, taken).items():
            sizes[name] = torch.maximum(sizes[name], gradient.abs().nan_to_num(torch.inf))
    return sizes


def gradients(subject: Subject, batch: int, taken: Callable[[Any], list[Tensor]]) -> dict[str, Tensor]:
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


def lists_to_choose_from(subject: Subject) -> set[str]:
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


def without_reached(subject: Subject, names: list[str]) -> list[str]:
    """Those of the names that no gradient reaches in any other use of the module, either."""
    for other in other_uses(subject, names) if names else ():
        try:
            sizes = gradient_sizes(other, tensors_within)
        except Exception:  # features of this width are not what it takes
            continue
        names = [name for name in names if not sizes[name].any()]
    return names


def other_uses(subject: Subject, names: list[str]) -> Iterator[Subject]:
    """In its training stage, which may drop and mask; and with what it may be given besides: an encoder's output, or
    ids and features that would fit the parameters of these names."""
    trained = replace(subject, model=copied(subject.model).train())
    yield trained
    plan, optional = subject.plan, inspect.signature(subject.model.forward).parameters
    filled = {*plan.feeds, *plan.same, *plan.masks, *plan.switches, *plan.nothing}
    for name in (name for name, parameter in optional.items() if parameter.default is None and name not in filled):
        is_memory = MEMORY.fullmatch(name.lower())
        fitting: list[Feed] = [*map(Features, widths_of(subject.model))] if is_memory else feeds_of(subject, names)
        for feed in fitting:
            lengths = {**plan.lengths, name: LENGTH if is_memory else subject.length or LENGTH}
            yield trained.by(feeds={**plan.feeds, name: feed}, lengths=lengths)


def feeds_of(subject: Subject, names: list[str]) -> list[Feed]:
    """For each token, or one for each example: ids for these parameters as tables, features for them as layers."""
    shapes = [p.shape for name, p in subject.model.named_parameters() if name in names and p.dim() == 2]
    tokens: list[Ids | Features] = []
    for n, width in list(dict.fromkeys(shapes))[:MOST_SIZES]:
        tokens += [Ids(n), Features(width)]
    return [*tokens, *map(OfExample, tokens)]


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
