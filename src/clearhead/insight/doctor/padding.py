"""Who moves whom: one token is changed at a time, and every output is looked at.

Dims: B batch, L tokens, Q outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clearhead.insight.doctor.call_plan import CallableModule
from clearhead.insight.doctor.inputs import TokenIds
from clearhead.insight.doctor.module_under_test import (
    EXAMPLES,
    LENGTHS,
    OF_BOTH,
    OF_TOKENS,
    Inputs,
    MaskConvention,
    Masks,
    ModuleUnderTest,
    is_turned,
    mask_conventions,
    usual,
)
from clearhead.insight.doctor.parameters import MEMORY, OF_MEMORY, Parameter, is_across
from clearhead.insight.doctor.report import Finding
from clearhead.insight.doctor.scores import patterns
from clearhead.insight.leaks import movement

ROUGHLY = 100
"""roundings of float32"""


@dataclass(frozen=True, eq=False)
class Dependency:
    """amounts (Q,L): how far output i moves, in any example, when token j is changed; 0 where it stays."""

    amounts: Tensor
    is_finite: bool
    """whether every answer was made of finite numbers"""

    @property
    def later(self) -> Tensor:
        """Of a token on an earlier output: what must not be in a causal model."""
        return self.amounts.triu(1)

    @property
    def earlier(self) -> Tensor:
        return self.amounts.tril(-1)

    def worst(self, of: Tensor) -> str:
        """The sentence that names the pair that moves most."""
        output, token = divmod(int(of.argmax()), of.shape[1])
        return f"output {output} moves by {of.max().item():.2g} when token {token} is changed"


def roughly_changed(before: Tensor, after: Tensor) -> Tensor:
    """movement() where sums are added up in another order, by a module that may calculate in float32 inside."""
    return movement(before.float(), after.float(), roundings=ROUGHLY)


def dependency(
    subject: ModuleUnderTest,
    inputs: Inputs,
    masks: Masks | None = None,
    name: str | None = None,
    places: Sequence[int] | None = None,
) -> Dependency:
    """Of the tokens of one sequence (the main one unless named) on the outputs; one column for each place."""
    name = subject.plan.main if name is None else name
    before = subject.answer(inputs, masks)
    columns, is_finite = [], bool(before.isfinite().all())
    for place in range(subject.plan.lengths[name]) if places is None else places:
        after = subject.answer(subject.changed(inputs, name, (slice(None), place)), masks)
        is_finite &= bool(after.isfinite().all())
        columns.append(movement(before, after).amax(0))
    return Dependency(torch.stack(columns, dim=1), is_finite)


# Which masks hide one sequence: they are given together, and written in the same way.
#
# Dims: B batch, Q queries, K keys.


@dataclass(frozen=True)
class Group:
    """Parameters that together hide tokens of one sequence, and how they are written, once that is known."""

    names: tuple[str, ...]
    sequence: str
    encoding: MaskConvention | None = None

    def masks(self, seen: Tensor, encoding: MaskConvention | None = None) -> Masks:
        """All of them with one mask (B,K), or (B,Q,K)."""
        written = encoding or self.encoding
        assert written is not None
        seen = seen if seen.dim() == 3 else seen[:, None].expand(-1, seen.shape[-1], -1)
        return dict.fromkeys(self.names, (written, seen))

    def spelled(self, encoding: MaskConvention) -> str:
        return f"{' and '.join(self.names)}: {encoding}"


def groups(called: CallableModule) -> list[Group]:
    """The masks of each sequence together; lengths alone. Masks of pairs will do where there is none of tokens."""
    plan = called.subject.plan
    found: list[Group] = []
    if not called.subject.has_tokens:
        return found
    for sequence in [plan.main] if plan.source is None else [plan.source, plan.main]:
        own = [p for p in called.parameters if plan.keys_of(p.name) == sequence]
        tokens = tuple(p.name for p in own if p.role == "padding")
        lengths = [(p.name,) for p in own if p.role == "lengths"]
        found += [Group(names, sequence) for names in [tokens, *lengths] if names]
        if not tokens and not lengths and (pairs := pairs_of(own, sequence == plan.source)):
            found.append(Group(pairs, sequence))
    return found


def pairs_of(own: list[Parameter], is_source: bool) -> tuple[str, ...]:
    """The first mask of pairs that a sequence has for itself; of a source, those of its memory too."""
    names = [p.name for p in own if p.role == "attention"]
    of_memory = [name for name in names if OF_MEMORY.fullmatch(name.lower())]
    return (*[name for name in names if name not in of_memory][:1], *(of_memory if is_source else []))


def options(group: Group, called: CallableModule) -> list[MaskConvention]:
    if all(p.role == "lengths" for p in called.parameters if p.name in group.names):
        return [LENGTHS]
    shapes = OF_BOTH if set(group.names) & set(called.subject.plan.causal) else OF_TOKENS
    takes_pairs = all(p.role == "attention" for p in called.parameters if p.name in group.names)
    return list(mask_conventions((*shapes, "(Q,K)") if takes_pairs else shapes))


def is_only_across(called: CallableModule, group: Group) -> bool:
    """Whether the masks of pairs hide what an encoder inside returns, and nothing hides what it reads."""
    plan = called.subject.plan
    is_given = plan.source is not None and MEMORY.fullmatch(plan.source.lower())
    pairs = {p.name for p in called.parameters if p.role == "attention"}
    return not is_given and all(name in pairs and is_across(name, plan.source) for name in group.names)


# Padding: what a mask hides may move no other output. Which way round a mask is meant is found by trying.
#
# Dims: B batch, Q queries, K keys.


NAME = "padding"
NO_MASK = "no mask of {} and no padding id was found: whether padding is hidden was not tried"
CURE = "softmax over nothing; give such rows zeros, or hide with a finite number"
MOST_ADDED = 2
"""tokens, such as a class token; an answer that is shorter or longer by more is none about tokens"""


def hidden_places(length: int, encoding: MaskConvention) -> list[int]:
    """Two, with real tokens before, between and after them; at the end for lengths, which can't say it otherwise."""
    return [length - 2, length - 1] if encoding == LENGTHS else sorted({min(2, length - 2), length - 2})


