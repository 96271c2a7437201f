"""Empty rows: a query that may see no key has a softmax of 0/0. The answer and every gradient must stay finite."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from clearhead.insight.doctor.encodings import LENGTHS
from clearhead.insight.doctor.feeds import Ids
from clearhead.insight.doctor.groups import Group
from clearhead.insight.doctor.padding import CURE
from clearhead.insight.doctor.report import Finding
from clearhead.insight.doctor.shown import shown
from clearhead.insight.doctor.subject import EXAMPLES, Inputs, Masks, Subject, copied, tensor_of, undisturbed

NAME = "empty rows"
OF_NO_TOKENS = "its attention is finite, so is it a mean over no tokens? divide by their number, clamp(min=1)"
TORCH_NN = (
    "NaN where a query may see no key: torch.nn's own doing where it returns weights; need_weights=False gives zeros"
)


def check_empty_rows(subject: Subject, solved: list[Group]) -> Finding:
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
        layers = shown(subject, masks, inputs)
        if any(not layer.is_finite and layer.is_torch_nn for layer in layers):
            return Finding(NAME, "warning", TORCH_NN)
        how = "the answer has NaN" if not is_whole else "a gradient is NaN, though the answer is not,"
        is_elsewhere = bool(layers) and not is_whole and all(layer.is_finite for layer in layers)
        return Finding(NAME, "fault", f"{how} {what}: {OF_NO_TOKENS if is_elsewhere else CURE}")
    if not n_taken:
        why = "the module refuses to hide all" if n_tried else "no mask was found that could hide all"
        return Finding(NAME, "not checked", why)
    return Finding(NAME, "fine", "an example or a query that may see nothing stays finite, and so do gradients")


def trials(subject: Subject, solved: list[Group]) -> Iterator[tuple[str, Inputs, Masks]]:
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
        if isinstance(feed, Ids) and feed.padding is not None and name not in masked:
            emptied = inputs[name].index_fill(0, torch.tensor(0), feed.padding)
            yield f"when {whose} is padding only (id {feed.padding})", {**inputs, name: emptied}, {}


def is_finite(subject: Subject, inputs: Inputs, masks: Masks) -> bool:
    return bool(subject.answer(inputs, masks).isfinite().all())


def is_finite_backwards(subject: Subject, inputs: Inputs, masks: Masks) -> bool:
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
