"""The name of a call is the path of the innermost module that is running."""

import inspect

import pytest
import torch
from torch import nn

from clearhead.insight.capture import ModuleStack, is_compiled, paths_of, unknown


class Fails(nn.Module):
    def forward(self, x):
        raise RuntimeError


class Forgives(nn.Module):
    """Goes on after a part of it has failed."""

    def __init__(self, note):
        super().__init__()
        self.fails, self.linear, self.note = Fails(), nn.Linear(2, 2), note

    def forward(self, x):
        try:
            self.fails(x)
        except RuntimeError:
            self.note()
        return self.linear(x)


def test_modules_are_left_also_when_they_raise():
    names = []
    model = Forgives(lambda: names.append(stack.next_name()))
    stack = ModuleStack(model)
    with stack.followed():
        model(torch.ones(2))
        model.linear.register_forward_hook(lambda *_: names.append(stack.next_name()))
        model(torch.ones(2))
    assert names == ["Forgives", "Forgives", "Forgives#2"]  # counted anew in each pass
    assert not stack.inside
    assert stack.n_passes == 2


def test_modules_are_as_before_afterwards_also_those_with_a_forward_of_their_own():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    own = model[1].forward = lambda x: x + 1
    before = [dict(vars(module)) for module in model.modules()]

    def fail_inside():
        with ModuleStack(model).followed():
            assert all("forward" in vars(module) for module in model.modules())
            assert inspect.signature(model[0].forward) == inspect.signature(nn.Linear(2, 2).forward)
            assert torch.equal(model[1](torch.ones(2)), torch.full((2,), 2.0))
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert [dict(vars(module)) for module in model.modules()] == before
    assert model[1].forward is own


def test_a_compiled_model_has_the_addresses_of_the_original():
    model = nn.Sequential(nn.Linear(2, 2))
    compiled = torch.compile(model, backend="eager")
    assert is_compiled(compiled)
    assert not is_compiled(model)
    assert paths_of(compiled)[1:] == ["Sequential", "0"]
    model.compile(backend="eager")
    assert is_compiled(model)


def test_an_unknown_address_is_answered_with_the_nearest_and_all():
    assert str(unknown("blocks.1.atn", ["blocks.0.attn", "blocks.1.attn"])) == (
        "no attention at 'blocks.1.atn'; did you mean 'blocks.1.attn'? there is blocks.0.attn, blocks.1.attn"
    )
    assert str(unknown("x", ["blocks"])) == "no attention at 'x'; there is blocks"
    assert str(unknown("x", [f"layer {i}" for i in range(70)])).endswith("layer 59 and 10 more")


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripted_modules_are_passed_over():
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2))
    stack = ModuleStack(model)
    with stack.followed():
        assert "forward" in vars(model[1])
        assert model(torch.ones(2)).shape == (2,)
