import copy
import threading
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from clearhead.insight.doctor.call_plan import call
from clearhead.insight.doctor.module_under_test import (
    MaskConvention,
    copied,
    shaken,
    tensor_of,
    tensors_of,
    undisturbed,
    unwrapped,
)


def test_everything_is_as_before(ward):
    model = ward.GPT().train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    subject = call(model, None, None).subject
    subject.answer(subject.draw(0))
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == torch.float32
    assert torch.backends.mha.get_fastpath_enabled()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_settings_come_back_after_an_error():
    seen = []
    with pytest.raises(ZeroDivisionError), undisturbed(torch.float64, 0):  # noqa: PT012
        seen.append(torch.get_default_dtype())
        1 / 0  # noqa: B018
    assert [*seen, torch.get_default_dtype()] == [torch.float64, torch.float32]


def test_what_a_forward_does_to_its_input_stays_in_that_call():
    class Clearing(nn.Module):
        def forward(self, x):
            return x.mul_(0) + 1

    subject = call(Clearing(), None, None).subject
    inputs = subject.draw(0)
    before = {name: x.clone() for name, x in inputs.items()}
    subject.answer(inputs)
    assert subject.dtype == torch.float64
    assert all(torch.equal(x, before[name]) for name, x in inputs.items())


def test_only_what_is_asked_for_is_changed(ward):
    subject = call(ward.GPT(), None, None).subject
    inputs = subject.draw(0)
    changed = subject.changed(inputs, "idx", (slice(None), 3))
    assert ((changed["idx"] != inputs["idx"]) == (torch.arange(7) == 3)).all()


def test_masks_of_every_call_are_joined_with_those_of_one(ward):
    subject = call(ward.Generic(), None, None).subject
    encoding = MaskConvention("(B,Q,K)", "may")
    subject = subject.by(masks={"mask": encoding}, causal=("mask",), nothing=())
    seen = torch.arange(7)[None, None] != 2
    given = subject.arguments(subject.draw(0), {"mask": (encoding, seen.expand(5, 7, 7))})
    assert torch.equal(given["mask"][0], torch.ones(7, 7, dtype=torch.bool).tril() & seen[0])


def test_answers_are_brought_into_one_order(ward):
    subject = call(ward.GPT(), None, None).subject
    answer = torch.randn(5, 7, 3)
    assert torch.equal(subject.shaped(answer.flatten(0, 1)), answer)
    assert torch.equal(subject.shaped(answer.transpose(1, 2)), answer)
    assert torch.equal(subject.by(batch_first=False).shaped(answer.transpose(0, 1)), answer)
    assert subject.has_places(answer)
    assert not subject.has_places(answer[:, 0])


def test_the_answer_is_found_among_what_is_returned():
    logits, loss, state = torch.zeros(2, 3), torch.zeros(()), torch.zeros(2, 4)
    assert tensor_of((loss, logits)) is logits
    assert tensor_of({"hidden": state, "logits": logits}) is logits

    @dataclass
    class Answer:
        loss: torch.Tensor
        scores: torch.Tensor

    @dataclass(slots=True)
    class Slotted(Answer):
        logits: torch.Tensor

    assert tensor_of(Answer(loss, state)) is state
    assert tensor_of(Slotted(loss, state, logits)) is logits
    assert tensors_of([logits, loss, "words", torch.zeros(2, 2, dtype=torch.long)]) == [logits, loss]
    with pytest.raises(ValueError, match=r"must return a tensor \(batch, ...\), or a tuple, .* with one, got str"):
        tensor_of("words")
    with pytest.raises(ValueError, match=r"with one, got torch.float32 \(\); return one"):
        tensor_of(loss)
    with pytest.raises(ValueError, match=r"with one, got torch.float32 \(2, 0\); return one"):
        tensor_of(logits[:, :0])
    with pytest.raises(ValueError, match=r"got torch.float32 \(2, 3\), torch.sparse_coo; return one"):
        tensor_of(logits.to_sparse())


def test_weights_are_shaken_and_frozen_ones_are_not():
    model = nn.Linear(3, 3)
    nn.init.zeros_(model.weight)
    model.bias.requires_grad_(False)
    twin = shaken(copied(model))
    assert twin.weight.any()
    assert torch.equal(twin.bias, model.bias)
    assert not model.weight.any()


def test_rows_of_padding_are_not_shaken():
    table = nn.Embedding(4, 3, padding_idx=1)
    assert (shaken(copied(table)).weight != table.weight).any(1).tolist() == [True, False, True, True]


def test_what_is_compiled_is_unwrapped():
    inner, outer = nn.Linear(2, 2), nn.Module()
    outer._orig_mod = inner
    assert unwrapped(outer) is inner
    assert unwrapped(inner) is inner


def test_a_module_that_cannot_be_copied_is_refused():
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    with pytest.raises(ValueError, match=r"copy.deepcopy can copy, got TypeError: .*; keep only parameters"):
        copied(model)
    with pytest.raises(ValueError, match="parameters and buffers must have numbers, got lazy ones"):
        copied(nn.LazyLinear(2))


def test_what_a_module_keeps_of_its_last_pass_is_copied_without_its_history():
    model = nn.Linear(2, 2)
    model.last, model.all = model.weight * 2, [model.weight * 3]
    twin = copied(model)
    assert torch.equal(twin.last, model.last)
    assert torch.equal(twin.all[0], model.all[0])
    assert model.last.grad_fn is not None
