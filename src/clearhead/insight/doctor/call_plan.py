"""Which id means padding, where no nn.Embedding says so: a number kept by such a name, that ids are compared with.

Both are asked: a convolution keeps how far it pads by the same names, and ids are compared with other numbers too.
"""

import re
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.insight.doctor.inputs import FeatureInput, ImageInput, ModelInput, TokenIds, inputs_for, lengths_of
from clearhead.insight.doctor.module_under_test import (
    EXAMPLES,
    LENGTHS,
    OF_PAIRS,
    OF_TOKENS,
    CallPlan,
    MaskConvention,
    ModuleUnderTest,
    NoOutputError,
    copied,
    mask_conventions,
    shaken,
    undisturbed,
    unwrapped,
)
from clearhead.insight.doctor.parameters import (
    OF_SOURCE,
    OF_TARGET,
    Parameter,
    is_about_source,
    parameters_of,
    sequences,
)
from clearhead.insight.doctor.report import listed
from clearhead.insight.leaks import movement
from clearhead.interception import Intercept

PADDING_NAME = re.compile(r"(.*_)?pad(ding)?(_?(token|word|tok))?(_?(id|idx|index))?")
COMPARISONS = {"eq", "ne", "__eq__", "__ne__", "not_equal"}


class Comparisons:
    """Collects the numbers that integer tensors are compared with by == or !=."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()

    def handle(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        operands = [x.item() if isinstance(x, Tensor) and x.dim() == 0 else x for x in (*args, *kwargs.values())]
        if any(isinstance(x, Tensor) and not x.is_floating_point() for x in operands):
            self.numbers |= {x for x in operands if isinstance(x, int) and not isinstance(x, bool)}
        return func(*args, **kwargs)


def with_padding_ids(subject: ModuleUnderTest) -> ModuleUnderTest:
    """The subject with the padding id of each sequence of ids, if it shows one."""
    kept = kept_numbers(subject.model)
    if not kept or not any(isinstance(feed, TokenIds) and feed.padding is None for feed in subject.plan.feeds.values()):
        return subject
    seen = Comparisons()
    try:
        with torch.no_grad(), undisturbed(subject.dtype, 0), Intercept(seen.handle, COMPARISONS):
            subject.model(**subject.arguments(subject.draw(0), {}))
    except Exception:  # a module may break when it is called again
        return subject
    kept = {name: number for name, number in kept.items() if number in seen.numbers}
    return subject.by(feeds={name: padded(feed, name, subject, kept) for name, feed in subject.plan.feeds.items()})


def kept_numbers(model: nn.Module) -> dict[str, int]:
    """By name, what the user's own modules keep as a padding id; those of torch.nn say how far they pad."""
    owned = (part for part in model.modules() if not type(part).__module__.startswith("torch."))
    kept = ((name, x) for part in owned for name, x in vars(part).items() if PADDING_NAME.fullmatch(name.lower()))
    return {name.lower(): x for name, x in kept if isinstance(x, int) and not isinstance(x, bool)}


def padded(feed: ModelInput, sequence: str, subject: ModuleUnderTest, kept: Mapping[str, int]) -> ModelInput:
    """With the id that is named after this sequence, or else after none; where there is but one, after any."""
    if not isinstance(feed, TokenIds) or feed.padding is not None:
        return feed
    own, other = (OF_SOURCE, OF_TARGET) if sequence == subject.plan.source else (OF_TARGET, OF_SOURCE)
    if subject.plan.source is not None:
        kept = {name: x for name, x in kept.items() if not other.fullmatch(name)}
    ids = [kept[name] for name in sorted(kept, key=lambda name: not own.fullmatch(name)) if 0 <= kept[name] < feed.n]
    return replace(feed, padding=ids[0]) if ids else feed


# Finds out how a module can be called: by the names of its parameters, then by trying.


LENGTH, LONGER = 7, 2
"""tokens; and how many more in a source, so that the two are not taken for each other if it can be"""
MISTAKES = (NameError, AttributeError, KeyError, ArithmeticError, ImportError, OSError, NotImplementedError)
"""errors that hardly come from what a module is given"""


@dataclass(frozen=True)
class CallableModule:
    """A subject that answers, and the parameters of its forward()."""

    subject: ModuleUnderTest
    parameters: list[Parameter]
    breaks_in_float64: str = ""
    """what it said, if it answers in its own dtype only"""
    own_dtype: torch.dtype = torch.float32

    def describe(self) -> str:
        plan, what = self.subject.plan, []
        for name, feed in plan.feeds.items():
            length = plan.lengths[name]
            what.append(
                f"{name}={feed.describe(f'({EXAMPLES},{length})' if plan.batch_first else f'({length},{EXAMPLES})')}"
            )
        what += [f"{name}={plan.main}" for name in plan.same]
        what += [f"{name}=True" for name in plan.switches]
        what += [f"{name}={'causal' if name in plan.causal else 'all'} {e}" for name, e in plan.masks.items()]
        return f"forward({'; '.join(what)}), eval(), {str(self.subject.dtype).removeprefix('torch.')}"


