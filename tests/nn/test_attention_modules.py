"""SingleHeadAttention and MultiHeadAttention: shapes, heads written out one by one, and the key/value cache."""

import math

import pytest
import torch

from clearhead.nn import masks
from clearhead.nn.attention import MultiHeadAttention, SingleHeadAttention, attend_reference
from clearhead.nn.cache import KeyValues


def test_single_head_has_separate_key_and_value_widths():
    """R0.1: 5 tokens of width 256, query and key width 64, value width 256."""
    attention = SingleHeadAttention(256, 64, 256)
    assert attention.query.weight.shape == attention.key.weight.shape == (64, 256)
    assert attention.value.weight.shape == (256, 256)
    assert attention(torch.randn(1, 5, 256)).shape == (1, 5, 256)
    assert SingleHeadAttention(256, 64, 96)(torch.randn(1, 5, 256), torch.randn(1, 7, 256)).shape == (1, 5, 96)


def test_single_head_is_its_formula():
    attention = SingleHeadAttention(6, 4, 3).double()
    x, keys, values = (torch.randn(2, n, 6, dtype=torch.float64) for n in (3, 5, 5))
    scores = attention.query(x) @ attention.key(keys).mT / 2
    mask = masks.padding(torch.tensor([5, 2]))
    weights = torch.softmax(scores.masked_fill(~mask[:, 0], -math.inf), -1)
    torch.testing.assert_close(attention(x, keys, values, mask=mask), weights @ attention.value(values))
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


def test_multi_head_equals_its_heads_computed_one_by_one_and_joined():
    width, n_heads = 12, 3
    many = MultiHeadAttention(width, n_heads).double()
    for linear in (many.query, many.key, many.value, many.output):
        torch.nn.init.normal_(linear.bias)
    x, keys, values = (torch.randn(2, n, width, dtype=torch.float64) for n in (4, 5, 5))
    joined = []
    for h in range(n_heads):
        one = SingleHeadAttention(width, 4, 4).double()
        rows = slice(4 * h, 4 * h + 4)
        for name in ("query", "key", "value"):
            whole, part = getattr(many, name), getattr(one, name)
            part.load_state_dict({"weight": whole.weight[rows], "bias": whole.bias[rows]})
        joined.append(one(x, keys, values))
    torch.testing.assert_close(many(x, keys, values), many.output(torch.cat(joined, -1)))


@pytest.mark.parametrize(
    "mask",
    [None, masks.causal(5), masks.padding(torch.tensor([0, 3]), 5), masks.window(5, 1)],
    ids=["none", "causal", "padding", "window"],
)
def test_multi_head_gives_the_same_with_the_formula_as_with_the_kernel(mask):
    fast = MultiHeadAttention(12, 3)
    slow = MultiHeadAttention(12, 3, attend=attend_reference)
    slow.load_state_dict(fast.state_dict())
    x = torch.randn(2, 5, 12)
    expected, came = slow(x, mask=mask), fast(x, mask=mask)
    torch.testing.assert_close(came, expected)
    expected.square().sum().backward()
    came.square().sum().backward()
    for name, parameter in slow.named_parameters():
        torch.testing.assert_close(fast.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-5)


def test_multi_head_takes_keys_and_values_of_other_widths():
    attention = MultiHeadAttention(8, 2, key_input_width=5, value_input_width=3)
    x, keys, values = torch.randn(2, 4, 8), torch.randn(2, 6, 5), torch.randn(2, 6, 3)
    assert attention(x, keys, values).shape == (2, 4, 8)
    assert (attention.key.in_features, attention.value.in_features) == (5, 3)


def test_keys_default_to_x_and_values_to_keys():
    attention = MultiHeadAttention(8, 2)
    x, other = torch.randn(2, 4, 8), torch.randn(2, 6, 8)
    torch.testing.assert_close(attention(x), attention(x, x, x))
    torch.testing.assert_close(attention(x, other), attention(x, other, other))
    assert not torch.allclose(attention(x, other), attention(x, other, other.flip(1)))


def test_a_single_sequence_needs_no_batch():
    x, memory = torch.randn(1, 5, 8), torch.randn(1, 3, 8)
    for attention in (MultiHeadAttention(8, 2), SingleHeadAttention(8, 4, 6)):
        torch.testing.assert_close(attention(x[0], mask=masks.causal(5)), attention(x, mask=masks.causal(5))[0])
        torch.testing.assert_close(attention(x[0], memory[0]), attention(x, memory)[0])


def test_multi_head_self_attention_is_permutation_equivariant():
    """R2.6, without positions."""
    attention = MultiHeadAttention(12, 3)
    x, order = torch.randn(2, 5, 12), torch.randperm(5)
    torch.testing.assert_close(attention(x[:, order]), attention(x)[:, order])
    assert not torch.allclose(attention(x[:, order]), attention(x), atol=1e-2)


@pytest.mark.parametrize("beta", [math.inf, -math.inf, 0.0])
def test_multi_head_works_at_the_limits_of_beta(beta):
    attention = MultiHeadAttention(8, 2, output_projection=False, beta=beta).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    q, k, v = (linear(x).unflatten(-1, (2, 4)) for linear in (attention.query, attention.key, attention.value))
    expected = torch.empty_like(v)
    for b in range(2):
        for h in range(2):
            scores = q[b, :, h] @ k[b, :, h].T
            chosen = scores.argmax(-1) if beta > 0 else scores.argmin(-1)
            expected[b, :, h] = v[b, chosen, h] if beta else v[b, :, h].mean(0)
    torch.testing.assert_close(attention(x), expected.flatten(-2))
    attention(x).sum().backward()
    assert attention.value.weight.grad.isfinite().all()


def test_dropout_acts_in_training_alone():
    attention = MultiHeadAttention(8, 2, dropout=0.5)
    x = torch.randn(2, 5, 8)
    assert not torch.equal(attention(x), attention(x))
    attention.eval()
    assert torch.equal(attention(x), attention(x))


@pytest.mark.parametrize("steps", [[1, 1, 1, 1, 1, 1], [3, 1, 1, 1], [2, 4]])
def test_with_a_cache_the_last_tokens_alone_give_what_all_give(steps):
    attention = MultiHeadAttention(8, 2).double()
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    cache, parts, end = KeyValues(), [], 0
    with torch.no_grad():
        for new in steps:
            end += new
            parts.append(attention(x[:, end - new : end], mask=masks.causal(new, end), cache=cache))
        whole = attention(x, mask=masks.causal(6))
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_a_cached_memory_is_projected_once_and_answers_as_an_uncached_one():
    attention = MultiHeadAttention(8, 2, key_input_width=5, value_input_width=5)
    projected = []
    attention.key.register_forward_hook(lambda *_: projected.append(1))
    x, memory = torch.randn(2, 4, 8), torch.randn(2, 6, 5)
    mask = masks.padding(torch.tensor([3, 6]))
    whole = attention(x, memory, mask=mask)
    cache = KeyValues()
    parts = [attention(x[:, i : i + 1], memory, mask=mask, cache=cache) for i in range(4)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    assert len(projected) == 2, "once for the whole, once for all four steps"