@dataclass(frozen=True)
class Trial:
    """What happened when tokens were hidden with one encoding."""

    encoding: MaskConvention
    leak: Dependency
    """of the hidden tokens on all outputs but their own"""
    is_right: bool
    does_nothing: bool


def tried(subject: ModuleUnderTest, group: Group, encoding: MaskConvention) -> Trial:
    inputs, length = subject.draw(0), subject.plan.lengths[group.sequence]
    hidden = hidden_places(length, encoding)
    masks = group.masks(without(hidden, length), encoding)
    before = subject.answer(inputs, masks)
    does_nothing = not movement(subject.answer(inputs), before).any()
    leak = dependency(subject, inputs, masks, group.sequence, hidden)
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


def lets_through(subject: ModuleUnderTest, group: Group, masks: Masks, hidden: list[int], own: dict[int, int]) -> bool:
    """Whether tokens that are not hidden still move other outputs."""
    inputs, length = subject.draw(0), subject.plan.lengths[group.sequence]
    visible = [place for place in range(length) if place not in hidden]
    amounts = dependency(subject, inputs, masks, group.sequence, visible).amounts
    for place, output in own.items():  # the residual path of a token to its own output
        amounts[output, visible.index(place) if place in visible else slice(None)] = 0.0
    return bool(amounts.any())


def without(hidden: list[int], length: int) -> Tensor:
    """(B,K): True but at these places."""
    seen = torch.ones(EXAMPLES, length, dtype=torch.bool)
    seen[:, hidden] = False
    return seen


def solve(called: CallableModule, group: Group) -> tuple[Group, list[Trial]]:
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


def with_required_masks(called: CallableModule) -> CallableModule:
    """Masks that are given in every call, and hide nothing, written as the module means them."""
    for group in groups(called):
        names = [name for name in group.names if name in called.subject.plan.masks]
        if names and (encoding := solve(called, group)[0].encoding or first_open(called, group, names)):
            called = replace(called, subject=written(called.subject, names, encoding))
    return called


def written(subject: ModuleUnderTest, names: list[str], encoding: MaskConvention) -> ModuleUnderTest:
    return subject.by(masks={**subject.plan.masks, **dict.fromkeys(names, encoding)})


def first_open(called: CallableModule, group: Group, names: list[str]) -> MaskConvention | None:
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


def check_padding(called: CallableModule, solved: list[tuple[Group, list[Trial]]]) -> list[Finding]:
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


def finding_of(called: CallableModule, group: Group, trials: list[Trial]) -> Finding:
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


def sentence(subject: ModuleUnderTest, group: Group, trial: Trial) -> str:
    output, column = divmod(int(trial.leak.amounts.argmax()), trial.leak.amounts.shape[1])
    place = hidden_places(subject.plan.lengths[group.sequence], trial.encoding)[column]
    return f"output {output} moves by {trial.leak.amounts.max().item():.2g} when the hidden token {place} is changed"


def why(subject: ModuleUnderTest, group: Group, trial: Trial) -> str:
    length = subject.plan.lengths[group.sequence]
    seen = without(hidden_places(length, trial.encoding), length)
    late = [layer for layer in patterns(subject, group.masks(seen, trial.encoding)) if layer.is_masked_late]
    if late:
        return f"the mask comes after the softmax (rows sum to {late[0].sums[0]:.2f}, not 1); hide scores before it"
    return f"padding leaks through {' and '.join(group.names)}; hide keys (columns), in every layer and in pooling"


def check_padding_id(subject: ModuleUnderTest, name: str) -> Finding | None:
    """A table with a padding id promises that it means nothing: more of it at the end must not move an output."""
    feed, length = subject.plan.feeds[name], subject.plan.lengths[name]
    if not isinstance(feed, TokenIds) or feed.padding is None or length < 4:
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
    moved = roughly_changed(more, less).amax(0)
    if not moved.any():
        return Finding(NAME, "fine", f"one more token of padding (id {feed.padding}) in {name} moves no output")
    output, by = int(moved.argmax()), moved.max().item()
    text = f"output {output} moves by {by:.2g} with one more token of padding (id {feed.padding}) in {name}"
    return Finding(NAME, "fault", f"{text}: padding leaks; hide the keys where {name} == {feed.padding}")
