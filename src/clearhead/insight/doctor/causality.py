"""The order of tokens: no output may depend on a later token, and a sequence model needs positional information.

Shapes: B batch, H heads, L length, Q queries, K keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from clearhead.insight.doctor.inputs import ATTENTION_SHAPES, SOURCE_PREFIX, MaskConvention, mask_conventions
from clearhead.insight.doctor.module_under_test import (
    Dependency,
    Inputs,
    Masks,
    ModuleUnderTest,
    approximate_change,
    dependency,
    eval_copy,
    isolated_state,
    output_change,
)
from clearhead.insight.doctor.report import Finding
from clearhead.insight.doctor.scores import AttentionPattern, Visibility, attention_patterns, record_scores
from clearhead.interception import ModuleStack, intercept

CAUSALITY, ORDER, DEPENDENCY = "causality", "order", "dependency"
SELF_EXCLUDED = "the mask is off by one, and no query sees its own token; use tril(), not tril(-1)"
MASK_ERRORS: dict[Visibility, str] = {
    "excludes self": SELF_EXCLUDED,
    "inverted": "the mask is inverted, and outputs depend on later tokens instead of earlier ones; negate it",
    "sees next": "the mask is off by one, and each query sees the next token; use tril(), not tril(1) "
    "(triu(1) where True = masked)",
}
CONVOLUTION = "; without attention, a convolution is padded on both sides: pad on the left only"


@dataclass(frozen=True)
class Operation:
    """A call of torch, and the module that made it."""

    name: str
    path: str
    previous: str
    """the module that ran before"""

    def __str__(self) -> str:
        after = f", after {self.previous}" if self.previous and not self.path else ""
        return f"{self.path or 'forward()'} ({self.name.strip('_')}{after})"


def first_mixing(
    module: ModuleUnderTest, before: Inputs, after: Inputs, must_stay: Tensor, masks: Masks | None = None
) -> Operation | None:
    """The first operation whose result changes at a position that must stay, though its arguments do not.

    must_stay: bool, (B,) for examples or (L,) for tokens. Two passes are compared, call by call. A tensor in which more
    than one axis, or none, has this size is ignored.
    """
    size = len(must_stay)
    passes = [recorded_operations(module, inputs, size, masks or {}) for inputs in (before, after)]
    for (operation, first), (other, second) in zip(*passes, strict=False):
        if operation != other:
            return None
        for x, y in zip(first, second, strict=False):
            axis = x.shape.index(size)
            if x.shape == y.shape and (x != y).movedim(axis, 0).flatten(1).any(1)[must_stay].any():
                return operation
    return None


def recorded_operations(
    module: ModuleUnderTest, inputs: Inputs, size: int, masks: Masks
) -> list[tuple[Operation, list[Tensor]]]:
    """All calls of torch in one pass, and their results with one axis of this size."""
    calls: list[tuple[Operation, list[Tensor]]] = []
    finished = [""]
    stack = ModuleStack(module.model, on_exit=lambda running, output: finished.append(running.path))

    def record(name: str, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        operation = Operation(name, stack.running[-1].path if stack.running else "", finished[-1])
        tensors = out if isinstance(out, tuple | list) else (out,)
        calls.append((operation, [x.detach().clone() for x in tensors if has_axis(x, size)]))
        return out

    with torch.no_grad(), isolated_state(module.dtype, 0), intercept(stack, record):
        module.model(**module.arguments(inputs, masks))
    return calls


def has_axis(x: Any, size: int) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and list(x.shape).count(size) == 1


def with_causal_mask(module: ModuleUnderTest) -> ModuleUnderTest:
    """The module with a causal call: as is, or with a flag or a mask; if no call is causal, the one that leaks least.

    A module whose own mask is wrong is left as is, because a correct mask from outside would conceal the error.
    """
    plain = module.run(module.sample_inputs(0))
    if not module.has_output_per_token(plain):
        return module
    ranked = []
    for i, candidate in enumerate(causal_candidates(module)):
        try:
            if i and not output_change(plain, candidate.run(candidate.sample_inputs(0))).any():
                continue  # the mask has no effect
            depends = dependency(candidate, candidate.sample_inputs(0))
        except Exception:  # the module does not accept a mask of this shape or dtype
            continue
        num_leaks = int((depends.on_later > 0).sum())
        if not num_leaks and depends.is_finite and (depends.on_earlier.any() or i == 0):
            return candidate
        kinds = visibilities(candidate, attention_patterns(candidate))
        if i == 0 and mask_error(depends, kinds) and (kinds & MASK_ERRORS.keys() or sees_all_or_nothing(depends)):
            return candidate
        ranked.append((not depends.on_earlier.any(), num_leaks - ("causal" in kinds), i, candidate))
    return min(ranked, key=lambda rank: rank[:3])[-1] if ranked else module


def causal_candidates(module: ModuleUnderTest) -> Iterator[ModuleUnderTest]:
    yield module
    flags = tuple(p.name for p in module.parameters if p.role == "causal")
    if flags:
        none_args = tuple(name for name in module.plan.none_args if name not in flags)
        yield module.with_plan(flags=flags, none_args=none_args)
    for name in attention_masks(module):
        for convention in mask_conventions(ATTENTION_SHAPES):
            yield with_mask(module, name, convention)


def attention_masks(module: ModuleUnderTest) -> list[str]:
    """The masks with which a caller may make the module causal: all but those named after a source."""
    names = [p.name for p in module.parameters if p.role == "attention"]
    return [name for name in names if module.plan.source is None or not SOURCE_PREFIX.fullmatch(name.lower())]


def with_mask(module: ModuleUnderTest, name: str, convention: MaskConvention) -> ModuleUnderTest:
    plan = module.plan
    return module.with_plan(
        masks={**plan.masks, name: convention},
        causal_masks=(*plan.causal_masks, name),
        none_args=tuple(other for other in plan.none_args if other != name),
    )


def accepts_mask(module: ModuleUnderTest, name: str) -> bool:
    """Whether the module runs with an attention mask in any convention."""
    for convention in mask_conventions(ATTENTION_SHAPES):
        try:
            with_mask(module, name, convention).run(module.sample_inputs(0))
        except Exception:
            continue
        return True
    return False


def check_causality(module: ModuleUnderTest) -> Finding:
    """Changes one token at a time. `module` is the result of `with_causal_mask`."""
    inputs, plan = module.sample_inputs(0), module.plan
    if not module.has_output_per_token(module.run(inputs)):
        return Finding(CAUSALITY, "not checked", "the module has no output per token")
    depends, patterns = dependency(module, inputs), attention_patterns(module)
    if depends.on_later.any():
        evidence = depends.describe_largest(depends.on_later)
        place = describe_mixing(module, inputs, int(depends.on_later.argmax()) % module.length)
        return Finding(CAUSALITY, "fault", f"{evidence}: {leak_cause(depends, patterns, module)}{place}")
    kinds = visibilities(module, patterns)
    ignores_self = "causal" not in kinds and ignores_own_token(depends)
    if "excludes self" in kinds or (ignores_self and any(pattern.excludes_self for pattern in patterns)):
        return Finding(CAUSALITY, "fault", SELF_EXCLUDED)
    if ignores_self:
        text = "no output depends on its own token: are inputs shifted on purpose, or is it tril(-1) instead of tril()?"
        return Finding(CAUSALITY, "warning", text)
    if not depends.is_finite:
        if error := next((MASK_ERRORS[kind] for kind in MASK_ERRORS if kind in kinds), None):
            return Finding(CAUSALITY, "fault", error)
        return Finding(CAUSALITY, "not checked", "the output is not finite")
    if not depends.on_earlier.any():
        return Finding(CAUSALITY, "warning", "no output depends on any other token: is there any attention?")
    if module.length > 3 and not depends.on_earlier[:, 1:].any():
        text = "outputs depend on no other token but token 0: does the mask have a row per query?"
        return Finding(CAUSALITY, "warning", text)
    if (leak := leak_in_train_mode(module)) is not None:
        text = f"in train() mode, {leak}, though not in eval() mode: is the mask dropped if self.training is True?"
        return Finding(CAUSALITY, "fault", text)
    by = [f", with {name}, {convention}" for name, convention in plan.masks.items() if name in plan.causal_masks]
    by += [f", with {name}=True" for name in plan.flags]
    return Finding(CAUSALITY, "fine", f"no output depends on a later token{''.join(by)}")


def describe_mixing(module: ModuleUnderTest, inputs: Inputs, token: int, masks: Masks | None = None) -> str:
    """Where an earlier token first changes when this one does."""
    changed = module.replace_tokens(inputs, module.plan.main, (slice(None), token))
    operation = first_mixing(module, inputs, changed, torch.arange(module.length) < token, masks)
    return f"; tokens first mix in {operation}" if operation else ""


def leak_in_train_mode(module: ModuleUnderTest) -> str | None:
    """The evidence of a leak in train() mode. Every call draws the same dropout; batch norm mixes tokens on purpose."""
    if any(hasattr(part, "running_mean") for part in module.model.modules()):
        return None
    training, inputs = replace(module, model=eval_copy(module.model).train()), module.sample_inputs(0)
    try:
        if not module.has_output_per_token(training.run(inputs)):
            return None
        depends = dependency(training, inputs, positions=[module.length - 1])
    except Exception:  # train() mode may need other inputs
        return None
    depends.amounts[-1] = 0.0
    output, amount = int(depends.amounts.argmax()), depends.amounts.max().item()
    return f"output {output} changes by {amount:.2g} when token {module.length - 1} changes" if amount else None


def check_masked_causality(module: ModuleUnderTest, masks: Masks, name: str) -> Finding | None:
    """A padding mask that masks nothing must not replace the causal mask."""
    inputs = module.sample_inputs(0)
    if not module.has_output_per_token(module.run(inputs, masks)):
        return None
    depends = dependency(module, inputs, masks)
    if not depends.on_later.any():
        return None
    text = f"with {name}, {depends.describe_largest(depends.on_later)}, though not without it"
    return Finding(CAUSALITY, "fault", f"{text}: does the padding mask replace the causal mask? Combine the two")


def check_bidirectional(module: ModuleUnderTest) -> Finding | None:
    """An encoder in which no output depends on a later token may have a causal mask by mistake."""
    inputs = module.sample_inputs(0)
    if not module.has_output_per_token(module.run(inputs)):
        return None
    depends = dependency(module, inputs)
    if depends.on_later.any() or not depends.on_earlier.any() or not depends.is_finite:
        return None
    text = (
        "no output depends on a later token, though the module is examined as bidirectional (--no-causal): is there a"
    )
    return Finding(CAUSALITY, "warning", f"{text} causal mask by mistake?")


def check_dependency(module: ModuleUnderTest, causal: bool) -> list[Finding]:
    """Every input must have an effect, and attention must carry information from one token to another."""
    inputs = module.sample_inputs(0)
    before, findings = module.run(inputs), []
    for name in inputs:
        after = module.run(module.replace_tokens(inputs, name, slice(None)))
        if before.shape == after.shape and not output_change(before, after).any():
            findings.append(Finding(DEPENDENCY, "fault", f"no output depends on {name}, whatever its values are"))
    if findings:
        return findings
    if module.plan.source is not None:
        size = (module.plan.lengths[module.plan.source],) * 2
        for pattern in attention_patterns(module):
            if pattern.weights.shape[-2:] == size and module.length not in size and pattern.visibility == "causal":
                text = f"{pattern.name} attends only to earlier tokens of {module.plan.source}"
                return [Finding(DEPENDENCY, "warning", f"{text}: is its mask causal by mistake?")]
    if module.has_output_per_token(before):
        amounts = dependency(module, inputs).amounts
        paths = record_scores(module)[0].softmax_paths
        if paths and not (amounts.tril(-1).any() or amounts.triu(1).any()):
            text = f"no output depends on any other token, though {paths[0]} computes attention weights"
            return [Finding(DEPENDENCY, "fault", f"{text}: is their product with the values discarded?")]
    return [Finding(DEPENDENCY, "fine", "outputs depend on every input")]


def ignores_own_token(depends: Dependency) -> bool:
    """Also true of a causal module that shifts its input by one token, which is correct."""
    return bool(depends.on_earlier.any()) and not depends.amounts.diagonal().any()


def visibilities(module: ModuleUnderTest, patterns: list[AttentionPattern]) -> set[Visibility]:
    """The kinds of masks in self-attention over the main sequence."""
    size = (module.length, module.length)
    return {pattern.visibility for pattern in patterns if pattern.weights.shape[-2:] == size}


def mask_error(depends: Dependency, kinds: set[Visibility]) -> Visibility | None:
    """The key of MASK_ERRORS, by the attention weights where they are visible, and by the dependencies."""
    n, leaks = len(depends.amounts), depends.on_later > 0
    if "excludes self" in kinds or (n > 2 and leaks[0, 1:].all() and not leaks[1:].any()):
        return "excludes self"
    if "inverted" in kinds or (leaks.any() and not depends.on_earlier[:-1].any()):
        return "inverted"  # the last row has no visible key, so it can depend on anything
    distance = max((j - i for i, j in leaks.nonzero().tolist()), default=0)
    if "sees next" in kinds or (0 < distance < n - 2 and not kinds):
        return "sees next"
    return None


def sees_all_or_nothing(depends: Dependency) -> bool:
    """Whether every output depends on all earlier tokens or on none, unlike with a window open to both sides."""
    earlier = torch.ones_like(depends.amounts, dtype=torch.bool).tril(-1)
    return not depends.on_earlier[:-1].any() or bool(depends.amounts[earlier].all())


def leak_cause(depends: Dependency, patterns: list[AttentionPattern], module: ModuleUnderTest) -> str:
    """Why outputs depend on later tokens, and how to fix it."""
    patterns = [p for p in patterns if p.weights.shape[-2:] == depends.amounts.shape and p.visibility != "other"]
    kinds = {pattern.visibility for pattern in patterns}
    if any(pattern.is_over_queries for pattern in patterns):
        return "the softmax is over the wrong axis: the weights of each key sum to 1, not those of each query"
    if late := [pattern for pattern in patterns if pattern.is_masked_after_softmax]:
        low = min(pattern.row_sums[0] for pattern in late)
        return f"the mask is applied after the softmax (rows sum to {low:.2f}, not 1); mask the scores before it"
    if error := mask_error(depends, kinds):
        return MASK_ERRORS[error] + (CONVOLUTION if error == "sees next" and not kinds else "")
    if "causal" in kinds and "full" in kinds:
        unmasked = ", ".join(pattern.name for pattern in patterns if pattern.visibility == "full")
        return f"the mask is missing in {unmasked}; other layers apply it"
    if kinds == {"causal"}:
        return "attention is masked correctly, so tokens mix elsewhere"
    ignored = [name for name in attention_masks(module) if accepts_mask(module, name)]
    if ignored:
        return f"every output sees the whole sequence and {', '.join(ignored)} is ignored; apply it to the scores"
    axis = "" if kinds else ", or the softmax is over the wrong axis"
    return (
        f"the mask is missing, or its fill value is not low enough{axis}; "
        "for a bidirectional model, use --no-causal (causal=False)"
    )


def check_order(module: ModuleUnderTest, causal: bool) -> list[Finding]:
    """Permutes the tokens of each sequence. If the outputs are permuted alike, positions have no effect."""
    if not module.has_tokens:
        return [Finding(ORDER, "not checked", "image inputs have no tokens to permute")]
    findings = []
    for name in module.plan.inputs:
        tokens = "the order of tokens" if name == module.plan.main else f"the order of tokens in {name}"
        if ignores_order(module, name, causal):
            text = f"{tokens} does not matter (permutation equivariance): correct for sets"
            findings.append(Finding(ORDER, "warning", f"{text}; for text, add positional encodings"))
        elif causal and name == module.plan.main and order_is_only_in_mask(module):
            text = "nothing but the causal mask distinguishes positions: are positional encodings missing?"
            findings.append(Finding(ORDER, "warning", text))
        else:
            findings.append(Finding(ORDER, "fine", f"{tokens} matters, by positional encodings or a mask"))
    return findings


def ignores_order(module: ModuleUnderTest, name: str, causal: bool) -> bool:
    """Under a causal mask, which distinguishes positions by itself, only the last output is compared, with two tokens
    swapped that even a narrow window contains."""
    inputs, length = module.sample_inputs(0), module.plan.lengths[name]
    before = module.run(inputs)
    permutes_outputs = name == module.plan.main and module.has_output_per_token(before)
    last_only = causal and permutes_outputs
    permutation = swap_before_last(length) if last_only else torch.arange(length).roll(2)
    after = module.run({**inputs, name: inputs[name][:, permutation]})
    if last_only:
        return is_same(before[:, -1], after[:, -1])
    return is_same(before[:, permutation], after) if permutes_outputs else is_same(before, after)


def swap_before_last(length: int) -> Tensor:
    permutation = torch.arange(length)
    permutation[-3:-1] = torch.tensor([length - 2, length - 3])
    return permutation


def order_is_only_in_mask(module: ModuleUnderTest) -> bool:
    """Whether a causal module has no positions; False where its attention is not visible.

    With one token repeated, a mask alone leaves all outputs equal and all weights of a row equal; positions of any
    kind, in any layer, change one or the other. With two tokens swapped, the weights of the first layer are swapped if
    nothing mixes neighbors before it, which a repeated token would not show.
    """
    inputs, main, length = module.sample_inputs(0), module.plan.main, module.length
    repeated = {**inputs, main: inputs[main][:, :1].expand_as(inputs[main]).clone()}
    outputs = module.run(repeated)
    layers = self_attention_weights(module, repeated)
    other_lengths = [n for name, n in module.plan.lengths.items() if name != main]
    if not module.has_output_per_token(outputs) or not layers or length in other_lengths:
        return False
    for weights in layers:
        visible = weights > 0
        scaled = weights * visible.sum(-1, keepdim=True)
        if not is_same(scaled.flatten(0, 1), visible.to(weights).flatten(0, 1)):
            return False
    swap = swap_before_last(length)
    first = self_attention_weights(module, inputs)[0]
    swapped = self_attention_weights(module, {**inputs, main: inputs[main][:, swap]})[0]
    return is_same(outputs, outputs[:, :1].expand_as(outputs)) and is_same(first[:, :, -1, swap], swapped[:, :, -1])


def self_attention_weights(module: ModuleUnderTest, inputs: Inputs) -> list[Tensor]:
    """(B,H,L,L) for each layer in which the main sequence attends to itself, in call order."""
    weights = [pattern.weights for pattern in attention_patterns(module, inputs=inputs)]
    return [w for w in weights if w.shape[-2:] == (module.length, module.length)]


def is_same(before: Tensor, after: Tensor) -> bool:
    return not approximate_change(before, after).any()
