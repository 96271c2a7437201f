"""Gradient: every parameter must learn. What no gradient reaches is never trained, and nothing complains."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from clearhead.insight.doctor.calling import LENGTH, said
from clearhead.insight.doctor.feeds import Features, widths_of
from clearhead.insight.doctor.parameters import MEMORY
from clearhead.insight.doctor.report import Finding, listed
from clearhead.insight.doctor.scores import KEY_NAME
from clearhead.insight.doctor.subject import Subject, copied, generator, tensors_of, undisturbed

NAME = "gradient"
BATCHES = 3
ROUNDING_ONLY = 1e-11
"""of the largest gradient: in float64 that is what remains of an exact zero"""
KEY_BIAS = "the same is added to all scores of a query, which the softmax does not see: harmless, drop it or leave it"


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
    if unreached:
        text = f"no gradient reaches {listed(unreached)}: not used, detached, or behind a step without gradient"
        findings.append(Finding(NAME, "fault", text))
    keys += [f"{name} (its keys' part)" for name, size in sizes.items() if has_still_third(size, least)]
    if keys:
        findings.append(Finding(NAME, "warning", f"key bias {listed(keys)} has no gradient: {KEY_BIAS}"))
    return findings or [Finding(NAME, "fine", f"a finite gradient reaches all {len(sizes)} parameters")]


def gradient_sizes(subject: Subject, taken: Callable[[Any], list[Tensor]] = tensors_of) -> dict[str, Tensor]:
    """The largest |gradient| of each number of each parameter; zeros where no gradient comes."""
    named = {name: p for name, p in subject.model.named_parameters() if p.requires_grad}
    sizes = {name: torch.zeros_like(p) for name, p in named.items()}
    for batch in range(BATCHES if named else 0):
        with torch.enable_grad(), undisturbed(subject.dtype, batch):
            outputs = taken(subject.model(**subject.arguments(subject.draw(batch), {})))
            outputs = [output for output in outputs if output.requires_grad]
            if not outputs:
                return sizes
            directions = [
                torch.randn(output.shape, generator=generator(batch, 7), dtype=torch.float64).to(output)
                for output in outputs
            ]
            gradients = torch.autograd.grad(outputs, list(named.values()), directions, allow_unused=True)
        for name, gradient in zip(named, gradients, strict=True):
            if gradient is not None:
                sizes[name] = torch.maximum(sizes[name], gradient.abs().nan_to_num(torch.inf))
    return sizes


def without_reached(subject: Subject, names: list[str]) -> list[str]:
    """Those of the names that no gradient reaches in any other use of the module, either."""
    for other in other_uses(subject) if names else ():
        try:
            sizes = gradient_sizes(other, tensors_within)
        except Exception:  # features of this width are not what it takes
            continue
        names = [name for name in names if not sizes[name].any()]
    return names


def other_uses(subject: Subject) -> Iterator[Subject]:
    """In its training stage, which may drop and mask; and with an encoder's output, if it may be given one."""
    trained = replace(subject, model=copied(subject.model).train())
    yield trained
    plan, names = subject.plan, inspect.signature(subject.model.forward).parameters
    for name in (name for name in names if MEMORY.fullmatch(name.lower()) and name not in plan.feeds):
        for width in widths_of(subject.model):
            feeds, lengths = {**plan.feeds, name: Features(width)}, {**plan.lengths, name: LENGTH}
            yield trained.by(feeds=feeds, lengths=lengths)


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
