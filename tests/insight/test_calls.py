"""The parts of a call that are asked for are those of the whole."""

import torch

from clearhead.insight.calls import SDPACall, of_heads, repeated


def test_heads_of_a_group_share_their_keys():
    x = torch.randn(2, 2, 3, 4)
    assert torch.equal(of_heads(x, [0, 1, 2, 3], 4), repeated(x, 4))
    assert torch.equal(of_heads(x, [3], 4), x[:, 1:])
    assert of_heads(x, [3], 4).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert of_heads(x, [0, 1], 2) is x
    assert repeated(x, 2) is x


def test_half_precision_is_summed_in_float32():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 4, 64).bfloat16()
    call = SDPACall(q, k, v, None, 0.0, False, 0.125, v)
    exact = (0.125 * q.double() @ k.double().mT).softmax(-1)
    weights = call.weights([0, 1], slice(None))
    assert weights.dtype == torch.bfloat16
    torch.testing.assert_close(weights.double(), exact, rtol=2**-8, atol=1e-3)


def test_replaced_heads_keep_the_memory_layout_of_the_output():
    """A model may go on with a view that needs it."""
    out = torch.randn(2, 4, 3, 5).transpose(1, 2)
    call = SDPACall(out, out, out, None, 0.0, False, 1.0, out)
    new = call.with_replaced([2], torch.zeros(2, 1, 4, 5))
    assert new.stride() == out.stride()
    assert new[:, 2].count_nonzero() == 0
    assert torch.equal(new[:, :2], out[:, :2])
    assert out[:, 2].count_nonzero() > 0
