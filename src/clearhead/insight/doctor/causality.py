"""Causality: no output may move when a later token is changed. What does move tells which mistake it is."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from clearhead.insight.doctor.call_plan import CallableModule
from clearhead.insight.doctor.inputs import TokenIds
from clearhead.insight.doctor.module_under_test import (
    EXAMPLES,
    LENGTHS,
    OF_PAIRS,
    Inputs,
    MaskConvention,
    Masks,
    ModuleUnderTest,
    copied,
    mask_conventions,
    tensor_of,
    undisturbed,
)
from clearhead.insight.doctor.padding import CURE, Dependency, Group, dependency
from clearhead.insight.doctor.parameters import OF_SOURCE
from clearhead.insight.doctor.report import Finding
from clearhead.insight.doctor.scores import AttentionPattern, patterns
from clearhead.insight.leaks import movement

NAME = "causality"
WRONG = {
    "not itself": "off by one: no query sees its own token, so the first sees none, or all; use tril(), not tril(-1)",
    "inverted": "inverted: an output sees what comes after it and not what came before; turn the mask round",
    "one too far": "off by one: a query sees one token too far; use tril(), not tril(1); where True hides, triu(1)",
}
"""how a mask reaches that was meant to be causal, and what to do"""
CONVOLUTION = "; or, without attention, a convolution is padded on both sides: pad it on the left"


def with_causal_mask(called: CallableModule) -> ModuleUnderTest:
    """The subject as it is causal: as it stands, or by a switch or a mask; the nearest to it if none is.

    One that hides tokens by itself, only wrongly, stays as it is: a good mask of ours would cover its own up.
    """
    subject = called.subject
    plain = subject.answer(subject.draw(0))
    if not subject.has_places(plain):
        return subject
    ranked = []
    for i, candidate in enumerate(candidates(called)):
        try:
            if i and not movement(plain, candidate.answer(candidate.draw(0))).any():
                continue  # it changes nothing
            found = dependency(candidate, candidate.draw(0))
        except Exception:  # a mask of this shape or dtype is not what it takes
            continue
        n_leaks = int((found.later > 0).sum())
        if not n_leaks and found.is_finite and (found.earlier.any() or i == 0):
            return candidate
        kinds = reaches(candidate, patterns(candidate))
        if i == 0 and mistake_of(found, kinds) and (kinds & WRONG.keys() or sees_all_before_or_none(found)):
            return candidate
        ranked.append((not found.earlier.any(), n_leaks - ("causal" in kinds), i, candidate))
    return min(ranked, key=lambda rank: rank[:3])[-1] if ranked else subject


def candidates(called: CallableModule) -> Iterator[ModuleUnderTest]:
    subject, plan = called.subject, called.subject.plan
    yield subject
    switches = tuple(p.name for p in called.parameters if p.role == "causal")
    if switches:
        yield subject.by(switches=switches, nothing=without(plan.nothing, switches))
    for name in masks_of_pairs(called):
        for encoding in mask_conventions(OF_PAIRS):
            yield with_mask(subject, name, encoding)


def masks_of_pairs(called: CallableModule) -> list[str]:
    """The parameters by which a caller may make it causal: a source's own are left out, one called `mask` is not."""
    has_source = called.subject.plan.source is not None
    pairs = [p.name for p in called.parameters if p.role == "attention"]
    return [name for name in pairs if not (has_source and OF_SOURCE.fullmatch(name.lower()))]


def with_mask(subject: ModuleUnderTest, name: str, encoding: MaskConvention) -> ModuleUnderTest:
    plan = subject.plan
    masks = {**plan.masks, name: encoding}
    return subject.by(masks=masks, causal=(*plan.causal, name), nothing=without(plan.nothing, (name,)))


def is_taken(subject: ModuleUnderTest, name: str) -> bool:
    """Whether the module answers with a mask of pairs there."""
    for encoding in mask_conventions(OF_PAIRS):
        try:
            with_mask(subject, name, encoding).answer(subject.draw(0))
        except Exception:
            continue
        return True
    return False


def without(names: tuple[str, ...], gone: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in gone)


