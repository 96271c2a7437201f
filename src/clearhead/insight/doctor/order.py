"""Order: attention alone treats tokens as a set. Does the module know their places, and do examples stay apart?"""

import torch
from torch import Tensor

from clearhead.insight.doctor.call_plan import said
from clearhead.insight.doctor.module_under_test import Inputs, ModuleUnderTest, drops
from clearhead.insight.doctor.padding import roughly_changed
from clearhead.insight.doctor.report import Finding
from clearhead.insight.doctor.scores import patterns
from clearhead.insight.leaks import movement


def check_order(subject: ModuleUnderTest, causal: bool) -> list[Finding]:
    """Tokens are permuted. If the answers are permuted in the same way, nothing in it knows about places."""
    if not subject.has_tokens:
        return [Finding("order", "not checked", "images have no order of tokens to change")]
    findings = []
    for name in subject.plan.feeds:
        what = "the order of its tokens" if name == subject.plan.main else f"the order of {name}"
        if is_blind(subject, name, causal):
            text = f"it does not notice {what} (permutation equivariance): right for sets; for text, add positions"
            findings.append(Finding("order", "warning", text))
        elif causal and name == subject.plan.main and knows_its_mask_only(subject):
            text = "nothing but its causal mask tells places apart, as far as attention is seen: on purpose?"
            findings.append(Finding("order", "warning", f"{text} for text, positions are usual"))
        else:
            findings.append(Finding("order", "fine", f"it notices {what}: it knows about places, or its mask does"))
    return findings


def is_blind(subject: ModuleUnderTest, name: str, causal: bool) -> bool:
    """Where a causal mask tells places apart by itself, the last output is asked alone, about two tokens that it sees
    both of even through a narrow window."""
    inputs, length = subject.draw(0), subject.plan.lengths[name]
    before = subject.answer(inputs)
    permutation = torch.arange(length)
    is_main_with_places = name == subject.plan.main and subject.has_places(before)
    if causal and is_main_with_places:
        permutation[-3:-1] = torch.tensor([length - 2, length - 3])
    else:
        permutation = permutation.roll(2)
    after = subject.answer({**inputs, name: inputs[name][:, permutation]})
    if causal and is_main_with_places:
        return same(before[:, -1], after[:, -1])
    return same(before[:, permutation], after) if is_main_with_places else same(before, after)


def knows_its_mask_only(subject: ModuleUnderTest) -> bool:
    """Whether a causal module has no positions: told where its attention is seen, and not told where it is not.

    A sequence of one token repeated: by a mask alone all outputs are the same, and each query weighs all that it sees
    alike; positions of any kind, in any layer, change one or the other. And with two tokens swapped, the first layer's
    weights are swapped: nothing mixes neighbours before it, which one repeated token would hide.
    """
    inputs, main, n = subject.draw(0), subject.plan.main, subject.length
    repeated = {**inputs, main: inputs[main][:, :1].expand_as(inputs[main]).clone()}
    outputs = subject.answer(repeated)
    layers = own_weights(subject, repeated)
    if not subject.has_places(outputs) or not layers or n in [k for m, k in subject.plan.lengths.items() if m != main]:
        return False
    alike = [w * (w > 0).sum(-1, keepdim=True) for w in layers]
    if not all(same(w.flatten(0, 1), (w > 0).to(w).flatten(0, 1)) for w in alike):
        return False
    swap = torch.arange(n)
    swap[-3:-1] = torch.tensor([n - 2, n - 3])
    first, swapped = (own_weights(subject, x)[0] for x in (inputs, {**inputs, main: inputs[main][:, swap]}))
    return same(outputs, outputs[:, :1].expand_as(outputs)) and same(first[:, :, -1, swap], swapped[:, :, -1])


def own_weights(subject: ModuleUnderTest, inputs: Inputs) -> list[Tensor]:
    """(B,H,L,L) of each layer in which the main sequence attends to itself, in the order in which they are called."""
    weights = [layer.weights for layer in patterns(subject, inputs=inputs)]
    return [w for w in weights if w.shape[-2:] == (subject.length, subject.length)]


def same(before: Tensor, after: Tensor) -> bool:
    return not roughly_changed(before, after).any()


def check_examples(subject: ModuleUnderTest) -> Finding:
    """One example is changed: no other one may move."""
    inputs = subject.draw(0)
    before, changed = subject.answer(inputs), inputs
    for name in inputs:
        changed = subject.changed(changed, name, 0)
    moved = movement(before, subject.answer(changed))
    if moved[1:].any():
        example, by = 1 + int(moved[1:].amax(1).argmax()), moved[1:].max().item()
        text = f"example {example} moves by {by:.2g} when example 0 is changed"
        return Finding(
            "examples", "fault", f"{text}: a view() or a norm mixes the batch; look for the axis of the batch"
        )
    if not subject.plan.batch_first:
        text = (
            "no example moves another, if it is given (length, batch, ...): meant so, or is batch_first=True forgotten?"
        )
        return Finding("examples", "warning", text)
    return Finding("examples", "fine", "no example of a batch moves another")


def check_again(subject: ModuleUnderTest) -> Finding | None:
    """The same input twice, with the same random numbers. If the answer moves all the same, no other check could tell
    what moves it from what it changes itself."""
    inputs = subject.draw(0)
    kept = "it keeps something from call to call, or draws from elsewhere than torch; make it a function of its input"
    try:
        first, second = subject.answer(inputs), subject.answer(inputs)
    except Exception as error:
        return Finding("answer", "fault", f"called once more it breaks with {said(error)}: {kept}")
    if first.shape == second.shape and not movement(first, second).any():
        return None
    return Finding("answer", "fault", f"two answers to the same input differ, with the same random numbers: {kept}")


def check_answer(subject: ModuleUnderTest) -> Finding:
    """The same input twice, with other random numbers."""
    inputs = subject.draw(0)
    first, second = subject.answer(inputs, seed=0), subject.answer(inputs, seed=1)
    if not first.isfinite().all():
        n = int((~first.isfinite()).flatten(2).any(-1).any(0).sum()) if first.dim() > 2 else 1
        text = f"{n} of {first.shape[1] if first.dim() > 2 else 1} outputs are not finite for ordinary input"
        return Finding("answer", "fault", f"{text}: does a query see no key at all?")
    if movement(first, second).any():
        text = "two answers to the same input differ in eval()"
        if drops(subject):
            return Finding("answer", "fault", f"{text}: F.dropout needs training=self.training")
        return Finding("answer", "warning", f"{text}: noise that is drawn on purpose, or a dropout of its own?")
    return Finding("answer", "fine", "finite, and the same each time in eval()")
