"""Padding: what a mask hides may move no other output. Which way round a mask is meant is found by trying.

Dims: B batch, Q queries, K keys.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clearhead.insight.doctor.calling import Called
from clearhead.insight.doctor.encodings import LENGTHS, Encoding, is_turned, usual
from clearhead.insight.doctor.feeds import Ids
from clearhead.insight.doctor.groups import Group, groups, is_only_across, options
from clearhead.insight.doctor.influence import Influence, influence, roughly_moved
from clearhead.insight.doctor.report import Finding
from clearhead.insight.doctor.shown import shown
from clearhead.insight.doctor.subject import EXAMPLES, Masks, Subject
from clearhead.insight.leaks import movement

NAME = "padding"
NO_MASK = "no mask of {} and no padding id was found: whether padding is hidden was not tried"
CURE = "softmax over nothing; give such rows zeros, or hide with a finite number"
MOST_ADDED = 2
"""tokens, such as a class token; an answer that is shorter or longer by more is none about tokens"""


def hidden_places(length: int, encoding: Encoding) -> list[int]:
    """Two, with real tokens before, between and after them; at the end for lengths, which can't say it otherwise."""
    return [length - 2, length - 1] if encoding == LENGTHS else sorted({min(2, length - 2), length - 2})


@dataclass(frozen=True)
class Trial:
    """What happened when tokens were hidden with one encoding."""

    encoding: Encoding
    leak: Influence
    """of the hidden tokens on all outputs but their own"""
    is_right: bool
    does_nothing: bool


def tried(subject: Subject, group: Group, encoding: Encoding) -> Trial:
    inputs, length = subject.draw(0), subject.plan.lengths[group.sequence]
    hidden = hidden_places(length, encoding)
    masks = group.masks(without(hidden, length), encoding)
    before = subject.answer(inputs, masks)
    does_nothing = not movement(subject.answer(inputs), before).any()
    leak = influence(subject, inputs, masks, group.sequence, hidden)
    has_own = group.sequence == subject.plan.main and before.dim() > 2
    own = own_outputs(leak.amounts, hidden, length) if has_own else {}
    leak.amounts[[own[place] for place in hidden if place in own]] = 0.0  # what stands at a hidden place does not count
    if does_nothing or not leak.is_finite or leak.amounts.any():
        return Trial(encoding, leak, False, does_nothing)
    return Trial(encoding, leak, lets_through(subject, group, masks, hidden, own), does_nothing)


def own_outputs(amounts: Tensor, hidden: list[int], length: int) -> dict[int, int]:
    """By place, the output of that token: the same place, or moved on by tokens that the module adds (a class token)
    or leaves out; then as hidden tokens move others least."""
    n_more = len(amounts) - length
    if abs(n_more) > MOST_ADDED or len(amounts) == 1:
        return {}
    moves = []
    for by in range(min(0, n_more), max(0, n_more) + 1):
        own = {place: place + by for place in range(length) if 0 <= place + by < len(amounts)}
        rest = amounts.clone()
        rest[[own[place] for place in hidden if place in own]] = 0.0
        moves.append((float(rest.sum()), own))
    return min(moves, key=lambda move: move[0])[1]


def lets_through(subject: Subject, group: Group, masks: Masks, hidden: list[int], own: dict[int, int]) -> bool:
    """Whether tokens that are not hidden still move other outputs."""
    inputs, length = subject.draw(0), subject.plan.lengths[group.sequence]
    visible = [place for place in range(length) if place not in hidden]
    amounts = influence(subject, inputs, masks, group.sequence, visible).amounts
    for place, output in own.items():  # the residual path of a token to its own output
        amounts[output, visible.index(place) if place in visible else slice(None)] = 0.0
    return bool(amounts.any())


def without(hidden: list[int], length: int) -> Tensor:
    """(B,K): True but at these places."""
    seen = torch.ones(EXAMPLES, length, dtype=torch.bool)
    seen[:, hidden] = False
    return seen


def solve(called: Called, group: Group) -> tuple[Group, list[Trial]]:
    """The group with the encoding that works, if one does; and what was tried until then."""
    trials = []
    for encoding in options(group, called):
        try:
            trials.append(tried(called.subject, group, encoding))
        except Exception:  # a mask of this shape or dtype is not what it takes
            continue
        if trials[-1].is_right:
            return Group(group.names, group.sequence, encoding), trials
    return group, trials


def with_required_masks(called: Called) -> Called:
    """Masks that are given in every call, and hide nothing, written as the module means them."""
    for group in groups(called):
        names = [name for name in group.names if name in called.subject.plan.masks]
        if names and (encoding := solve(called, group)[0].encoding or first_open(called, group, names)):
            called = replace(called, subject=written(called.subject, names, encoding))
    return called


def written(subject: Subject, names: list[str], encoding: Encoding) -> Subject:
    return subject.by(masks={**subject.plan.masks, **dict.fromkeys(names, encoding)})