def check_causality(called: CallableModule) -> Finding:
    """`called` with what makes it causal, if anything does."""
    subject = called.subject
    inputs = subject.draw(0)
    if not subject.has_places(subject.answer(inputs)):
        return Finding(NAME, "not checked", "there is no output for each token, so none has a future")
    found, layers = dependency(subject, inputs), patterns(subject)
    if found.later.any():
        return Finding(NAME, "fault", f"{found.worst(found.later)}: {leak_of(found, layers, called)}")
    kinds = reaches(subject, layers)
    is_blind = "causal" not in kinds and is_blind_to_itself(found)
    if "not itself" in kinds or (is_blind and any(layer.sees_not_itself for layer in layers)):
        return Finding(NAME, "fault", "off by one: no query sees its own token; use tril(), not tril(-1)")
    if is_blind:
        text = "no output moves with its own token: moved on by one on purpose, or is it tril(-1) for tril()?"
        return Finding(NAME, "warning", text)
    if not found.is_finite:
        if told := next((WRONG[kind] for kind in WRONG if kind in kinds), None):
            return Finding(NAME, "fault", told)
        return Finding(NAME, "not checked", "the answer is not finite")
    if not found.earlier.any():
        return Finding(
            NAME, "warning", "no output moves with any other token, so nothing can leak: does it attend at all?"
        )
    by = [f"with {name}, {encoding}" for name, encoding in subject.plan.masks.items() if name in subject.plan.causal]
    by += [f"with {name}=True" for name in subject.plan.switches]
    return Finding(NAME, "fine", f"no output moves when a later token is changed{''.join(f', {how}' for how in by)}")


def is_blind_to_itself(found: Dependency) -> bool:
    """So is a module with a causal mask that moves its input on by one token, and rightly so."""
    return bool(found.earlier.any()) and not found.amounts.diagonal().any()


def reaches(subject: ModuleUnderTest, layers: list[AttentionPattern]) -> set[str]:
    """How far the main sequence's attention to itself reaches, as it is seen."""
    return {layer.reach for layer in layers if layer.weights.shape[-2:] == (subject.length, subject.length)}


def mistake_of(found: Dependency, kinds: set[str]) -> str | None:
    """Which of WRONG it is: by the weights where they are seen, and by who moves whom."""
    n, leaks = len(found.amounts), found.later > 0
    if "not itself" in kinds or (n > 2 and leaks[0, 1:].all() and not leaks[1:].any()):
        return "not itself"
    if "inverted" in kinds or (leaks.any() and not found.earlier[:-1].any()):
        return "inverted"  # the last row sees none, or whatever that is turned into
    reach = max((j - i for i, j in leaks.nonzero().tolist()), default=0)
    if "one too far" in kinds or (0 < reach < n - 2 and not kinds):
        return "one too far"
    return None


def sees_all_before_or_none(found: Dependency) -> bool:
    """As by a causal mask, or an inverted one. A window that is open to both sides has neither."""
    pairs = torch.ones_like(found.amounts, dtype=torch.bool).tril(-1)
    return not found.earlier[:-1].any() or bool(found.amounts[pairs].all())


def leak_of(found: Dependency, layers: list[AttentionPattern], called: CallableModule) -> str:
    """What kind of mistake lets the future in, and what to do."""
    layers = [layer for layer in layers if layer.weights.shape[-2:] == found.amounts.shape and layer.reach != "other"]
    kinds = {layer.reach for layer in layers}
    if late := [layer for layer in layers if layer.is_masked_late]:
        low = min(layer.sums[0] for layer in late)
        return f"the mask comes after the softmax (rows sum to {low:.2f}, not 1); hide scores before it"
    if mistake := mistake_of(found, kinds):
        return WRONG[mistake] + (CONVOLUTION if mistake == "one too far" and not kinds else "")
    if "causal" in kinds and "open" in kinds:
        unmasked = ", ".join(layer.address for layer in layers if layer.reach == "open")
        return f"the mask is dropped in {unmasked}; other layers have it"
    if kinds == {"causal"}:
        return "all attention is masked rightly, so tokens mix elsewhere: a view() where a transpose() was meant?"
    taken = [name for name in masks_of_pairs(called) if is_taken(called.subject, name)]
    if taken:
        return f"every output sees the whole sequence, whatever {', '.join(taken)} says; pass it on to the scores"
    other = "" if kinds else ", or a softmax goes over the wrong axis"
    why = f"the mask is dropped, hides with too small a number, or there is none{other}"
    return f"{why}; if it is meant to see both ways, say --no-causal"


