"""What does not fit is refused in one line: the rule, what came, the next step. Checked where a user meets it."""

import math

import pytest
import torch

from clearhead.nn import masks
from clearhead.nn.attention import MultiHeadAttention, SingleHeadAttention, attend_fused, attend_reference

BOTH = pytest.mark.parametrize("attend", [attend_reference, attend_fused])


def qkv():
    return torch.randn(2, 1, 3, 2), torch.randn(2, 1, 4, 2), torch.randn(2, 1, 4, 2)


@BOTH
def test_queries_and_keys_of_different_widths(attend):
    q, _, v = qkv()
    with pytest.raises(ValueError, match="queries and keys must have the same width, got 2 and 5"):
        attend(q, torch.randn(2, 1, 4, 5), v)


@BOTH
def test_keys_and_values_of_different_counts(attend):
    q, k, v = qkv()
    with pytest.raises(ValueError, match="one value for each key, got 4 keys and 3 values"):
        attend(q, k, v[:, :, :3])


@BOTH
@pytest.mark.parametrize("shape", [(4, 3), (3, 3), (2, 4), (2, 2, 3, 4), (3, 1, 3, 4), (1, 2, 1, 3, 4)])
def test_a_mask_of_the_wrong_shape(attend, shape):
    with pytest.raises(ValueError, match=r"must broadcast to the scores \(B,H,Q,K\) = \(2, 1, 3, 4\), got") as error:
        attend(*qkv(), torch.ones(shape, dtype=torch.bool))
    assert str(shape) in str(error.value)


@BOTH
@pytest.mark.parametrize("shape", [(), (4,), (1, 4), (3, 1), (3, 4), (2, 1, 1, 4), (1, 1, 3, 4), (2, 1, 3, 4)])
def test_a_mask_of_any_shape_that_broadcasts(attend, shape):
    q, k, v = qkv()
    mask = torch.rand(shape) > 0.5
    came, expected = attend(q, k, v, mask), attend(q, k, v, mask.expand(2, 1, 3, 4))
    torch.testing.assert_close(came, expected)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.long])
def test_a_mask_that_is_not_bool(attend, dtype):
    with pytest.raises(ValueError, match=rf"must be bool with True = may attend, got {dtype}; masks.from_additive"):
        attend(*qkv(), torch.ones(3, 4, dtype=dtype))


@BOTH
def test_a_causal_mask_of_another_length(attend):
    with pytest.raises(ValueError, match=r"must broadcast to the scores .* got \(5, 5\)"):
        attend(*qkv(), masks.causal(5))


@BOTH
def test_a_beta_that_is_no_number(attend):
    with pytest.raises(ValueError, match="beta must be a number, got nan"):
        attend(*qkv(), None, float("nan"))


def test_tokens_of_another_width():
    attention = MultiHeadAttention(8, 2, key_input_width=6, value_input_width=4)
    x, keys, values = torch.randn(1, 3, 8), torch.randn(1, 5, 6), torch.randn(1, 5, 4)
    attention(x, keys, values)
    with pytest.raises(ValueError, match=r"last dimension of x must be 8, got shape \(1, 3, 7\)"):
        attention(x[..., :7], keys, values)
    with pytest.raises(ValueError, match=r"last dimension of keys must be 6, got shape \(1, 5, 4\)"):
        attention(x, values, values)
    with pytest.raises(ValueError, match=r"last dimension of values must be 4, got shape \(1, 5, 6\)"):
        attention(x, keys)


def test_modules_pass_the_refusal_on():
    x = torch.randn(1, 3, 8)
    for attention in (MultiHeadAttention(8, 2), SingleHeadAttention(8, 4, 4)):
        with pytest.raises(ValueError, match="one value for each key, got 3 keys and 2 values"):
            attention(x, x, x[:, :2])
        with pytest.raises(ValueError, match="a mask must broadcast"):
            attention(x, mask=masks.causal(4))


@pytest.mark.parametrize("attend", [attend_reference, attend_fused])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"mask": torch.ones(5, 5, dtype=torch.bool, device="meta")},
            "mask must be on the device of the queries",
        ),
        ({"logit_bias": torch.ones(5, 5, device="meta")}, "logit_bias must be on the device of the queries"),
        ({"logit_bias": torch.ones(5, 5, dtype=torch.bool)}, "logit_bias must be floating point"),
        ({"logit_bias": torch.ones(4, 5)}, "broadcast to the scores"),
        ({"k": torch.ones(1, 1, 5, 4, dtype=torch.float64)}, "of one floating-point dtype and device, got keys"),
        ({"k": torch.ones(2, 1, 5, 4)}, "must have the same batch and heads"),
        ({"q": torch.ones(4)}, "got queries torch.float32 of shape"),
        ({"q": torch.ones(1, 1, 5, 0), "k": torch.ones(1, 1, 5, 0)}, "of shape"),
        ({"beta": math.nan}, "beta must be a number, got nan"),
    ],
)
def test_what_does_not_go_together_is_refused(attend, change, message):
    fitting = {name: torch.ones(1, 1, 5, 4) for name in "qkv"}
    with pytest.raises(ValueError, match=message):
        attend(**{**fitting, **change})


def test_angles_are_for_self_attention():
    x = torch.ones(1, 3, 4)
    with pytest.raises(ValueError, match="rotary_angles are for self-attention"):
        MultiHeadAttention(4, 1)(x, x, rotary_angles=torch.ones(3, 2))
