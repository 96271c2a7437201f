"""Masked tokens: none may affect the output of another token, and a query without any visible key must stay finite.

The convention of a mask, its shape and polarity, is determined by trial. Shapes: B batch, Q queries, K keys, L length.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clearhead.insight.doctor.causality import Operation, first_mixing
from clearhead.insight.doctor.inputs import (
    COMBINED_SHAPES,
    LENGTHS,
    MEMORY_NAME,
    MEMORY_PREFIX,
    PADDING_SHAPES,
    MaskConvention,
    Parameter,
    TokenIds,
    contradicts_name,
    conventional_polarity,
    is_cross_mask,
    mask_conventions,
)
from clearhead.insight.doctor.module_under_test import (
    BATCH_SIZE,
    Dependency,
    Inputs,
    Masks,
    ModuleUnderTest,
    approximate_change,
    dependency,
    isolated_state,
    main_output,
    output_change,
)
from clearhead.insight.doctor.report import Finding
from clearhead.insight.doctor.scores import attention_patterns

PADDING, FULLY_MASKED = "padding", "fully masked rows"
LOCAL_OPERATIONS = ("conv", "pad", "cat", "roll", "unfold", "avg_pool", "max_pool", "fft", "__getitem__")
"""operations that mix neighbors in models whose authors accept it, as ConvBERT's and MobileBERT's do"""
NO_MASK = "neither a mask nor a padding id was found for {}"
EMPTY_SOFTMAX = "a softmax over no keys; return zeros for such rows, or mask with torch.finfo(dtype).min"
EMPTY_MEAN = "attention is finite, so is it a mean over no tokens? Divide by their number with clamp(min=1)"
TORCH_NN_NAN = (
    "NaN where a query may attend to no key: nn.MultiheadAttention does this when it returns weights; "
    "need_weights=False gives zeros"
)
MAX_ADDED_TOKENS, MAX_DROPPED_TOKENS = 16, 2
"""class tokens and registers; an output with a larger difference in length does not have one row per token"""


@dataclass(frozen=True)
class MaskGroup:
    """Masks that together hide tokens of one sequence, and their convention, once it is known."""

    names: tuple[str, ...]
    sequence: str
    convention: MaskConvention | None = None

    def __str__(self) -> str:
        return " and ".join(self.names)

    def masks(self, visible: Tensor, convention: MaskConvention | None = None) -> Masks:
        """The same mask, (B,K) or (B,Q,K), for each parameter."""
        convention = convention or self.convention
        assert convention is not None
        visible = visible if visible.dim() == 3 else visible[:, None].expand(-1, visible.shape[-1], -1)
        return dict.fromkeys(self.names, (convention, visible))


@dataclass(frozen=True)
class Trial:
    """The result of masking two tokens in one convention."""

    convention: MaskConvention
    leak: Dependency
    """of all outputs but those of masked tokens, on the masked tokens"""
    works: bool
    has_no_effect: bool


def mask_groups(module: ModuleUnderTest) -> list[MaskGroup]:
    """The padding masks of each sequence as one group, and each lengths parameter as another. Where there is neither,
    attention masks take their place."""
    plan, groups = module.plan, []
    if not module.has_tokens:
        return []
    for sequence in [plan.main] if plan.source is None else [plan.source, plan.main]:
        parameters = [p for p in module.parameters if plan.masked_sequence(p.name) == sequence]
        padding = tuple(p.name for p in parameters if p.role == "padding")
        lengths = [(p.name,) for p in parameters if p.role == "lengths"]
        groups += [MaskGroup(names, sequence) for names in [padding, *lengths] if names]
        if not padding and not lengths and (names := attention_masks(parameters, sequence == plan.source)):
            groups.append(MaskGroup(names, sequence))
    return groups


def attention_masks(parameters: list[Parameter], is_source: bool) -> tuple[str, ...]:
    """The first attention mask of a sequence; for a source, also those of its memory."""
    names = [p.name for p in parameters if p.role == "attention"]
    of_memory = [name for name in names if MEMORY_PREFIX.fullmatch(name.lower())]
    return (*[name for name in names if name not in of_memory][:1], *(of_memory if is_source else []))


def candidate_conventions(module: ModuleUnderTest, group: MaskGroup) -> list[MaskConvention]:
    roles = {p.role for p in module.parameters if p.name in group.names}
    if roles == {"lengths"}:
        return [LENGTHS]
    shapes = COMBINED_SHAPES if set(group.names) & set(module.plan.causal_masks) else PADDING_SHAPES
    return list(mask_conventions((*shapes, "(Q,K)") if roles == {"attention"} else shapes, group.names))


def find_convention(module: ModuleUnderTest, group: MaskGroup) -> tuple[MaskGroup, list[Trial]]:
    """The group with the convention that works, if one does; and all trials."""
    trials = []
    for convention in candidate_conventions(module, group):
        try:
            trials.append(try_convention(module, group, convention))
        except Exception:  # the module does not accept a mask of this shape or dtype
            continue
        if trials[-1].works:
            return replace(group, convention=convention), trials
    return group, trials


def try_convention(module: ModuleUnderTest, group: MaskGroup, convention: MaskConvention) -> Trial:
    inputs, length = module.sample_inputs(0), module.plan.lengths[group.sequence]
    masked = masked_positions(length, convention)
    masks = group.masks(visible_except(masked, length), convention)
    before = module.run(inputs, masks)
    has_no_effect = not output_change(module.run(inputs), before).any()
    leak = dependency(module, inputs, masks, group.sequence, masked)
    is_main = group.sequence == module.plan.main and before.dim() > 2
    outputs = token_outputs(leak.amounts, masked, length) if is_main else {}
    leak.amounts[[outputs[position] for position in masked if position in outputs]] = 0.0  # a masked token's own output
    works = not has_no_effect and leak.is_finite and not leak.amounts.any()
    works = works and visible_tokens_matter(module, group, masks, masked, outputs)
    return Trial(convention, leak, works, has_no_effect)


def masked_positions(length: int, convention: MaskConvention) -> list[int]:
    """Two positions with visible ones before, between and after them; for lengths, the last two."""
    return [length - 2, length - 1] if convention == LENGTHS else sorted({min(2, length - 2), length - 2})


def visible_except(masked: list[int], length: int) -> Tensor:
    """(B,K): False at the masked positions."""
    visible = torch.ones(BATCH_SIZE, length, dtype=torch.bool)
    visible[:, masked] = False
    return visible


def token_outputs(amounts: Tensor, masked: list[int], length: int) -> dict[int, int]:
    """The output of each token, by position. A module may add or drop a few tokens (a class token) at either end: the
    offset is the one with the smallest leak."""
    extra = len(amounts) - length
    if not -MAX_DROPPED_TOKENS <= extra <= MAX_ADDED_TOKENS or len(amounts) == 1:
        return {}
    candidates = []
    for offset in range(min(0, extra), max(0, extra) + 1):
        outputs = {position: position + offset for position in range(length) if 0 <= position + offset < len(amounts)}
        rest = amounts.clone()
        rest[[outputs[position] for position in masked if position in outputs]] = 0.0
        candidates.append((float(rest.sum()), outputs))
    return min(candidates, key=lambda candidate: candidate[0])[1]


def visible_tokens_matter(
    module: ModuleUnderTest, group: MaskGroup, masks: Masks, masked: list[int], outputs: dict[int, int]
) -> bool:
    """Whether tokens that are not masked affect outputs of other tokens."""
    inputs, length = module.sample_inputs(0), module.plan.lengths[group.sequence]
    visible = [position for position in range(length) if position not in masked]
    amounts = dependency(module, inputs, masks, group.sequence, visible).amounts
    for position, output in outputs.items():  # the residual path of a token to its own output
        amounts[output, visible.index(position) if position in visible else slice(None)] = 0.0
    return bool(amounts.any())


def with_required_masks(module: ModuleUnderTest) -> ModuleUnderTest:
    """The module with the right convention for the masks of every call, which mask nothing."""
    for group in mask_groups(module):
        names = [name for name in group.names if name in module.plan.masks]
        convention = find_convention(module, group)[0].convention if names else None
        convention = convention or (first_transparent(module, group, names) if names else None)
        if convention:
            module = with_convention(module, names, convention)
    return module


def with_convention(module: ModuleUnderTest, names: list[str], convention: MaskConvention) -> ModuleUnderTest:
    return module.with_plan(masks={**module.plan.masks, **dict.fromkeys(names, convention)})


def first_transparent(module: ModuleUnderTest, group: MaskGroup, names: list[str]) -> MaskConvention | None:
    """For a module that masks no token correctly: the first convention in which an all-visible mask lets tokens affect
    each other."""
    for convention in [module.plan.masks[names[0]], *candidate_conventions(module, group)]:
        candidate = with_convention(module, names, convention)
        try:
            output = candidate.run(candidate.sample_inputs(0))
            is_main = group.sequence == module.plan.main and candidate.has_output_per_token(output)
            outputs = {position: position for position in range(module.length)} if is_main else {}
            if visible_tokens_matter(candidate, group, {}, [], outputs):
                return convention
        except Exception:  # the module does not accept a mask of this shape or dtype
            continue
    return None


def check_padding(module: ModuleUnderTest, tried: list[tuple[MaskGroup, list[Trial]]]) -> list[Finding]:
    findings = [group_finding(module, group, trials) for group, trials in tried]
    for name in sorted(set(module.plan.inputs) - {group.sequence for group, _ in tried}):
        finding = check_padding_id(module, name)
        if finding is None and name == module.plan.source:
            finding = Finding(PADDING, "not checked", NO_MASK.format(name))
        findings += [finding] if finding else []
    if not findings:
        text = NO_MASK.format(module.plan.main) if module.has_tokens else "image inputs have no padding"
        findings.append(Finding(PADDING, "not checked", text))
    return findings


def group_finding(module: ModuleUnderTest, group: MaskGroup, trials: list[Trial]) -> Finding:
    if group.convention is not None:
        inverted = [name for name in group.names if contradicts_name(name, group.convention.polarity)]
        if inverted:
            meaning = "1 = may attend" if conventional_polarity(inverted[0]) == "attend" else "True = masked"
            text = f"{inverted[0]} is inverted: by convention it means {meaning}; negate it"
            return Finding(PADDING, "fault", text)
        text = f"masked tokens of {group.sequence} affect no other output ({group}: {group.convention})"
        return Finding(PADDING, "fine", text)
    if not trials:
        text = (
            f"the module accepts no shape and dtype that was tried for {group}; examine a wrapper with (batch, length)"
        )
        return Finding(PADDING, "not checked", text)
    trial = most_relevant(trials, group)
    if trial.has_no_effect or all(other.has_no_effect for other in trials):
        text = f"no effect of {group}: the mask does not reach the attention scores"
        return Finding(PADDING, "fault" if attention_patterns(module) else "warning", text)
    if not trial.leak.is_finite:
        text = f"the output is not finite when {group} masks two tokens ({trial.convention}): {EMPTY_SOFTMAX}"
        return Finding(PADDING, "fault", text)
    if not trial.leak.amounts.any():
        text = f"with {group}, no token affects any other output: is there any attention?"
        return Finding(PADDING, "warning", text)
    text, operation = leak_text(module, group, trial)
    is_local = operation is not None and operation.name.startswith(LOCAL_OPERATIONS)
    if is_local or (trial.leak.amounts.shape[0] > 1 and masks_attention(module, group, trial.convention)):
        return Finding(PADDING, "warning", f"{text}; set padding to zero before it, unless the model is meant so")
    if hides_cross_attention_only(module, group):
        text += f"; or is {group} not meant for padding? The encoder takes no mask"
        return Finding(PADDING, "warning", text)
    return Finding(PADDING, "fault", text)


def masks_attention(module: ModuleUnderTest, group: MaskGroup, convention: MaskConvention) -> bool:
    """Whether no attention weight reaches a masked token, so that padding leaks elsewhere."""
    length = module.plan.lengths[group.sequence]
    masked = masked_positions(length, convention)
    patterns = attention_patterns(module, group.masks(visible_except(masked, length), convention))
    weights = [pattern.weights for pattern in patterns if pattern.weights.shape[-1] == length]
    return bool(weights) and not any(w[..., masked].any() for w in weights)


def most_relevant(trials: list[Trial], group: MaskGroup) -> Trial:
    """The trial with the polarity that the name implies, or else the one that leaks least."""
    implied = [trial for trial in trials if trial.convention.polarity == conventional_polarity(group.names[0])]
    effective = [trial for trial in implied or trials if not trial.has_no_effect] or trials
    return min(effective, key=lambda trial: (not trial.leak.is_finite, float(trial.leak.amounts.sum())))


def leak_text(module: ModuleUnderTest, group: MaskGroup, trial: Trial) -> tuple[str, Operation | None]:
    """The output that changes most, why, and how to fix it; and the operation where the padding leaks first."""
    amounts, length = trial.leak.amounts, module.plan.lengths[group.sequence]
    output, column = divmod(int(amounts.argmax()), amounts.shape[1])
    masked = masked_positions(length, trial.convention)
    evidence = f"output {output} changes by {amounts.max().item():.2g} when the masked token {masked[column]} changes"
    inputs, masks = module.sample_inputs(0), group.masks(visible_except(masked, length), trial.convention)
    changed = module.replace_tokens(inputs, group.sequence, (slice(None), masked[column]))
    operation = first_mixing(module, inputs, changed, torch.arange(length) != masked[column], masks)
    if operation is None and group.sequence != module.plan.main:
        operation = first_mixing(module, inputs, changed, torch.ones(module.length, dtype=torch.bool), masks)
    patterns = attention_patterns(module, masks)
    late = [pattern for pattern in patterns if pattern.is_masked_after_softmax]
    if late:
        low = late[0].row_sums[0]
        cause = f"the mask is applied after the softmax (rows sum to {low:.2f}, not 1); mask the scores before it"
    else:
        place = f", first in {operation}" if operation else ""
        cause = f"padding leaks through {group}{place}; mask keys (columns), in every layer and in pooling"
    return f"{evidence}: {cause}", operation


def hides_cross_attention_only(module: ModuleUnderTest, group: MaskGroup) -> bool:
    """Whether the masks hide the output of an encoder inside the module, and none hides the encoder's input."""
    source = module.plan.source
    is_given = source is not None and MEMORY_NAME.fullmatch(source.lower())
    attention = {p.name for p in module.parameters if p.role == "attention"}
    return not is_given and all(name in attention and is_cross_mask(name, source) for name in group.names)


