"""Rows that see nothing: a softmax over no keys is 0/0. The answer, and every gradient, must stay finite."""

import torch
from torch import Tensor

from clearhead.insight.doctor.calling import Called
from clearhead.insight.doctor.encodings import LENGTHS
from clearhead.insight.doctor.padding import Group
from clearhead.insight.doctor.report import Finding
from clearhead.insight.doctor.shown import shown
from clearhead.insight.doctor.subject import EXAMPLES, Masks, Subject, tensor_of, undisturbed

NAME = "rows that see nothing"
TORCH_NN = (
    "NaN where a query may see no key, which is torch.nn's own doing (need_weights=True); "
    "need_weights=False gives zeros"
)


def check_nothing_seen(called: Called, solved: list[Group]) -> Finding:
    """All tokens of one example hidden; and, with a mask of pairs, all keys of one query."""
    trials = [trial for group in solved for trial in trials_of(called.subject, group)]
    if not trials:
        return Finding(NAME, "not checked", "no mask was found that could hide all")
    n_taken = 0
    for what, masks in trials:
        try:
            is_whole, is_kind = is_finite(called.subject, masks), is_finite_backwards(called.subject, masks)
        except Exception:  # a module may refuse an example without tokens: that is kind, too
            continue
        n_taken += 1
        if is_whole and is_kind:
            continue
        if any(not layer.is_finite and layer.is_torch_nn for layer in shown(called.subject, masks)):
            return Finding(NAME, "warning", TORCH_NN)
        how = "the answer has NaN" if not is_whole else "a gradient is NaN, though the answer is not"
        return Finding(
            NAME, "fault", f"{how} {what}: softmax over nothing; give such rows zeros, or hide with a finite number"
        )
    if not n_taken:
        return Finding(NAME, "not checked", "the module refuses a mask that hides all")
    return Finding(NAME, "fine", "an example or a query that may see nothing stays finite, and so do gradients")


def trials_of(subject: Subject, group: Group) -> list[tuple[str, Masks]]:
    length, found = subject.plan.lengths[group.sequence], []
    seen = torch.ones(EXAMPLES, length, length, dtype=torch.bool)
    first_hidden = seen.clone()
    first_hidden[0] = False
    found.append(
        (f"when all tokens of one example are hidden by {' and '.join(group.names)}", group.masks(first_hidden))
    )
    assert group.encoding is not None
    if group.encoding != LENGTHS and "Q" in group.encoding.shape:
        row_hidden = seen.clone()
        row_hidden[:, 2] = False
        found.append(("when one query may see no key", group.masks(row_hidden)))
    return found


def is_finite(subject: Subject, masks: Masks) -> bool:
    return bool(subject.answer(subject.draw(0), masks).isfinite().all())


def is_finite_backwards(subject: Subject, masks: Masks) -> bool:
    """The gradient of all other examples: a loss leaves out what is padding."""
    with undisturbed(subject.dtype, 0):
        output = subject.shaped(tensor_of(subject.model(**subject.arguments(subject.draw(0), masks))))
        parameters = [p for p in subject.model.parameters() if p.requires_grad]
        if not output.requires_grad or not parameters:
            return True
        gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
            output[1:].square().sum(), parameters, allow_unused=True
        )
    return all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)
