"""capture_attention reports every attention call of the model inside its context, and no other."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clearhead.insight.capture import capture_attention, module_named, module_names, unknown_name
from clearhead.insight.trace import look


def test_only_calls_inside_the_model_are_captured(models):
    model, other, x = models.ManualAttention(), models.SingleHead(), models.tokens()
    names = []

    def receive(name, call, kernel, note):
        names.append((name, kernel, note))
        return call.raw_out

    with capture_attention(model, receive):
        other(x)
        F.scaled_dot_product_attention(x, x, x)
        model(x)
    model(x)
    assert names == [("ManualAttention", "softmax", "")]


def test_the_value_returned_by_the_receiver_replaces_the_output(models):
    model, x = models.ManualAttention(), models.tokens()
    with capture_attention(model, lambda name, call, kernel, note: torch.zeros_like(call.raw_out)):
        torch.testing.assert_close(model(x), model.out.bias.expand(2, 5, 8))


def test_the_fast_path_setting_is_restored(models):
    assert torch.backends.mha.get_fastpath_enabled()
    with capture_attention(models.ManualAttention(), lambda *call: call[1].raw_out):
        assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mha.get_fastpath_enabled()


class Recovers(nn.Module):
    """Continues after its attention has raised."""

    def __init__(self, attention, linear):
        super().__init__()
        self.attention, self.linear = attention, linear

    def forward(self, x):
        try:
            self.attention(x[..., :1])
        except RuntimeError:
            x = (x @ x.mT).softmax(-1) @ x
        return (x @ x.mT).softmax(-1) @ x


def test_call_numbers_restart_in_each_pass_and_after_an_exception(models):
    names = []

    def receive(name, call, kernel, note):
        names.append(name)
        return call.raw_out

    model = Recovers(models.ManualAttention(), nn.Linear(2, 2))
    with capture_attention(model, receive):
        model(models.tokens())
        model(models.tokens())
    assert names == ["Recovers", "Recovers#2"] * 2


def test_a_compiled_model_has_the_module_names_of_the_original():
    model = nn.Sequential(nn.Linear(2, 2))
    assert module_names(torch.compile(model, backend="eager"))[1:] == ["Sequential", "0"]


def test_the_error_for_an_unknown_name_suggests_the_closest_and_lists_all():
    message = str(unknown_name("blocks.1.atn", ["blocks.0.attn", "blocks.1.attn"]))
    assert message.startswith("no attention named 'blocks.1.atn'; did you mean 'blocks.1.attn'?")
    assert message.endswith(" blocks.0.attn, blocks.1.attn")
    assert "did you mean" not in str(unknown_name("x", ["blocks"]))
    assert str(unknown_name("x", [f"layer {i}" for i in range(70)])).endswith("layer 59 and 10 more")


class Named(nn.Module):
    """Attention whose last step is a parameter."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def forward(self, x):
        return self.step((x @ x.mT).softmax(-1), x)


NAMED = {
    "matmul": lambda w, x: torch.matmul(input=w, other=x),
    "bmm": lambda w, x: torch.bmm(input=w, mat2=x),
    "second argument": lambda w, x: w.bmm(mat2=x),
    "conv2d": lambda w, x: F.conv2d(input=w[:, None], weight=torch.ones(1, 1, 1, 1))[:, 0] @ x,
    "linear, of the queries": lambda w, x: F.linear(input=w.mT, weight=torch.eye(5)).mT @ x,
}


@pytest.mark.parametrize("step", NAMED.values(), ids=NAMED)
def test_keyword_arguments_are_supported(step):
    model, x = Named(step), torch.randn(2, 5, 4)
    trace = look(model, x)
    assert torch.equal(trace.output, model(x))
    assert trace.verify()["Named"] < 1e-5


@pytest.mark.parametrize(
    "step",
    [
        lambda w, x: F.linear(input=w, weight=torch.eye(5)) @ x,
        lambda w, x: F.layer_norm(input=w, normalized_shape=(5,)) @ x,
    ],
)
def test_operations_that_mix_keys_end_the_tracking(step):
    with pytest.raises(LookupError, match="no attention was found in Named"):
        look(Named(step), torch.randn(2, 5, 4))


def test_a_recorded_name_leads_to_its_module():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            x = self.layer(x, x, x)[0] + self.layer(x, x, x)[0]
            return F.scaled_dot_product_attention(x, x, x)

    model = Root()
    names = look(model, torch.randn(1, 3, 4)).names
    assert [module_named(model, name) for name in names] == [model.layer, model.layer, model]
