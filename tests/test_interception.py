"""Selected torch functions reach the handler, and ModuleStack tracks the running modules."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clearhead.interception import Intercept, ModuleStack, argument, intercept, is_compiled, without_dispatch


def test_only_selected_functions_reach_the_handler():
    calls = []

    def handle(name, func, args, kwargs):
        calls.append(name)
        return func(*args, **kwargs)

    x = torch.ones(2, 3)
    with Intercept(handle, {"relu", "mT", "matmul"}):
        torch.matmul(F.relu(x), other=x.mT)
        F.gelu(x.transpose(0, 1))
    F.relu(x)
    assert calls == ["relu", "mT", "matmul"]


def test_a_handler_replaces_the_result_without_recursion():
    def handle(name, func, args, kwargs):
        return torch.relu(args[0]) + 1

    with Intercept(handle, {"relu"}):
        assert torch.equal(torch.relu(torch.tensor([-1.0, 2.0])), torch.tensor([1.0, 3.0]))


def test_arguments_are_found_by_position_and_by_name():
    assert argument((1, 2), {}, 1, "other") == 2
    assert argument((1,), {"mat2": 3}, 1, "other", "mat2") == 3
    assert argument((), {}, 0, "input") is None
    assert argument((), {}, 0, "p", default=0.5) == 0.5


class Fails(nn.Module):
    def forward(self, x):
        raise RuntimeError


class Recovers(nn.Module):
    """Continues after one of its modules has failed."""

    def __init__(self, on_failure):
        super().__init__()
        self.fails, self.linear, self.on_failure = Fails(), nn.Linear(2, 2), on_failure

    def forward(self, x):
        try:
            self.fails(x)
        except RuntimeError:
            self.on_failure()
        return self.linear(x)


def test_modules_leave_the_stack_even_when_they_raise():
    paths = []
    model = Recovers(lambda: paths.append([module.path for module in stack.running]))
    stack = ModuleStack(model)
    with stack.tracking():
        model(torch.ones(2))
        model(torch.ones(2))
    assert paths == [[""], [""]]
    assert not stack.running
    assert stack.num_passes == 2


def test_modules_are_reported_when_entered_and_left():
    events = []
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    stack = ModuleStack(
        model,
        on_enter=lambda module, args, kwargs: events.append(("enter", module.path, tuple(args[0].shape))),
        on_exit=lambda module, output: events.append(("exit", module.path, tuple(output.shape))),
    )
    with stack.tracking():
        model(torch.ones(4, 2))
    assert events == [
        ("enter", "", (4, 2)),
        ("enter", "0", (4, 2)),
        ("exit", "0", (4, 3)),
        ("enter", "1", (4, 3)),
        ("exit", "1", (4, 3)),
        ("exit", "", (4, 3)),
    ]


def test_modules_are_restored_including_custom_forward_attributes():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    custom_forward = model[1].forward = lambda x: x + 1
    before = [dict(vars(module)) for module in model.modules()]

    def fail_inside():
        with ModuleStack(model).tracking():
            assert all("forward" in vars(module) for module in model.modules())
            assert inspect.signature(model[0].forward) == inspect.signature(nn.Linear(2, 2).forward)
            assert torch.equal(model[1](torch.ones(2)), torch.full((2,), 2.0))
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert [dict(vars(module)) for module in model.modules()] == before
    assert model[1].forward is custom_forward


def test_the_fast_path_setting_and_function_stack_are_restored():
    model = nn.Linear(2, 2)
    assert torch.backends.mha.get_fastpath_enabled()
    with intercept(ModuleStack(model), lambda name, func, args, kwargs: func(*args, **kwargs)):
        assert not torch.backends.mha.get_fastpath_enabled()
        model(torch.ones(2))
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.overrides._len_torch_function_stack() == 0


def test_compiled_models_are_recognized():
    model = nn.Sequential(nn.Linear(2, 2))
    assert is_compiled(torch.compile(model, backend="eager"))
    assert not is_compiled(model)
    model.compile(backend="eager")
    assert is_compiled(model)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripted_modules_are_skipped():
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2))
    with ModuleStack(model).tracking():
        assert "forward" in vars(model[1])
        assert model(torch.ones(2)).shape == (2,)


def test_without_dispatch_computes_the_same():
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(4, 2), torch.randn(3, 1, 4)
    rest = (
        model.in_proj_weight,
        model.in_proj_bias,
        None,
        None,
        False,
        0.0,
        model.out_proj.weight,
        model.out_proj.bias,
    )
    args = (x, x, x, 4, 2, *rest)
    plain = F.multi_head_attention_forward(*args, need_weights=True)
    same = without_dispatch(F.multi_head_attention_forward)(*args, need_weights=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, same, strict=True))
