import pytest
import torch
from torch import nn

from clearhead.training import precision
from clearhead.training.precision import autocast, compiled

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("choice", "has", "expected"),
    [
        ("float32", True, torch.float32),
        ("bf16", False, torch.bfloat16),
        ("auto", True, torch.bfloat16),
        ("auto", False, torch.float32),
    ],
)
def test_auto_is_bf16_only_where_the_hardware_has_it(monkeypatch, choice, has, expected):
    monkeypatch.setattr(precision, "has_bf16", lambda device: has)
    with autocast(choice, CPU):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == expected


def test_a_failing_compiler_is_loud_and_training_goes_on(monkeypatch):
    def broken(model):
        def run(x):
            model(x)  # as far as the forward pass
            raise RuntimeError("no C++ compiler\nand a long story")

        return run

    monkeypatch.setattr(torch, "compile", broken)
    said, model = [], nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    state = torch.get_rng_state()
    assert compiled(model, "on", lambda forward: forward(torch.ones(1, 2)), said.append) is model
    assert said == ["torch.compile FAILED, training goes on without it, slower: no C++ compiler"]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(weight.grad is None for weight in model.parameters())


def test_a_rehearsal_leaves_no_trace(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model: lambda x: model(x))
    model, state = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), torch.get_rng_state()
    fast = compiled(model, "on", lambda forward: forward(torch.ones(1, 2)), pytest.fail)
    assert fast is not model
    assert torch.equal(torch.get_rng_state(), state)
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto compiles on a GPU")
@pytest.mark.parametrize("choice", ["off", "auto"])
def test_nothing_is_compiled_unasked(choice):
    model = nn.Linear(2, 2)
    assert compiled(model, choice, pytest.fail, pytest.fail) is model
