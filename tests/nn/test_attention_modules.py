"""SingleHeadAttention and MultiHeadAttention: shapes, heads computed one by one, key/value cache, input errors."""

import math

import pytest
import torch

from clearhead.nn import masks
from clearhead.nn.attention import Linear, MultiHeadAttention, SingleHeadAttention, attend_fused, attend_reference
from clearhead.nn.cache import KVCache


def test_single_head_has_separate_key_and_value_widths():
    """5 tokens of width 256, query and key width 64, value width 256."""
    attention = SingleHeadAttention(256, 64, 256)
    assert attention.q_proj.weight.shape == attention.k_proj.weight.shape == (64, 256)
    assert attention.v_proj.weight.shape == (256, 256)
    assert attention(torch.randn(1, 5, 256)).shape == (1, 5, 256)
    assert SingleHeadAttention(256, 64, 96)(torch.randn(1, 5, 256), torch.randn(1, 7, 256)).shape == (1, 5, 96)


def test_single_head_matches_its_formula():
    attention = SingleHeadAttention(6, 4, 3).double()
    x, keys, values = (torch.randn(2, n, 6, dtype=torch.float64) for n in (3, 5, 5))
    scores = attention.q_proj(x) @ attention.k_proj(keys).mT / 2
    mask = masks.padding(torch.tensor([5, 2]))
    weights = torch.softmax(scores.masked_fill(~mask[:, 0], -math.inf), -1)
    torch.testing.assert_close(attention(x, keys, values, mask=mask), weights @ attention.v_proj(values))
    torch.testing.assert_close(attention(x, keys), attention(x, keys, keys))
    torch.testing.assert_close(attention(x), attention(x, x, x))


def test_single_head_equals_multi_head_of_one_head_without_output_projection():
    one = SingleHeadAttention(8, 8, 8)
    many = MultiHeadAttention(8, 1, output_projection=False)
    many.load_state_dict(one.state_dict())
    x, memory = torch.randn(2, 5, 8), torch.randn(2, 4, 8)
    for mask in (None, masks.causal(5), masks.padding(torch.tensor([2, 5]))):
        torch.testing.assert_close(one(x, mask=mask), many(x, mask=mask))
    torch.testing.assert_close(one(x, memory), many(x, memory))


def test_multi_head_equals_concatenated_single_heads():
    width, num_heads = 12, 3
    many = MultiHeadAttention(width, num_heads).double()
    for linear in (many.q_proj, many.k_proj, many.v_proj, many.out_proj):
        torch.nn.init.normal_(linear.bias)
    x, keys, values = (torch.randn(2, n, width, dtype=torch.float64) for n in (4, 5, 5))
    heads = []
    for h in range(num_heads):
        one = SingleHeadAttention(width, 4, 4).double()
        rows = slice(4 * h, 4 * h + 4)
        for name in ("q_proj", "k_proj", "v_proj"):
            source, target = getattr(many, name), getattr(one, name)
            target.load_state_dict({"weight": source.weight[rows], "bias": source.bias[rows]})
        heads.append(one(x, keys, values))
    torch.testing.assert_close(many(x, keys, values), many.out_proj(torch.cat(heads, -1)))


@pytest.mark.parametrize(
    "mask",
    [None, masks.causal(5), masks.padding(torch.tensor([0, 3]), 5), masks.window(5, 1)],
    ids=["none", "causal", "padding", "window"],
)
def test_multi_head_with_attend_fused_equals_attend_reference(mask):
    fast = MultiHeadAttention(12, 3)
    slow = MultiHeadAttention(12, 3, attend=attend_reference)
    slow.load_state_dict(fast.state_dict())
    x = torch.randn(2, 5, 12)
    expected, actual = slow(x, mask=mask), fast(x, mask=mask)
    torch.testing.assert_close(actual, expected)
    expected.square().sum().backward()
    actual.square().sum().backward()
    for name, parameter in slow.named_parameters():
        torch.testing.assert_close(fast.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-5)


def test_keys_and_values_may_have_other_input_widths():
    attention = MultiHeadAttention(8, 2, key_input_width=5, value_input_width=3)
    x, keys, values = torch.randn(2, 4, 8), torch.randn(2, 6, 5), torch.randn(2, 6, 3)
    assert attention(x, keys, values).shape == (2, 4, 8)
    assert (attention.k_proj.in_features, attention.v_proj.in_features) == (5, 3)


