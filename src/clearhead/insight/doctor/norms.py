"""Norms: one that is used twice in a pass serves two places with one scale and shift."""

from collections import Counter
from typing import Any

import torch
from torch import nn

from clearhead.insight.doctor.report import Finding, listed
from clearhead.insight.doctor.subject import Subject, undisturbed

NAME = "norms"


def check_norms(subject: Subject) -> Finding:
    uses = counted(subject)
    norms = [path for path, module in subject.model.named_modules() if is_norm(module)]
    shared = [path for path in norms if uses[path] > max(1, *(uses[outer] for outer in around(path)))]
    if not shared:
        text = (
            f"each of {len(norms)} is used once in a pass of its block" if norms else "there are none that can be seen"
        )
        return Finding(NAME, "fine", text)
    text = f"{listed(shared)}: used {uses[shared[0]]} times in one pass; shared on purpose, or is a norm forgotten?"
    return Finding(NAME, "warning", text)


def around(path: str) -> list[str]:
    """All modules that it is in: one that runs twice (shared blocks) runs its norms twice."""
    parts = path.split(".")
    return ["", *(".".join(parts[:n]) for n in range(1, len(parts)))]


def is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not list(module.children())


def counted(subject: Subject) -> Counter[str]:
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
