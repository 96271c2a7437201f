import copy
import threading
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from clearhead.insight.doctor.call_plan import prepare
from clearhead.insight.doctor.inputs import MaskConvention
from clearhead.insight.doctor.module_under_test import (
    Dependency,
    approximate_change,
    dependency,
    eval_copy,
    isolated_state,
    main_output,
    output_tensors,
    perturb_parameters,
    unwrap_compiled,
)


def test_running_changes_neither_the_model_nor_torch(zoo):
    model = zoo.GPT().train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    module = prepare(model, None, None)
    module.run(module.sample_inputs(0))
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == torch.float32
    assert torch.backends.mha.get_fastpath_enabled()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_torch_settings_are_restored_after_an_error():
    dtypes = []
    with pytest.raises(ZeroDivisionError), isolated_state(torch.float64, 0):  # noqa: PT012
        dtypes.append(torch.get_default_dtype())
        1 / 0  # noqa: B018
    assert [*dtypes, torch.get_default_dtype()] == [torch.float64, torch.float32]


def test_in_place_changes_of_forward_do_not_reach_the_inputs():
    class Clearing(nn.Module):
        def forward(self, x):
            return x.mul_(0) + 1

    module = prepare(Clearing(), None, None)
    inputs = module.sample_inputs(0)
    before = {name: x.clone() for name, x in inputs.items()}
    module.run(inputs)
    assert module.dtype == torch.float64
    assert all(torch.equal(x, before[name]) for name, x in inputs.items())


def test_replace_tokens_changes_only_the_index(zoo):
    module = prepare(zoo.GPT(), None, None)
    inputs = module.sample_inputs(0)
    changed = module.replace_tokens(inputs, "idx", (slice(None), 3))
    assert ((changed["idx"] != inputs["idx"]) == (torch.arange(7) == 3)).all()


def test_masks_of_the_plan_and_of_a_call_are_combined(zoo):
    module = prepare(zoo.MaskedBlock(), None, None)
    convention = MaskConvention("(B,Q,K)", "attend")
    module = module.with_plan(masks={"mask": convention}, causal_masks=("mask",), none_args=())
    visible = torch.arange(7)[None, None] != 2
    arguments = module.arguments(module.sample_inputs(0), {"mask": (convention, visible.expand(5, 7, 7))})
    assert torch.equal(arguments["mask"][0], torch.ones(7, 7, dtype=torch.bool).tril() & visible[0])


def test_outputs_of_any_layout_become_batch_first(zoo):
    module = prepare(zoo.GPT(), None, None)
    output = torch.randn(5, 7, 3)
    assert torch.equal(module.batch_first_output(output.flatten(0, 1)), output)
    assert torch.equal(module.batch_first_output(output.transpose(1, 2)), output)
    length_first = module.with_plan(batch_first=False)
    assert torch.equal(length_first.batch_first_output(output.transpose(0, 1)), output)
    assert module.has_output_per_token(output)
    assert not module.has_output_per_token(output[:, 0])


def test_main_output_is_found_in_tuples_dicts_and_dataclasses():
    logits, loss, state = torch.zeros(2, 3), torch.zeros(()), torch.zeros(2, 4)
    assert main_output((loss, logits)) is logits
    assert main_output({"hidden": state, "logits": logits}) is logits

    @dataclass
    class Output:
        loss: torch.Tensor
        scores: torch.Tensor

    @dataclass(slots=True)
    class SlottedOutput(Output):
        logits: torch.Tensor

    assert main_output(Output(loss, state)) is state
    assert main_output(SlottedOutput(loss, state, logits)) is logits
    assert output_tensors([logits, loss, "words", torch.zeros(2, 2, dtype=torch.long)]) == [logits, loss]


@pytest.mark.parametrize(
    ("output", "got"),
    [
        ("words", "str"),
        (torch.zeros(()), r"torch.float32 \(\)"),
        (torch.zeros(2, 0), r"torch.float32 \(2, 0\)"),
        (torch.zeros(2, 3).to_sparse(), r"torch.float32 \(2, 3\), torch.sparse_coo"),
    ],
)
def test_missing_output_is_an_error(output, got):
    with pytest.raises(ValueError, match=rf"must return a tensor \(batch, ...\), .* got {got}$"):
        main_output(output)


def test_trainable_parameters_are_perturbed_and_frozen_ones_are_not():
    model = nn.Linear(3, 3)
    nn.init.zeros_(model.weight)
    model.bias.requires_grad_(False)
    perturbed = perturb_parameters(eval_copy(model))
    assert perturbed.weight.any()
    assert torch.equal(perturbed.bias, model.bias)
    assert not model.weight.any()


def test_padding_rows_of_embeddings_are_not_perturbed():
    table = nn.Embedding(4, 3, padding_idx=1)
    perturbed = perturb_parameters(eval_copy(table))
    assert (perturbed.weight != table.weight).any(1).tolist() == [True, False, True, True]


def test_compiled_modules_are_unwrapped():
    inner, outer = nn.Linear(2, 2), nn.Module()
    outer._orig_mod = inner
    assert unwrap_compiled(outer) is inner
    assert unwrap_compiled(inner) is inner


def test_modules_that_cannot_be_copied_raise():
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    with pytest.raises(ValueError, match=r"copy.deepcopy cannot copy the module: TypeError: .*; keep only parameters"):
        eval_copy(model)
    with pytest.raises(ValueError, match="lazy parameters"):
        eval_copy(nn.LazyLinear(2))


def test_activations_kept_as_attributes_are_copied_without_their_graph():
    model = nn.Linear(2, 2)
    model.last, model.all = model.weight * 2, [model.weight * 3]
    twin = eval_copy(model)
    assert torch.equal(twin.last, model.last)
    assert torch.equal(twin.all[0], model.all[0])
    assert model.last.grad_fn is not None


def test_outputs_of_a_causal_model_depend_on_earlier_tokens_only(zoo):
    module = prepare(zoo.GPT(), None, None)
    depends = dependency(module, module.sample_inputs(0))
    assert torch.equal(depends.amounts > 0, torch.ones(7, 7, dtype=torch.bool).tril())
    assert depends.is_finite
    assert not depends.on_later.any()
    assert depends.on_earlier.any()


def test_dependency_on_some_positions_of_one_sequence(zoo):
    module = prepare(zoo.SourceTargetMasks(), None, None)
    depends = dependency(module, module.sample_inputs(0), sequence="src", positions=[0, 8])
    assert depends.amounts.shape == (7, 2)


def test_largest_dependency_is_described():
    amounts = torch.zeros(3, 3)
    amounts[0, 2] = 0.25
    depends = Dependency(amounts, True)
    assert depends.describe_largest(depends.on_later) == "output 0 changes by 0.25 when token 2 changes"


def test_approximate_change_tolerates_float32_rounding():
    x = torch.rand(5, 7, 3, dtype=torch.float64)
    assert not approximate_change(x, x + 1e-7).any()
    assert approximate_change(x, x + 1e-3).all()
