import os

import pytest
import torch
from torch import nn

from clearhead.training import context
from clearhead.training.context import autocast, compile_model, faster_precision

CPU = torch.device("cpu")


@pytest.mark.parametrize("has", [True, False])
@pytest.mark.parametrize(("choice", "expected"), [("float32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_precision_means_the_same_on_every_processor(monkeypatch, choice, has, expected):
    monkeypatch.setattr(context, "has_bf16", lambda device: has)
    with autocast(choice, CPU):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == expected


class Clock:
    """A clock that a step moves on by as many seconds as its precision takes."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.seconds, self.steps = 0.0, seconds, []
        monkeypatch.setattr(context.time, "perf_counter", lambda: self.now)

    def step(self, choice):
        self.steps.append(choice)
        self.now += self.seconds[choice]


@pytest.mark.parametrize(
    ("bf16_seconds", "expected"), [(0.5, "bf16"), (0.85, "bf16"), (0.9, "float32"), (1.0, "float32"), (20, "float32")]
)
def test_auto_takes_bf16_only_where_it_pays(monkeypatch, bf16_seconds, expected):
    monkeypatch.setattr(context, "has_bf16", lambda device: True)
    clock = Clock(monkeypatch, {"float32": 1.0, "bf16": bf16_seconds})
    chosen, reason = faster_precision(clock.step, CPU)
    assert chosen == expected
    assert "takes 1,000.0 ms in float32" in reason
    assert clock.steps.count("bf16") == clock.steps.count("float32") > 1
    assert clock.steps[:2] != clock.steps[1:3]  # in turns


def test_auto_does_not_try_what_the_processor_lacks(monkeypatch):
    monkeypatch.setattr(context, "has_bf16", lambda device: False)
    assert faster_precision(pytest.fail, CPU) == ("float32", "this CPU has no native bf16")


def test_a_failing_compiler_is_loud_and_training_goes_on(monkeypatch):
    def broken(model):
        def run(x):
            model(x)  # as far as the forward pass
            raise RuntimeError("no C++ compiler\nand a long story")

        return run

    monkeypatch.setattr(torch, "compile", broken)
    said, model = [], nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    state = torch.get_rng_state()
    assert compile_model(model, "on", lambda forward: forward(torch.ones(1, 2)), said.append) is model
    assert said == ["torch.compile failed; training continues without it, more slowly: no C++ compiler"]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(weight.grad is None for weight in model.parameters())


def test_a_rehearsal_leaves_no_trace(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model: lambda x: model(x))
    model, state = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), torch.get_rng_state()
    fast = compile_model(model, "on", lambda forward: forward(torch.ones(1, 2)), pytest.fail)
    assert fast is not model
    assert torch.equal(torch.get_rng_state(), state)
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto compiles on a GPU")
@pytest.mark.parametrize("choice", ["off", "auto"])
def test_nothing_is_compiled_unasked(choice):
    model = nn.Linear(2, 2)
    assert compile_model(model, choice, pytest.fail, pytest.fail) is model


@pytest.mark.skipif("CLEARHEAD_TEST_PROCESSOR" not in os.environ, reason="no other processor is imitated")
def test_the_guard_of_the_other_processor_it_is_imitated():
    has = os.environ["CLEARHEAD_TEST_PROCESSOR"] == "bf16"
    assert context.has_bf16(CPU) == has
    assert has or torch.backends.cpu.get_cpu_capability() == "AVX2"
