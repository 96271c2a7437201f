"""Inside the block every attention of the model is handed over; before, after and beside it, nothing is."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clearhead.insight.capture import captured, without_dispatch
from clearhead.insight.look import look


def test_only_calls_inside_the_model_count(written):
    model, other, x = written.ByHand(), written.OneHead(), written.tokens()
    names = []

    def receive(name, call, kernel, note):
        names.append((name, kernel, note))
        return call.raw_out

    with captured(model, receive):
        other(x)
        F.scaled_dot_product_attention(x, x, x)
        model(x)
    model(x)
    assert names == [("ByHand", "softmax", "")]


def test_the_model_gets_what_the_receiver_returns(written):
    model, x = written.ByHand(), written.tokens()
    with captured(model, lambda name, call, kernel, note: torch.zeros_like(call.raw_out)):
        torch.testing.assert_close(model(x), model.out.bias.expand(2, 5, 8))


def test_switches_are_as_before(written):
    assert torch.backends.mha.get_fastpath_enabled()
    with captured(written.ByHand(), lambda *call: call[1].raw_out):
        assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mha.get_fastpath_enabled()


def test_unannounced_is_the_same_function():
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


class Named(nn.Module):
    """Arguments by name, as some write them."""

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
def test_arguments_may_be_given_by_name(step):
    model, x = Named(step), torch.randn(2, 5, 4)
    seen = look(model, x)
    assert torch.equal(seen.output, model(x))
    assert seen.verify()["Named"] < 1e-5


@pytest.mark.parametrize(
    "step",
    [
        lambda w, x: F.linear(input=w, weight=torch.eye(5)) @ x,
        lambda w, x: F.layer_norm(input=w, normalized_shape=(5,)) @ x,
    ],
)
def test_what_mixes_the_keys_makes_no_weights_but_does_not_stop_the_model(step):
    with pytest.raises(LookupError, match="no attention was seen in Named"):
        look(Named(step), torch.randn(2, 5, 4))
