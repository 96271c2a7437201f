"""Grouped-query attention (keys and values with fewer heads than queries) and QK-norm."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import clearhead
from clearhead.nn import masks
from clearhead.nn.attention import MultiHeadAttention, RMSNorm, attend_fused, attend_reference
from clearhead.nn.cache import KVCache
from clearhead.nn.positions import rotary_angles

MASKS = {
    "none": lambda B, Q, K: None,
    "causal": lambda B, Q, K: masks.causal(Q, K),
    "padding": lambda B, Q, K: masks.padding(torch.tensor([0, K, K - 1])[:B], K),
    "random": lambda B, Q, K: torch.rand(B, 4, Q, K) > 0.5,
}
"""for B examples and four heads; the padding mask hides all keys of the first example"""


def gradients(attend, inputs, mask, beta, bias, upstream):
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = attend(*inputs, mask, beta, logit_bias=bias)
    out = out[0] if isinstance(out, tuple) else out
    found = torch.autograd.grad(out, inputs, upstream, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True))]


@pytest.mark.parametrize("beta", [0.0, None, 1.0, -1.0, math.inf])
@pytest.mark.parametrize("kind", MASKS)
@given(
    num_kv_heads=st.sampled_from([1, 2, 4]),
    sizes=st.sampled_from([(4, 4), (3, 6), (1, 5)]),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=10, derandomize=True)
def test_fused_and_reference_equal_attention_with_repeated_keys(kind, beta, num_kv_heads, sizes, with_bias, seed):
    """In outputs and gradients: the gradient of a shared head is the sum over the heads of queries that it serves."""
    torch.manual_seed(seed)
    (Q, K), H, B = sizes, 4, 3
    q = torch.randn(B, H, Q, 6, dtype=torch.float64)
    k, v = (torch.randn(B, num_kv_heads, K, D, dtype=torch.float64) for D in (6, 5))
    mask = MASKS[kind](B, Q, K)
    bias = torch.randn(H, Q, K, dtype=torch.float64) if with_bias else None
    upstream = torch.randn(B, H, Q, 5, dtype=torch.float64)

    def repeated(q, k, v, *args, **options):
        k, v = (torch.stack([x[:, head * num_kv_heads // H] for head in range(H)], dim=1) for x in (k, v))
        return attend_reference(q, k, v, *args, **options)

    expected = gradients(repeated, [q, k, v], mask, beta, bias, upstream)
    for attend in (attend_reference, attend_fused):
        for a, b in zip(expected, gradients(attend, [q, k, v], mask, beta, bias, upstream), strict=True):
            torch.testing.assert_close(b, a, rtol=0, atol=1e-10)
    assert attend_reference(q, k, v, mask, beta, logit_bias=bias)[1].shape == (B, H, Q, K)


@pytest.mark.parametrize("attend", [attend_reference, attend_fused])
@pytest.mark.parametrize(
    ("k", "v"),
    [((2, 3, 5, 6), (2, 3, 5, 6)), ((2, 2, 5, 6), (2, 4, 5, 6)), ((2, 8, 5, 6), (2, 8, 5, 6)), ((1, 2, 5, 6),) * 2],
)
def test_heads_that_do_not_divide_the_queries_heads_are_rejected(attend, k, v):
    with pytest.raises(ValueError, match=r"same batch and heads, got \(2, 4\)"):
        attend(torch.ones(2, 4, 5, 6), torch.ones(k), torch.ones(v))


def test_a_batch_is_not_mistaken_for_heads():
    with pytest.raises(ValueError, match=r"same batch and heads, got \(4,\), \(2,\) and \(2,\)"):
        attend_fused(torch.ones(4, 5, 6), torch.ones(2, 5, 6), torch.ones(2, 5, 6))


def module(num_kv_heads=None, **options):
    torch.manual_seed(0)
    return MultiHeadAttention(16, 4, num_kv_heads=num_kv_heads, **options).double()


def tokens(length=5, batch=2):
    return torch.randn(batch, length, 16, dtype=torch.float64)


def test_as_many_kv_heads_as_heads_is_multi_head_attention():
    grouped, plain, x = module(4), module(), tokens()
    assert torch.equal(grouped(x), plain(x))
    assert {name: p.shape for name, p in grouped.named_parameters()} == {
        name: p.shape for name, p in plain.named_parameters()
    }


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_grouped_query_attention_equals_multi_head_attention_with_repeated_weights(num_kv_heads):
    """With one head of keys and values it is multi-query attention: every head reads the same keys."""
    grouped, plain, x = module(num_kv_heads), module(), tokens()
    assert grouped.k_proj.weight.shape == grouped.v_proj.weight.shape == (4 * num_kv_heads, 16)
    state = grouped.state_dict()
    for name in ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"):
        heads = state[name].unflatten(0, (num_kv_heads, 4))
        state[name] = heads.repeat_interleave(4 // num_kv_heads, dim=0).flatten(0, 1)
    plain.load_state_dict(state)
    mask, angles = masks.causal(5), rotary_angles(torch.arange(5), 4)
    came, expected = (attn(x, mask=mask, rotary_angles=angles) for attn in (grouped, plain))
    torch.testing.assert_close(came, expected, rtol=0, atol=1e-12)
    out, weights = grouped(x, mask=mask, rotary_angles=angles, return_weights=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    assert weights.shape == (2, 4, 5, 5)


@pytest.mark.parametrize("qk_norm", [None, RMSNorm])
def test_the_cache_holds_only_the_kv_heads_and_changes_no_output(qk_norm):
    attn, x, cache = module(2, qk_norm=qk_norm), tokens(6), KVCache()
    angles = rotary_angles(torch.arange(6), 4)
    with torch.no_grad():
        expected = attn(x, mask=masks.causal(6), rotary_angles=angles)
        parts = [
            attn(x[:, i : i + 2], mask=masks.causal(2, i + 2), rotary_angles=angles[i : i + 2], cache=cache)
            for i in range(0, 6, 2)
        ]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=0, atol=1e-12)
    k, v = cache.extend(torch.zeros(2, 2, 0, 4).double(), torch.zeros(2, 2, 0, 4).double())
    assert k.shape == v.shape == (2, 2, 6, 4)


def test_look_sees_the_weights_of_every_head():
    attn, x = module(2, qk_norm=RMSNorm).eval(), tokens()
    with torch.no_grad():
        _, expected = attn(x, return_weights=True)
        trace = clearhead.look(attn, x)
    (record,) = trace.values()
    assert record.weights().shape == (2, 4, 5, 5)
    torch.testing.assert_close(record.weights(), expected)
    assert max(trace.verify().values()) < 1e-12
    with torch.no_grad():
        assert torch.equal(trace.output, attn(x))


@pytest.mark.slow
def test_grouped_queries_and_qk_norm_compile_to_one_graph():
    attn, x = module(2, qk_norm=RMSNorm).float(), tokens().float()
    compiled = torch.compile(attn, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, mask=masks.causal(5)), attn(x, mask=masks.causal(5)))


@pytest.mark.parametrize(("num_kv_heads", "hint"), [(3, "num_kv_heads=2"), (8, "num_kv_heads=4")])
def test_a_number_of_kv_heads_that_does_not_divide_num_heads_is_rejected(num_kv_heads, hint):
    with pytest.raises(ValueError, match=f"got num_heads=4, num_kv_heads={num_kv_heads}; try {hint}"):
        MultiHeadAttention(16, 4, num_kv_heads=num_kv_heads)
    with pytest.raises(ValueError, match="num_kv_heads must be a positive integer, got 0"):
        MultiHeadAttention(16, 4, num_kv_heads=0)


# --- QK-norm ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [RMSNorm, nn.LayerNorm])
def test_qk_norm_bounds_the_scores(norm):
    """|q| and |k| are at most sqrt(D), so that |beta q·k| <= sqrt(D), however large the weights of the projections."""
    attn, x = module(2, qk_norm=norm), 100 * tokens()
    calls = []
    attn.attend = lambda q, k, v, *args, **options: calls.append((q, k)) or attend_reference(q, k, v, *args, **options)
    attn(x, rotary_angles=rotary_angles(torch.arange(5), 4))
    ((q, k),) = calls
    scores = q @ k.repeat_interleave(2, 1).mT / math.sqrt(4)
    assert 0.5 < scores.abs().max() <= math.sqrt(4) + 1e-9
    plain = module(2)
    q, k = (plain.split_heads(layer(x)) for layer in (plain.q_proj, plain.k_proj))
    assert (q @ k.repeat_interleave(2, 1).mT / math.sqrt(4)).abs().max() > 100, "without it, they are large"


def test_qk_norm_makes_attention_independent_of_the_scale_of_queries_and_keys():
    attn, x = module(qk_norm=RMSNorm, bias=False), tokens()
    _, before = attn(x, return_weights=True)
    with torch.no_grad():
        attn.q_proj.weight.mul_(7)
        attn.k_proj.weight.mul_(0.3)
    _, after = attn(x, return_weights=True)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-3)  # up to eps
    assert (before - before.mean(-1, keepdim=True)).abs().max() > 0.05


def test_qk_norm_acts_on_cross_attention_and_its_cache_too():
    attn, x, memory = module(1, qk_norm=RMSNorm), tokens(3), tokens(5)
    cache = KVCache()
    out = attn(x, memory)
    assert not torch.allclose(out, module(1)(x, memory), atol=1e-3)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(attn(x, memory, cache=cache), out)