def check_padding_id(module: ModuleUnderTest, name: str) -> Finding | None:
    """With a padding id, one more padding token at the end must not change any output."""
    kind, length = module.plan.inputs[name], module.plan.lengths[name]
    if not isinstance(kind, TokenIds) or kind.padding_id is None or length < 4:
        return None
    inputs = module.sample_inputs(0)
    inputs[name][:, -2:] = kind.padding_id
    shorter = module.with_plan(lengths={**module.plan.lengths, name: length - 1})
    try:
        before, after = shorter.run({**inputs, name: inputs[name][:, :-1]}), module.run(inputs)
    except Exception:  # the module may have a fixed length
        return None
    if name == module.plan.main and module.has_output_per_token(after):
        before, after = before[:, : length - 2], after[:, : length - 2]
    change = approximate_change(after, before).amax(0)
    extra = f"one more padding token (id {kind.padding_id}) in {name}"
    if not change.any():
        return Finding(PADDING, "fine", f"{extra} changes no output")
    text = f"output {int(change.argmax())} changes by {change.max().item():.2g} with {extra}"
    text += f": padding leaks; mask the keys where {name} == {kind.padding_id}"
    return Finding(PADDING, "fault" if attention_patterns(module) else "warning", text)


def check_fully_masked_rows(module: ModuleUnderTest, groups: list[MaskGroup]) -> Finding:
    """Masks all tokens of one example and, where masks are (Q,K), all keys of one query.

    In float32, since some float64 kernels return NaN by themselves.
    """
    module = module.with_dtype(torch.float32)
    num_tried = num_accepted = 0
    for event, inputs, masks in fully_masked_calls(module, groups):
        num_tried += 1
        try:
            output_finite = bool(module.run(inputs, masks).isfinite().all())
            gradient_finite = has_finite_gradient(module, inputs, masks)
        except Exception:  # a module may reject an example without tokens
            continue
        num_accepted += 1
        if output_finite and gradient_finite:
            continue
        patterns = attention_patterns(module, masks, inputs)
        if any(not pattern.is_finite and pattern.is_torch_nn for pattern in patterns):
            return Finding(FULLY_MASKED, "warning", TORCH_NN_NAN)
        evidence = "a gradient is NaN, though the output is not," if output_finite else "the output is NaN"
        is_elsewhere = bool(patterns) and not output_finite and all(pattern.is_finite for pattern in patterns)
        return Finding(FULLY_MASKED, "fault", f"{evidence} {event}: {EMPTY_MEAN if is_elsewhere else EMPTY_SOFTMAX}")
    if not num_accepted:
        text = "the module rejects fully masked inputs" if num_tried else "no mask was found that could hide all keys"
        return Finding(FULLY_MASKED, "not checked", text)
    return Finding(FULLY_MASKED, "fine", "outputs and gradients stay finite where a query may attend to no key")