def call(module: nn.Module, width: int | None, length: int | None) -> CallableModule:
    """A copy of the module with a plan that works, in float64 if it can."""
    inner = unwrapped(module)
    if isinstance(inner, torch.jit.ScriptModule):
        raise ValueError("a module must be one that Python runs, got one of torch.jit; name it before it is scripted")
    parameters = parameters_of(inner.forward)
    model = shaken(copied(inner).cpu())
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    found, failures = first_that_answers(model, dtype, plans(model, parameters, width, length))
    if found is None:
        raise ValueError(refusal(inner, failures))
    found = with_labels(found, parameters)
    found = found.by(is_number=True) if has_numbers(found) else found
    found = found.by(batch_first=False) if is_length_first(found) else found
    return in_float64(with_padding_ids(found), parameters)


def first_that_answers(
    model: nn.Module, dtype: torch.dtype, plans: Iterator[CallPlan]
) -> tuple[ModuleUnderTest | None, list[tuple[CallPlan, Exception]]]:
    """The first with a finite answer, or else the first with any; and what the others said."""
    found, failures = None, []
    for plan in plans:
        subject = ModuleUnderTest(model, plan, dtype)
        try:
            output = subject.answer(subject.draw(0))
        except Exception as error:
            failures.append((plan, error))
            continue
        if len(output) != EXAMPLES:
            came = f"must answer for each of {EXAMPLES} examples, got {tuple(output.shape)}; return (batch, ...)"
            failures.append((plan, NoOutputError(came)))
            continue
        found = found or subject
        if output.isfinite().all():
            return subject, failures
    return found, failures


def plans(model: nn.Module, parameters: list[Parameter], width: int | None, length: int | None) -> Iterator[CallPlan]:
    main, source = sequences(parameters)
    same = tuple(parameter.name for parameter in parameters if parameter.role == "same")
    is_memory = any(parameter.role == "memory" for parameter in parameters)
    lengths = [length] if length else lengths_of(model, LENGTH)
    longer = (0,) if source is None else (LONGER, 0)
    for more, batch_first, feed, n in product(longer, (True, False), list(inputs_for(model, width)), lengths):
        both = {main: feed} if source is None else {source: source_feed(model, feed, is_memory), main: feed}
        sizes = {main: n} if source is None else {source: n + more, main: n}
        if isinstance(feed, ImageInput):
            if source is not None or n != lengths[0] or not batch_first:
                continue
            sizes = {main: 0}
        plan = CallPlan(main, source, both, sizes, same, batch_first=batch_first)
        for nothing, masks in fillings(parameters, source):
            yield replace(plan, nothing=nothing, masks=masks)


def source_feed(model: nn.Module, feed: ModelInput, is_memory: bool) -> ModelInput:
    """What is read: the same kind as what is written, or, of an encoder's output, features as wide as the model."""
    if not (is_memory and isinstance(feed, TokenIds)):
        return feed
    return FeatureInput(next(module.embedding_dim for module in model.modules() if isinstance(module, nn.Embedding)))


def fillings(
    parameters: list[Parameter], source: str | None
) -> Iterator[tuple[tuple[str, ...], dict[str, MaskConvention]]]:
    """What required masks may get: nothing at first, then masks that hide nothing, written in every way."""
    masks = [p for p in parameters if p.is_required and p.role in ("padding", "attention")]
    lengths = {p.name: LENGTHS for p in parameters if p.is_required and p.role == "lengths"}
    others = tuple(p.name for p in parameters if p.is_required and p.role in ("labels", "causal"))
    yield (*others, *(p.name for p in masks)), lengths
    if not masks:
        return
    groups = of_one_shape(masks, source)
    shapes = [(*OF_TOKENS, "(Q,K)") if g[0].role == "padding" else OF_PAIRS + OF_TOKENS[:3] for g in groups]
    meanings = list(dict.fromkeys(encoding.meaning for encoding in mask_conventions(OF_PAIRS)))
    for meaning, chosen in product(meanings, product(*shapes)):
        written = {p.name: MaskConvention(shape, meaning) for g, shape in zip(groups, chosen, strict=True) for p in g}
        yield others, {**written, **lengths}