def first_open(called: Called, group: Group, names: list[str]) -> Encoding | None:
    """Of a module that hides no token rightly: how masks that hide nothing let tokens move other outputs, as they are
    written or in the first other way."""
    subject = called.subject
    for encoding in [subject.plan.masks[names[0]], *options(group, called)]:
        one = written(subject, names, encoding)
        try:
            has_own = group.sequence == subject.plan.main and one.has_places(one.answer(one.draw(0)))
            own = {place: place for place in range(subject.length)} if has_own else {}
            if lets_through(one, group, {}, [], own):
                return encoding
        except Exception:  # a mask of this shape or dtype is not what it takes
            continue
    return None


def check_padding(called: Called, solved: list[tuple[Group, list[Trial]]]) -> list[Finding]:
    findings = [finding_of(called, group, trials) for group, trials in solved]
    for name in sorted(set(called.subject.plan.feeds) - {group.sequence for group, _ in solved}):
        by_id = check_padding_id(called.subject, name)
        if by_id is None and name == called.subject.plan.source:
            by_id = Finding(NAME, "not checked", NO_MASK.format(name))
        findings += [by_id] if by_id else []
    if not findings:
        why = NO_MASK.format("tokens") if called.subject.has_tokens else "no tokens"
        findings.append(Finding(NAME, "not checked", why))
    return findings


def finding_of(called: Called, group: Group, trials: list[Trial]) -> Finding:
    names = " and ".join(group.names)
    if group.encoding is not None:
        turned = [name for name in group.names if is_turned(name, group.encoding.meaning)]
        if turned:
            meant = "1 = may attend" if usual(turned[0]) == "may" else "True = hidden"
            text = f"inverted: by its name {turned[0]} means {meant}, here it is the opposite; turn it round"
            return Finding(NAME, "fault", text)
        return Finding(
            NAME, "fine", f"hidden tokens of {group.sequence} move no other output ({group.spelled(group.encoding)})"
        )
    if not trials:
        return Finding(
            NAME, "not checked", f"no shape and dtype of {names} was taken; try a wrapper with (batch, length)"
        )
    trial = best(trials, group)
    if trial.does_nothing or all(one.does_nothing for one in trials):
        return Finding(NAME, "fault", f"{names} changes nothing: the mask is dropped on its way to the scores")
    if not trial.leak.is_finite:
        text = f"the answer is not finite when {names} hides two tokens ({trial.encoding})"
        return Finding(NAME, "fault", f"{text}: {CURE}")
    if not trial.leak.amounts.any():
        return Finding(NAME, "warning", f"with {names} no token moves any other output: does it attend at all?")
    text = f"{sentence(called.subject, group, trial)}: {why(called.subject, group, trial)}"
    if is_only_across(called, group):
        return Finding(NAME, "warning", f"{text}; or is {names} not meant for padding? the encoder takes no mask")
    return Finding(NAME, "fault", text)


def best(trials: list[Trial], group: Group) -> Trial:
    """The one that its name promises, or else the one that leaks least."""
    promised = [trial for trial in trials if trial.encoding.meaning == usual(group.names[0])]
    alive = [trial for trial in promised or trials if not trial.does_nothing] or trials
    return min(alive, key=lambda trial: (not trial.leak.is_finite, float(trial.leak.amounts.sum())))


def sentence(subject: Subject, group: Group, trial: Trial) -> str:
    output, column = divmod(int(trial.leak.amounts.argmax()), trial.leak.amounts.shape[1])
    place = hidden_places(subject.plan.lengths[group.sequence], trial.encoding)[column]
    return f"output {output} moves by {trial.leak.amounts.max().item():.2g} when the hidden token {place} is changed"


def why(subject: Subject, group: Group, trial: Trial) -> str:
    length = subject.plan.lengths[group.sequence]
    seen = without(hidden_places(length, trial.encoding), length)
    late = [layer for layer in shown(subject, group.masks(seen, trial.encoding)) if layer.is_masked_late]
    if late:
        return f"the mask comes after the softmax (rows sum to {late[0].sums[0]:.2f}, not 1); hide scores before it"
    return f"padding leaks through {' and '.join(group.names)}; hide keys (columns), in every layer and in pooling"


def check_padding_id(subject: Subject, name: str) -> Finding | None:
    """A table with a padding id promises that it means nothing: more of it at the end must not move an output."""
    feed, length = subject.plan.feeds[name], subject.plan.lengths[name]
    if not isinstance(feed, Ids) or feed.padding is None or length < 4:
        return None
    inputs = subject.draw(0)
    inputs[name][:, -2:] = feed.padding
    shorter = subject.by(lengths={**subject.plan.lengths, name: length - 1})
    try:
        more, less = subject.answer(inputs), shorter.answer({**inputs, name: inputs[name][:, :-1]})
    except Exception:  # a module may want sequences of one length
        return None
    if name == subject.plan.main and subject.has_places(more):
        less, more = less[:, : length - 2], more[:, : length - 2]
    moved = roughly_moved(more, less).amax(0)
    if not moved.any():
        return Finding(NAME, "fine", f"one more token of padding (id {feed.padding}) in {name} moves no output")
    output, by = int(moved.argmax()), moved.max().item()
    text = f"output {output} moves by {by:.2g} with one more token of padding (id {feed.padding}) in {name}"
    return Finding(NAME, "fault", f"{text}: padding leaks; hide the keys where {name} == {feed.padding}")