def fully_masked_calls(module: ModuleUnderTest, groups: list[MaskGroup]) -> Iterator[tuple[str, Inputs, Masks]]:
    inputs = module.sample_inputs(0)
    for group in groups:
        length = module.plan.lengths[group.sequence]
        visible = torch.ones(BATCH_SIZE, length, length, dtype=torch.bool)
        visible[0] = False
        yield f"when all tokens of an example are masked ({group})", inputs, group.masks(visible)
        assert group.convention is not None
        if group.convention != LENGTHS and "Q" in group.convention.shape:
            visible[0], visible[:, 2] = True, False
            yield f"when all keys of a query are masked ({group.names[0]})", inputs, group.masks(visible)
    masked = [group.sequence for group in groups]
    for name, kind in module.plan.inputs.items():
        if isinstance(kind, TokenIds) and kind.padding_id is not None and name not in masked:
            emptied = inputs[name].index_fill(0, torch.tensor(0), kind.padding_id)
            where = "an example" if name == module.plan.main else f"{name} of an example"
            yield f"when {where} is only padding (id {kind.padding_id})", {**inputs, name: emptied}, {}


def has_finite_gradient(module: ModuleUnderTest, inputs: Inputs, masks: Masks) -> bool:
    """The gradient of a loss over all examples but the first, since a loss ignores padding."""
    with torch.enable_grad(), isolated_state(module.dtype, 0):
        output = module.batch_first_output(main_output(module.model(**module.arguments(inputs, masks))))
        parameters = [p for p in module.model.parameters() if p.requires_grad]
        if not output.requires_grad or not parameters:
            return True
        loss = output[1:].square().sum()
        gradients: tuple[Tensor | None, ...] = torch.autograd.grad(loss, parameters, allow_unused=True)
    return all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)