def test_keys_default_to_x_and_values_to_keys():
    attention = MultiHeadAttention(8, 2)
    x, other = torch.randn(2, 4, 8), torch.randn(2, 6, 8)
    torch.testing.assert_close(attention(x), attention(x, x, x))
    torch.testing.assert_close(attention(x, other), attention(x, other, other))
    assert not torch.allclose(attention(x, other), attention(x, other, other.flip(1)))


def test_unbatched_input_is_supported():
    x, memory = torch.randn(1, 5, 8), torch.randn(1, 3, 8)
    for attention in (MultiHeadAttention(8, 2), SingleHeadAttention(8, 4, 6)):
        torch.testing.assert_close(attention(x[0], mask=masks.causal(5)), attention(x, mask=masks.causal(5))[0])
        torch.testing.assert_close(attention(x[0], memory[0]), attention(x, memory)[0])


def test_multi_head_self_attention_is_permutation_equivariant():
    """Without positional encoding."""
    attention = MultiHeadAttention(12, 3)
    x, order = torch.randn(2, 5, 12), torch.randperm(5)
    torch.testing.assert_close(attention(x[:, order]), attention(x)[:, order])
    assert not torch.allclose(attention(x[:, order]), attention(x), atol=1e-2)


@pytest.mark.parametrize("beta", [math.inf, -math.inf, 0.0])
def test_multi_head_matches_its_formula_at_the_limits_of_beta(beta):
    attention = MultiHeadAttention(8, 2, output_projection=False, beta=beta).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    q, k, v = (linear(x).unflatten(-1, (2, 4)) for linear in (attention.q_proj, attention.k_proj, attention.v_proj))
    expected = torch.empty_like(v)
    for b in range(2):
        for h in range(2):
            scores = q[b, :, h] @ k[b, :, h].T
            chosen = scores.argmax(-1) if beta > 0 else scores.argmin(-1)
            expected[b, :, h] = v[b, chosen, h] if beta else v[b, :, h].mean(0)
    torch.testing.assert_close(attention(x), expected.flatten(-2))
    attention(x).sum().backward()
    assert attention.v_proj.weight.grad.isfinite().all()


def test_dropout_is_active_only_in_training_mode():
    attention = MultiHeadAttention(8, 2, dropout=0.5)
    x = torch.randn(2, 5, 8)
    assert not torch.equal(attention(x), attention(x))
    attention.eval()
    assert torch.equal(attention(x), attention(x))


@pytest.mark.parametrize("steps", [[1, 1, 1, 1, 1, 1], [3, 1, 1, 1], [2, 4]])
def test_cached_steps_equal_the_full_forward_pass(steps):
    attention = MultiHeadAttention(8, 2).double()
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    cache, parts, end = KVCache(), [], 0
    with torch.no_grad():
        for new in steps:
            end += new
            parts.append(attention(x[:, end - new : end], mask=masks.causal(new, end), cache=cache))
        full = attention(x, mask=masks.causal(6))
    torch.testing.assert_close(torch.cat(parts, 1), full)


def test_cached_cross_attention_projects_the_memory_once_and_equals_uncached():
    attention = MultiHeadAttention(8, 2, key_input_width=5, value_input_width=5)
    projected = []
    attention.k_proj.register_forward_hook(lambda *_: projected.append(1))
    x, memory = torch.randn(2, 4, 8), torch.randn(2, 6, 5)
    mask = masks.padding(torch.tensor([3, 6]))
    full = attention(x, memory, mask=mask)
    cache = KVCache()
    parts = [attention(x[:, i : i + 1], memory, mask=mask, cache=cache) for i in range(4)]
    torch.testing.assert_close(torch.cat(parts, 1), full)
    assert len(projected) == 2, "once for the full pass, once for all four steps"


