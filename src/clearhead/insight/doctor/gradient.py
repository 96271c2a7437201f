"""Gradient: every parameter must learn. What no gradient reaches is never trained, and nothing complains."""

import re

import torch
from torch import Tensor

from clearhead.insight.doctor.report import Finding, listed
from clearhead.insight.doctor.subject import Subject, generator, tensors_of, undisturbed

NAME = "gradient"
BATCHES = 3
ROUNDING_ONLY = 1e-11
"""of the largest gradient: in float64 that is what remains of an exact zero"""
KEY = re.compile(r"(^|.*[._])(k|key|keys|wk|w_k|to_k|k_proj|key_proj|k_lin|k_linear|lin_k|linear_k)(\.|_)bias")
KEY_BIAS = "the same is added to all scores of a query, which the softmax does not see: harmless, drop it or leave it"


def check_gradient(subject: Subject) -> list[Finding]:
    """Over a few batches, by a random direction of all that it returns."""
    sizes = gradient_sizes(subject)
    if not sizes:
        return [Finding(NAME, "not checked", "it has no parameters to train")]
    broken = [name for name, size in sizes.items() if not size.isfinite().all()]
    if broken:
        return [Finding(NAME, "fault", f"the gradient of {listed(broken)} is not finite")]
    largest = max(size.max().item() for size in sizes.values())
    least = ROUNDING_ONLY * largest if subject.dtype == torch.float64 else 0.0
    still = [name for name, size in sizes.items() if size.max().item() <= least]
    keys = [name for name in still if KEY.fullmatch(name) or (sizes[name].any() and name.endswith("bias"))]
    unreached = [name for name in still if name not in keys]
    findings = []
    if unreached:
        text = f"no gradient reaches {listed(unreached)}: not used, detached, or behind a step without gradient"
        findings.append(Finding(NAME, "fault", text))
    keys += [f"{name} (its keys' part)" for name, size in sizes.items() if has_still_third(size, least)]
    if keys:
        findings.append(Finding(NAME, "warning", f"key bias {listed(keys)} has no gradient: {KEY_BIAS}"))
    n_reached = len(sizes) - len(still)
    return findings or [Finding(NAME, "fine", f"a finite gradient reaches all {n_reached} parameters")]


def gradient_sizes(subject: Subject) -> dict[str, Tensor]:
    """The largest |gradient| of each number of each parameter; zeros where no gradient comes."""
    named = {name: p for name, p in subject.model.named_parameters() if p.requires_grad}
    sizes = {name: torch.zeros_like(p) for name, p in named.items()}
    for batch in range(BATCHES if named else 0):
        with undisturbed(subject.dtype, batch):
            outputs = tensors_of(subject.model(**subject.arguments(subject.draw(batch), {})))
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


def has_still_third(size: Tensor, least: float) -> bool:
    """The bias of queries, keys and values in one: the middle third stays, the others move."""
    if size.dim() != 1 or len(size) % 3 or not least:
        return False
    queries, keys, values = size.chunk(3)
    return bool(keys.max() <= least < min(queries.max(), values.max()))
