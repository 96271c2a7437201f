"""Inside the block every attention of the model is handed over; before, after and beside it, nothing is."""

import torch
import torch.nn.functional as F
from torch import nn

from clearhead.insight.capture import captured, unannounced


def test_only_calls_inside_the_model_count(written):
    model, other, x = written.ByHand(), written.OneHead(), written.tokens()
    addresses = []

    def receive(address, call, kernel, note):
        addresses.append((address, kernel, note))
        return call.raw_out

    with captured(model, receive):
        other(x)
        F.scaled_dot_product_attention(x, x, x)
        model(x)
    model(x)
    assert addresses == [("ByHand", "softmax", "")]


def test_the_model_gets_what_the_receiver_returns(written):
    model, x = written.ByHand(), written.tokens()
    with captured(model, lambda address, call, kernel, note: torch.zeros_like(call.raw_out)):
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
    same = unannounced(F.multi_head_attention_forward)(*args, need_weights=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, same, strict=True))