# Empty rows: a query that may see no key has a softmax of 0/0. The answer and every gradient must stay finite.


EMPTY_ROWS = "empty rows"
OF_NO_TOKENS = "its attention is finite, so is it a mean over no tokens? divide by their number, clamp(min=1)"
TORCH_NN = (
    "NaN where a query may see no key: torch.nn's own doing where it returns weights; need_weights=False gives zeros"
)


def check_empty_rows(subject: ModuleUnderTest, solved: list[Group]) -> Finding:
    """All tokens of one example hidden; and, with a mask of pairs, all keys of one query.

    In float32: some kernels of float64 have NaN of their own.
    """
    subject = replace(subject, model=copied(subject.model).float(), dtype=torch.float32)
    n_tried = n_taken = 0
    for what, inputs, masks in trials(subject, solved):
        n_tried += 1
        try:
            is_whole, is_kind = is_finite(subject, inputs, masks), is_finite_backwards(subject, inputs, masks)
        except Exception:  # a module may refuse an example without tokens: that is kind, too
            continue
        n_taken += 1
        if is_whole and is_kind:
            continue
        layers = patterns(subject, masks, inputs)
        if any(not layer.is_finite and layer.is_torch_nn for layer in layers):
            return Finding(EMPTY_ROWS, "warning", TORCH_NN)
        how = "the answer has NaN" if not is_whole else "a gradient is NaN, though the answer is not,"
        is_elsewhere = bool(layers) and not is_whole and all(layer.is_finite for layer in layers)
        return Finding(EMPTY_ROWS, "fault", f"{how} {what}: {OF_NO_TOKENS if is_elsewhere else CURE}")
    if not n_taken:
        why = "the module refuses to hide all" if n_tried else "no mask was found that could hide all"
        return Finding(EMPTY_ROWS, "not checked", why)
    return Finding(EMPTY_ROWS, "fine", "an example or a query that may see nothing stays finite, and so do gradients")


def trials(subject: ModuleUnderTest, solved: list[Group]) -> Iterator[tuple[str, Inputs, Masks]]:
    inputs = subject.draw(0)
    for group in solved:
        length = subject.plan.lengths[group.sequence]
        seen = torch.ones(EXAMPLES, length, length, dtype=torch.bool)
        seen[0] = False
        yield f"when {' and '.join(group.names)} hides all tokens of an example", inputs, group.masks(seen)
        assert group.encoding is not None
        if group.encoding != LENGTHS and "Q" in group.encoding.shape:
            seen[0], seen[:, 2] = True, False
            yield f"when {group.names[0]} hides all keys from one query", inputs, group.masks(seen)
    masked = [group.sequence for group in solved]
    for name, feed in subject.plan.feeds.items():
        whose = "an example" if name == subject.plan.main else f"{name} of an example"
        if isinstance(feed, TokenIds) and feed.padding is not None and name not in masked:
            emptied = inputs[name].index_fill(0, torch.tensor(0), feed.padding)
            yield f"when {whose} is padding only (id {feed.padding})", {**inputs, name: emptied}, {}


def is_finite(subject: ModuleUnderTest, inputs: Inputs, masks: Masks) -> bool:
    return bool(subject.answer(inputs, masks).isfinite().all())


def is_finite_backwards(subject: ModuleUnderTest, inputs: Inputs, masks: Masks) -> bool:
    """The gradient of all other examples: a loss leaves out what is padding."""
    with torch.enable_grad(), undisturbed(subject.dtype, 0):
        output = subject.shaped(tensor_of(subject.model(**subject.arguments(inputs, masks))))
        parameters = [p for p in subject.model.parameters() if p.requires_grad]
        if not output.requires_grad or not parameters:
            return True
        gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
            output[1:].square().sum(), parameters, allow_unused=True
        )
    return all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)