def of_one_shape(masks: list[Parameter], source: str | None) -> list[list[Parameter]]:
    """One or two masks may be of any shapes. Of more, to try all would take for ever: those of a role, or where there
    is but one role, those of a sequence, are tried in the same shape."""
    if len(masks) <= 2:
        return [[mask] for mask in masks]
    is_one_role, groups = len({mask.role for mask in masks}) == 1, defaultdict(list)
    for mask in masks:
        groups[is_about_source(mask.name, source) if is_one_role else mask.role].append(mask)
    return list(groups.values())


def with_labels(subject: ModuleUnderTest, parameters: list[Parameter]) -> ModuleUnderTest:
    """Some modules answer about every token only when they get labels as well."""
    labels = tuple(
        p.name for p in parameters if p.role == "labels" and isinstance(subject.plan.feeds[subject.plan.main], TokenIds)
    )
    more = subject.by(same=(*subject.plan.same, *labels))
    try:
        if not labels or subject.has_places(subject.answer(subject.draw(0))):
            return subject
        return more if more.has_places(more.answer(more.draw(0))) else subject
    except Exception:
        return subject


def has_numbers(subject: ModuleUnderTest) -> bool:
    """Whether it answers (B,L), a number for each token: then the answer is shorter where the sequence is."""
    shorter = subject.by(lengths={**subject.plan.lengths, subject.plan.main: subject.length - 1})
    try:
        return all(one.answer(one.draw(0)).shape == (EXAMPLES, one.length) for one in (subject, shorter))
    except Exception:  # a module may want sequences of one length, or images
        return False


def is_length_first(subject: ModuleUnderTest) -> bool:
    """Whether the module takes (L,B,...): its first axis then mixes, and its second one does not.

    Both ends of an axis are changed: a causal mask hides the last token from all others, an inverted one the first.
    """
    plan = subject.plan
    if plan.source is not None or not plan.batch_first or not subject.has_tokens:
        return False
    inputs, every = subject.draw(0), slice(None)
    ends = (0, -1, (every, 0), (every, -1))
    try:
        before, *after = map(subject.answer, [inputs, *(subject.changed(inputs, plan.main, end) for end in ends)])
    except Exception:  # a module may break when it is called again
        return False
    if not subject.has_places(before):
        return False
    if any(one.shape != before.shape for one in after):  # how long the answer is depends on the input
        return False
    top, bottom, left, right = (movement(before, one) for one in after)
    first_mixes = top[1:].any() or bottom[:-1].any()
    return bool(first_mixes) and not bool(left[:, 1:].any() or right[:, :-1].any())


def in_float64(subject: ModuleUnderTest, parameters: list[Parameter]) -> CallableModule:
    exact = replace(subject, model=copied(subject.model).double(), dtype=torch.float64)
    try:
        exact.answer(exact.draw(0))
    except Exception as error:
        return CallableModule(subject, parameters, said(error), subject.dtype)
    return CallableModule(exact, parameters, own_dtype=subject.dtype)


def refusal(module: nn.Module, failures: list[tuple[CallPlan, Exception]]) -> str:
    """What was tried, and what the module said to the first."""
    name, error = type(module).__name__, failures[0][1]
    if isinstance(error, NoOutputError):
        return f"{name} {error}"
    if {table.num_embeddings for table in module.modules() if isinstance(table, nn.Embedding)} == {1}:
        return f"{name} must know two ids or more, got an nn.Embedding of 1 and {said(error)}; make it larger"
    to_likeliest = {said(other) for plan, other in failures if plan.feeds == failures[0][0].feeds}
    if isinstance(error, MISTAKES) and len(to_likeliest) == 1:
        return f"{name} must answer, got {said(error)}; mend its forward()"
    tried: dict[ModelInput, str] = {}
    for plan, _ in failures:
        for sequence, feed in plan.feeds.items():
            tried.setdefault(feed, feed.describe(f"({EXAMPLES},{plan.lengths[sequence]})"))
    return (
        f"{name} must take one of {listed(list(tried.values()))}, got {said(error)}; "
        "say --width N or --length N, or name a function that returns a wrapper"
    )


@contextmanager
def blamed(name: str, while_what: str) -> Iterator[None]:
    """A module may fail in any way, anywhere: whatever it raises becomes a sentence about it."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, ValueError):  # a ValueError is a sentence already
        raise
    except BaseException as error:
        raise ValueError(f"{name} fails while {while_what}: {said(error)}") from error


def said(error: BaseException) -> str:
    """An error in one line, with the place in the user's file."""
    try:
        first = (str(error).strip().splitlines() or [""])[0]
    except Exception:  # a module's own exception may not even have a text
        first = ""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {first}{place}"


def is_users(file: str) -> bool:
    path = Path(file)
    ours, pythons = Path(__file__).resolve().parents[2], Path(traceback.__file__).resolve().parent
    is_others = "site-packages" in path.parts or {ours, pythons} & set(path.resolve().parents)
    return path.is_file() and not is_others