def test_input_width_sets_the_projection_input_size():
    """Queries, keys and values are projected from input_width; heads, out_proj and output have the module's width."""
    attention, x = MultiHeadAttention(8, 2, input_width=5).double(), torch.randn(2, 4, 5, dtype=torch.float64)
    assert attention.q_proj.weight.shape == attention.k_proj.weight.shape == attention.v_proj.weight.shape == (8, 5)
    assert attention.out_proj.weight.shape == (8, 8)
    q, k, v = (attention.split_heads(layer(x)) for layer in (attention.q_proj, attention.k_proj, attention.v_proj))
    expected = attention.out_proj(attend_reference(q, k, v)[0].transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), expected)
    with pytest.raises(ValueError, match=r"last dimension of x must be 5, got shape \(2, 4, 8\)"):
        attention(torch.randn(2, 4, 8, dtype=torch.float64))


def test_query_key_and_value_input_widths_are_independent():
    attention = MultiHeadAttention(8, 2, input_width=5, key_input_width=3)
    assert [attention.get_submodule(name).in_features for name in ("q_proj", "k_proj", "v_proj")] == [5, 3, 5]
    attention = MultiHeadAttention(8, 2, input_width=5, key_input_width=3, value_input_width=4)
    x, keys, values = torch.randn(2, 4, 5), torch.randn(2, 6, 3), torch.randn(2, 6, 4)
    assert attention(x, keys, values).shape == (2, 4, 8)


@pytest.mark.parametrize("width", [0, -1, 2.5, True])
def test_input_width_must_be_a_positive_integer(width):
    with pytest.raises(ValueError, match=f"input_width must be a positive integer, got {width}"):
        MultiHeadAttention(8, 2, input_width=width)


@pytest.mark.parametrize("beta", [None, 3.0, math.inf])
@pytest.mark.parametrize(
    "mask",
    [None, masks.causal(5), masks.padding(torch.tensor([0, 3]), 5)],
    ids=["none", "causal", "padding"],
)
def test_return_weights_keeps_the_fused_output_and_gradients(mask, beta):
    attention = MultiHeadAttention(12, 3, input_width=7, beta=beta).double()
    x = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    fused, (out, weights) = attention(x, mask=mask), attention(x, mask=mask, return_weights=True)
    torch.testing.assert_close(out, fused)
    inputs = [x, *attention.parameters()]
    gradients = (torch.autograd.grad(y.square().sum(), inputs, allow_unused=True) for y in (out, fused))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    assert weights.shape == (2, 3, 5, 5)
    visible = torch.ones(2, 3, 5, 5, dtype=torch.bool) if mask is None else masks.dense(mask).expand(2, 3, 5, 5)
    assert (weights[~visible] == 0).all()
    torch.testing.assert_close(weights.sum(-1), visible.any(-1).double())
    values = attention.split_heads(attention.v_proj(x))
    torch.testing.assert_close(attention.out_proj((weights @ values).transpose(1, 2).flatten(2)), out)


def test_return_weights_works_for_cross_attention_and_with_a_cache():
    attention, x, memory = MultiHeadAttention(8, 2), torch.randn(2, 4, 8), torch.randn(2, 6, 8)
    out, weights = attention(x, memory, return_weights=True)
    torch.testing.assert_close(out, attention(x, memory))
    assert weights.shape == (2, 2, 4, 6)
    cache, (_, full) = KVCache(), attention(x, mask=masks.causal(4), return_weights=True)
    with torch.no_grad():
        attention(x[:, :3], mask=masks.causal(3), cache=cache)
        _, last = attention(x[:, 3:], mask=masks.causal(1, 4), cache=cache, return_weights=True)
    torch.testing.assert_close(last, full[:, :, 3:])


def test_returned_weights_are_those_before_dropout():
    attention, x = MultiHeadAttention(8, 2, dropout=0.5), torch.randn(2, 5, 8)
    out, weights = attention(x, return_weights=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 5))
    assert not torch.allclose(out, attention.eval()(x)), "dropout applies to the output"


def test_return_weights_raises_if_attend_returns_none():
    attention = MultiHeadAttention(8, 2, attend=lambda q, k, v, *_, **__: v)
    with pytest.raises(ValueError, match=r"needs an attend function that returns \(output, weights\), got .*lambda"):
        attention(torch.randn(2, 5, 8), return_weights=True)


