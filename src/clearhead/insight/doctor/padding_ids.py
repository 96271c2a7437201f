"""Which id means padding, where no nn.Embedding says so: a number kept by such a name, that ids are compared with.

Both are asked: a convolution keeps how far it pads by the same names, and ids are compared with other numbers too.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from clearhead.insight.doctor.feeds import Feed, Ids
from clearhead.insight.doctor.parameters import OF_SOURCE, OF_TARGET
from clearhead.insight.doctor.subject import Subject, undisturbed

NAME = re.compile(r"(.*_)?pad(ding)?(_?(token|word|tok))?(_?(id|idx|index))?")
COMPARISONS = {"eq", "ne", "__eq__", "__ne__", "not_equal"}


class Comparisons(TorchFunctionMode):
    """Collects the numbers that whole ones are compared with, == or !=."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in COMPARISONS:
            given = [
                x.item() if isinstance(x, Tensor) and x.dim() == 0 else x for x in (*args, *(kwargs or {}).values())
            ]
            if any(isinstance(x, Tensor) and not x.is_floating_point() for x in given):
                self.numbers |= {x for x in given if isinstance(x, int) and not isinstance(x, bool)}
        return func(*args, **(kwargs or {}))


def with_padding_ids(subject: Subject) -> Subject:
    """The subject with the padding id of each sequence of ids, if it shows one."""
    kept = kept_numbers(subject.model)
    if not kept or not any(isinstance(feed, Ids) and feed.padding is None for feed in subject.plan.feeds.values()):
        return subject
    seen = Comparisons()
    try:
        with torch.no_grad(), undisturbed(subject.dtype, 0), seen:
            subject.model(**subject.arguments(subject.draw(0), {}))
    except Exception:  # a module may break when it is called again
        return subject
    kept = {name: number for name, number in kept.items() if number in seen.numbers}
    return subject.by(feeds={name: padded(feed, name, subject, kept) for name, feed in subject.plan.feeds.items()})


def kept_numbers(model: nn.Module) -> dict[str, int]:
    """By name, what the user's own modules keep as a padding id; those of torch.nn say how far they pad."""
    owned = (part for part in model.modules() if not type(part).__module__.startswith("torch."))
    kept = ((name, x) for part in owned for name, x in vars(part).items() if NAME.fullmatch(name.lower()))
    return {name.lower(): x for name, x in kept if isinstance(x, int) and not isinstance(x, bool)}


def padded(feed: Feed, sequence: str, subject: Subject, kept: Mapping[str, int]) -> Feed:
    """With the id that is named after this sequence, or else after none; where there is but one, after any."""
    if not isinstance(feed, Ids) or feed.padding is not None:
        return feed
    own, other = (OF_SOURCE, OF_TARGET) if sequence == subject.plan.source else (OF_TARGET, OF_SOURCE)
    if subject.plan.source is not None:
        kept = {name: x for name, x in kept.items() if not other.fullmatch(name)}
    ids = [kept[name] for name in sorted(kept, key=lambda name: not own.fullmatch(name)) if 0 <= kept[name] < feed.n]
    return replace(feed, padding=ids[0]) if ids else feed
