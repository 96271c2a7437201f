"""Other lengths of the same sequence: more padding, shorter inputs, decoding step by step, and the shift of a loss.

Shapes: B batch, L length, V vocabulary.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from clearhead.insight.doctor.inputs import CACHE_NAME, LENGTHS, OFFSET_NAME, TokenIds
from clearhead.insight.doctor.module_under_test import (
    BATCH_SIZE,
    Inputs,
    ModuleUnderTest,
    approximate_change,
    attributes_of,
    eval_copy,
    isolated_state,
    main_output,
    output_tensors,
)
from clearhead.insight.doctor.padding import PADDING, MaskGroup
from clearhead.insight.doctor.report import Finding, Verdict, error_summary

LENGTH, CACHE, LOSS = "length", "cache", "loss"
NUM_PADDING, NUM_SEEDS = 2, 3
LossFn = Callable[[Tensor, Tensor], Tensor]
"""(logits (B,L,V), ids (B,L)) -> loss"""


def shortened(module: ModuleUnderTest, name: str, num_tokens: int) -> ModuleUnderTest:
    """The module, called with fewer tokens in one sequence."""
    return module.with_plan(lengths={**module.plan.lengths, name: num_tokens})


def largest(change: Tensor) -> tuple[int, float]:
    """(the output that changes most, by how much), from the changes (B,Q)"""
    per_output = change.amax(0)
    return int(per_output.argmax()), per_output.max().item()


def check_more_padding(module: ModuleUnderTest, group: MaskGroup) -> Finding | None:
    """Two more tokens, which are masked, must change no output; nor may a mask that masks nothing."""
    name, length = group.sequence, module.plan.lengths[group.sequence]
    num_real = length - NUM_PADDING
    visible = torch.arange(length).expand(BATCH_SIZE, -1) < num_real
    for seed in range(NUM_SEEDS):  # a maximum over zeros, for example, differs for few inputs
        inputs = module.sample_inputs(seed)
        if (padding_id := getattr(module.plan.inputs[name], "padding_id", None)) is not None:
            inputs[name][:, num_real:] = padding_id  # the length may be counted from the ids
        fewer = {**inputs, name: inputs[name][:, :num_real]}
        try:
            before = shortened(module, name, num_real).run(fewer, group.masks(visible[:, :num_real]))
            after = module.run(inputs, group.masks(visible))
        except Exception:  # the module may have a fixed length
            return None
        if name == module.plan.main and module.has_output_per_token(after) and before.shape[1] == num_real:
            after = after[:, :num_real]
        if before.shape == after.shape and (change := approximate_change(before, after)).any():
            output, amount = largest(change)
            text = f"output {output} changes by {amount:.2g} with two tokens more padding in {name}, though masked"
            text += f" ({group}): divide by the number of real tokens, and exclude padding from a maximum"
            return Finding(PADDING, "fault", text)
    unmasked, masked = module.run(inputs), module.run(inputs, group.masks(torch.ones_like(visible)))
    if (change := approximate_change(unmasked, masked)).any():
        output, amount = largest(change)
        text = f"output {output} changes by {amount:.2g} when {group} masks nothing, compared with no mask"
        return Finding(PADDING, "warning", f"{text}: are positions counted from the mask, off by one?")
    return check_left_padding(module, group)


def check_left_padding(module: ModuleUnderTest, group: MaskGroup) -> Finding | None:
    """With position_ids that count from 0, padding on the left must change nothing."""
    inputs, name = module.sample_inputs(0), group.sequence
    takes_positions = "position_ids" in inspect.signature(module.model.forward).parameters
    if not takes_positions or name != module.plan.main or group.convention == LENGTHS:
        return None
    length, num_real = module.length, module.length - NUM_PADDING
    from_zero = {**module.plan.constants, "position_ids": torch.arange(length).expand(BATCH_SIZE, -1)}
    positions = (torch.arange(length) - NUM_PADDING).clamp(min=0).expand(BATCH_SIZE, -1)
    visible = torch.arange(length).expand(BATCH_SIZE, -1) >= NUM_PADDING
    padded = module.with_plan(constants={**module.plan.constants, "position_ids": positions})
    tokens = inputs[name]
    left = torch.cat([tokens[:, num_real:], tokens[:, :num_real]], 1)
    try:
        default, counted = module.run(inputs), module.with_plan(constants=from_zero).run(inputs)
        before = shortened(module, name, num_real).run({**inputs, name: tokens[:, :num_real]})
        after = padded.run({**inputs, name: left}, group.masks(visible))
    except Exception:
        return None
    if approximate_change(default, counted).any() or not after[:, NUM_PADDING:].isfinite().all():
        return None  # positions start elsewhere, or a fully masked row spreads
    if not module.has_output_per_token(after) or before.shape[1] != num_real:
        return None
    output, amount = largest(approximate_change(before, after[:, NUM_PADDING:]))
    if not amount:
        return None
    text = f"output {output} changes by {amount:.2g} with two tokens of padding on the left, masked by {group}"
    return Finding(PADDING, "fault", f"{text}, and matching position_ids: are they ignored?")


def check_length(module: ModuleUnderTest, causal: bool) -> Finding:
    """A call must not depend on the length of an earlier one; and a causal prefix not on what follows it."""
    if not module.has_tokens or module.length < 5:
        return Finding(LENGTH, "not checked", "the module has no sequence of at least 5 tokens")
    main, short = module.plan.main, module.length - NUM_PADDING
    inputs = module.sample_inputs(0)
    fewer = {**inputs, main: inputs[main][:, :short]}
    unused = replace(module, model=module.unused_model)
    calls = [(fewer, short), (inputs, module.length)]
    for i, (call, length) in enumerate(calls):
        other, other_length = calls[1 - i]
        try:
            expected = fresh(unused, length).run(call)
        except Exception:
            return Finding(LENGTH, "not checked", f"the module does not accept {length} tokens")
        used = fresh(unused, other_length)
        used.run(other)
        text = f"after a call with {other_length} tokens, one with {length} tokens"
        try:
            output = shortened(used, main, length).run(call)
        except Exception as error:
            text = f"{text} raises {error_summary(error)}: is a mask or table of the first length kept?"
            return Finding(LENGTH, "fault", text)
        if output.shape != expected.shape or (change := approximate_change(expected, output)).any():
            amount = largest(change)[1] if output.shape == expected.shape else float("inf")
            text = f"{text} differs by {amount:.2g} from that of an unused copy"
            return Finding(LENGTH, "fault", f"{text}: is a mask or table of the first length kept?")
    full, part = module.run(inputs), shortened(module, main, short).run(fewer)
    if causal and module.has_output_per_token(full) and part.shape[1] == short:
        position, amount = largest(approximate_change(part, full[:, :short]))
        if amount:
            text = f"output {position} of a shorter sequence differs by {amount:.2g}"
            text += ": do positions or factors depend on the length? Then generation changes with every token"
            return Finding(LENGTH, "warning", text)
    return Finding(LENGTH, "fine", f"calls with {short} and {module.length} tokens do not affect each other")


def fresh(unused: ModuleUnderTest, length: int) -> ModuleUnderTest:
    """A copy that has never been called, for inputs of this length."""
    model = eval_copy(unused.model).to(unused.dtype)
    return shortened(replace(unused, model=model), unused.plan.main, length)


def check_cache(module: ModuleUnderTest) -> Finding | None:
    """Decoding step by step, with the cache that the module returns, must equal one call."""
    names = inspect.signature(module.model.forward).parameters
    cache = next((name for name in names if CACHE_NAME.fullmatch(name)), None)
    offset = next((name for name in names if OFFSET_NAME.fullmatch(name)), None)
    inputs = module.sample_inputs(0)
    if (cache is None and offset is None) or module.plan.masks or not module.has_output_per_token(module.run(inputs)):
        return None
    expected = module.run(inputs)
    for steps in ((3, 2, 1), (3, 1, 1)):
        try:
            outputs = list(decoded(module, inputs, cache, offset, steps))
        except Exception:  # the module has another interface, or takes one token at a time
            continue
        start = 0
        for output in outputs:
            change = approximate_change(expected[:, start : start + output.shape[1]], output)
            if change.any():
                position, amount = largest(change)
                text = f"decoding step by step ({cache or offset}) changes output {start + position} by {amount:.2g}"
                text += ", compared with one call: check positions, mask and order of the cached keys"
                return Finding(CACHE, "fault", text)
            start += output.shape[1]
        return Finding(CACHE, "fine", f"decoding step by step ({cache or offset}) equals one call")
    return Finding(CACHE, "not checked", f"the module does not return what {cache or offset} takes")


def decoded(
    module: ModuleUnderTest, inputs: Inputs, cache: str | None, offset: str | None, steps: tuple[int, ...]
) -> Iterator[Tensor]:
    """The outputs (B,n,V) of each step. All steps use one copy, since the cache may be inside the module."""
    model, start, kept = eval_copy(module.model), 0, None
    flags = ["use_cache"] if "use_cache" in inspect.signature(model.forward).parameters else []
    for n in steps:
        step = {**inputs, module.plan.main: inputs[module.plan.main][:, start : start + n]}
        arguments = {**module.arguments(step, {}), **dict.fromkeys(flags, True)}
        if cache is not None and kept is not None:
            arguments[cache] = kept
        if offset is not None:
            arguments[offset] = start
        with torch.no_grad(), isolated_state(module.dtype, 0):
            output = model(**arguments)
        kept = returned_cache(output, cache) if cache is not None else None
        logits = main_output(output)
        if logits.shape[:2] != (BATCH_SIZE, n) or (cache is not None and kept is None):
            raise ValueError("not an interface for decoding")
        yield logits
        start += n


def returned_cache(output: Any, name: str) -> Any:
    """The cache among the outputs: under its name, or else what follows the logits."""
    if isinstance(output, list | tuple):
        return next((x for x in output[1:] if x is not None), None)
    named = output if isinstance(output, Mapping) else attributes_of(output)
    return next((named[key] for key in (name, "past_key_values", "cache", "state") if named.get(key) is not None), None)


def check_loss(module: ModuleUnderTest, loss_fn: LossFn | None) -> Finding | None:
    """The gradient of the loss shows which token each output is compared with: it is negative for that one only."""
    inputs, plan = module.sample_inputs(0), module.plan
    ids = inputs[plan.main]
    has_labels = any(p.name == "labels" for p in module.parameters)
    if plan.source is not None or ids.is_floating_point() or ids.dim() != 2 or not (loss_fn or has_labels):
        return None
    with torch.enable_grad(), isolated_state(module.dtype, 0):
        arguments = module.arguments(inputs, {})
        if loss_fn is None:
            output = module.model(**{**arguments, "labels": ids})
            logits, loss = main_output(output), next((x for x in output_tensors(output) if not x.dim()), None)
        else:
            logits = module.batch_first_output(main_output(module.model(**arguments))).detach().requires_grad_()
            loss = loss_fn(logits, ids)
        if loss is None or loss.dim() or not loss.requires_grad:
            return Finding(LOSS, "not checked", "no scalar loss was returned")
        gradient = torch.autograd.grad(loss, logits, allow_unused=True)[0]
    if gradient is None or not module.has_output_per_token(gradient):
        return Finding(LOSS, "not checked", "the loss does not depend on one output per token")
    kind = plan.inputs[plan.main]
    vocab_size = kind.vocab_size if isinstance(kind, TokenIds) else gradient.shape[-1]
    targets, used = gradient.argmin(-1), gradient[:, :, :vocab_size].amin(-1) < 0
    agreement = {shift: shifted_agreement(targets, used, ids, shift) for shift in (1, 0, -1)}
    shift = max(agreement, key=lambda each: agreement[each])
    if agreement[shift] < 0.9:
        return Finding(LOSS, "not checked", "the tokens that the loss compares outputs with were not recognized")
    if shift == 1:
        return Finding(LOSS, "fine", "each output is compared with the next token")
    which = "the same token, which it has seen" if shift == 0 else "the previous token"
    text = f"each output is compared with {which} (output 2 with token {2 + shift}): shift by one, logits[:, :-1] and"
    verdict: Verdict = "fault" if loss_fn is not None else "warning"  # a caller may pass labels that are shifted
    return Finding(LOSS, verdict, f"{text} ids[:, 1:]")


def shifted_agreement(targets: Tensor, used: Tensor, ids: Tensor, shift: int) -> float:
    """How often output i is compared with token i + shift."""
    positions = torch.arange(ids.shape[1]) + shift
    inside = used & (positions >= 0) & (positions < ids.shape[1])
    expected = ids[:, positions.clamp(0, ids.shape[1] - 1)]
    return ((targets == expected) & inside).sum().item() / max(1, int(inside.sum()))