def test_return_weights_uses_a_custom_attend_function():
    def first_key_only(q, k, v, mask=None, beta=None, *, logit_bias=None, dropout=0.0):
        weights = torch.zeros(*q.shape[:-1], k.shape[-2])
        weights[..., 0] = 1
        return weights @ v, weights

    out, weights = MultiHeadAttention(8, 2, attend=first_key_only)(torch.randn(2, 5, 8), return_weights=True)
    assert (weights[..., 0] == 1).all()
    torch.testing.assert_close(out, out[:, :1].expand_as(out))


def test_linear_is_initialized_xavier_uniform_with_zero_bias():
    linear = Linear(30, 50)
    bound = math.sqrt(6 / (30 + 50))
    assert linear.weight.shape == (50, 30)
    assert 0.95 * bound < linear.weight.abs().max() <= bound
    assert (linear.bias == 0).all()
    assert Linear(3, 5, bias=False).bias is None


def test_a_square_linear_preserves_variance_forward_and_backward():
    linear = Linear(256, 256)
    x = torch.randn(500, 256, requires_grad=True)
    out = linear(x)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    assert abs(out.var() - 1) < 0.05
    assert abs(x.grad.var() - 1) < 0.05


EVERY_ATTEND = pytest.mark.parametrize("attend", [attend_reference, attend_fused])


def qkv():
    return torch.randn(2, 1, 3, 2), torch.randn(2, 1, 4, 2), torch.randn(2, 1, 4, 2)


@EVERY_ATTEND
def test_mismatched_query_and_key_widths_raise(attend):
    q, _, v = qkv()
    with pytest.raises(ValueError, match="queries and keys must have the same width, got 2 and 5"):
        attend(q, torch.randn(2, 1, 4, 5), v)


@EVERY_ATTEND
def test_mismatched_key_and_value_counts_raise(attend):
    q, k, v = qkv()
    with pytest.raises(ValueError, match="one value for each key, got 4 keys and 3 values"):
        attend(q, k, v[:, :, :3])


@EVERY_ATTEND
@pytest.mark.parametrize("shape", [(4, 3), (3, 3), (2, 4), (2, 2, 3, 4), (3, 1, 3, 4), (1, 2, 1, 3, 4)])
def test_a_mask_that_does_not_broadcast_raises(attend, shape):
    with pytest.raises(ValueError, match=r"must broadcast to the scores \(B,H,Q,K\) = \(2, 1, 3, 4\), got") as error:
        attend(*qkv(), torch.ones(shape, dtype=torch.bool))
    assert str(shape) in str(error.value)


@EVERY_ATTEND
@pytest.mark.parametrize("shape", [(), (4,), (1, 4), (3, 1), (3, 4), (2, 1, 1, 4), (1, 1, 3, 4), (2, 1, 3, 4)])
def test_a_mask_of_any_broadcastable_shape_is_accepted(attend, shape):
    q, k, v = qkv()
    mask = torch.rand(shape) > 0.5
    actual, expected = attend(q, k, v, mask), attend(q, k, v, mask.expand(2, 1, 3, 4))
    torch.testing.assert_close(actual, expected)


@EVERY_ATTEND
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.long])
def test_a_mask_that_is_not_bool_raises(attend, dtype):
    with pytest.raises(ValueError, match=rf"must be bool with True = may attend, got {dtype}; masks.from_additive"):
        attend(*qkv(), torch.ones(3, 4, dtype=dtype))


@EVERY_ATTEND
def test_a_causal_mask_of_another_length_raises(attend):
    with pytest.raises(ValueError, match=r"must broadcast to the scores .* got \(5, 5\)"):
        attend(*qkv(), masks.causal(5))


@EVERY_ATTEND
def test_nan_beta_raises(attend):
    with pytest.raises(ValueError, match="beta must be a number, got nan"):
        attend(*qkv(), None, float("nan"))


def test_inputs_of_another_width_raise():
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


@EVERY_ATTEND
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
def test_incompatible_arguments_raise(attend, change, message):
    valid = {name: torch.ones(1, 1, 5, 4) for name in "qkv"}
    with pytest.raises(ValueError, match=message):
        attend(**{**valid, **change})


def test_rotary_angles_with_cross_attention_raise():
    x = torch.ones(1, 3, 4)
    with pytest.raises(ValueError, match="rotary_angles are for self-attention"):
        MultiHeadAttention(4, 1)(x, x, rotary_angles=torch.ones(3, 2))
