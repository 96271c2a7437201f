"""attend_reference and attend_fused: equal outputs and gradients, and the properties of attention.

softargmax and the modules are tested in test_attention_softargmax.py and test_attention_modules.py.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.nn import masks
from clearhead.nn.attention import attend_fused, attend_reference, softargmax

BETAS = [0.0, None, 1.0, 50.0, -1.0, math.inf, -math.inf]  # None is the default, 1/sqrt(D)
MASKS = ["none", "causal", "padding", "window", "causal & padding"]
EVERY_ATTEND = pytest.mark.parametrize("attend", [attend_reference, attend_fused])
few_examples = settings(deadline=None, max_examples=8, derandomize=True)


def output_of(attend, *args, **kwargs):
    out = attend(*args, **kwargs)
    return out[0] if isinstance(out, tuple) else out


def random_qkv(batch=2, heads=2, queries=4, keys=4, width=3, value_width=3, dtype=torch.float64):
    sizes = [(queries, width), (keys, width), (keys, value_width)]
    return [torch.randn(batch, heads, *size, dtype=dtype) for size in sizes]


# --- fused = reference ------------------------------------------------------------------------------------------------


def make_mask(kind, batch, n_queries, n_keys):
    """A mask that masks something; with padding, the first example is fully masked."""
    lengths = torch.tensor([0, n_keys, n_keys - 1])[:batch]
    mask = {
        "none": lambda: None,
        "causal": lambda: masks.causal(n_queries, n_keys),
        "padding": lambda: masks.padding(lengths, n_keys),
        "window": lambda: masks.window(n_queries, 0, n_keys),
        "causal & padding": lambda: masks.causal(n_queries, n_keys) & masks.padding(lengths, n_keys),
    }[kind]()
    assert mask is None or not masks.dense(mask).all(), "a mask that masks nothing tests nothing"
    return mask


@st.composite
def shapes(draw):
    """(B,H,Q,K,D,Dv) valid for every mask: 2 <= Q <= K. Q = K and D = Dv use different kernels, so both cases occur."""
    B, H = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    Q, D = draw(st.integers(2, 5)), draw(st.integers(1, 5))
    K = draw(st.sampled_from([Q, Q + 3]))
    Dv = draw(st.sampled_from([D, D + 2]))
    return B, H, Q, K, D, Dv


def value_and_gradients(attend, inputs, mask, beta, upstream):
    """The output and the gradients of q, k, v (and bias); an unused input has gradient 0."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    q, k, v, bias = [*inputs, None][:4]
    out = output_of(attend, q, k, v, mask, beta, logit_bias=bias)
    gradients = torch.autograd.grad(out, inputs, upstream, allow_unused=True)
    return [out.detach()] + [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("kind", MASKS)
@given(shape=shapes(), with_bias=st.booleans(), seed=st.integers(0, 2**16))
@few_examples
def test_fused_equals_reference_in_values_and_gradients(kind, beta, dtype, shape, with_bias, seed):
    B, H, Q, K, _, Dv = shape
    torch.manual_seed(seed)
    inputs = random_qkv(*shape, dtype=dtype)
    if with_bias:
        inputs.append(torch.randn(H, Q, K, dtype=dtype))
    mask, upstream = make_mask(kind, B, Q, K), torch.randn(B, H, Q, Dv, dtype=dtype)
    expected = value_and_gradients(attend_reference, inputs, mask, beta, upstream)
    actual = value_and_gradients(attend_fused, inputs, mask, beta, upstream)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    # beta scales the rounding error of the scores, and the gradients once more: float32 at beta=50 is limited by it
    steepness = max(1.0, abs(beta)) if beta is not None and math.isfinite(beta) else 1.0
    for name, a, b in zip(["out", "q", "k", "v", "bias"], expected, actual, strict=False):
        assert a.isfinite().all(), f"reference {name}"
        limit = tolerance * max(1.0, a.abs().max().item()) * (1.0 if name == "out" else steepness)
        torch.testing.assert_close(b, a, rtol=0, atol=limit, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("beta", BETAS)
def test_fused_equals_reference_with_more_queries_than_keys_and_with_one_query(beta):
    for Q, K in [(5, 2), (1, 4)]:
        q, k, v = random_qkv(queries=Q, keys=K, value_width=5)
        for mask in (None, masks.padding(torch.tensor([1, K]), K)):
            torch.testing.assert_close(attend_fused(q, k, v, mask, beta), attend_reference(q, k, v, mask, beta)[0])


def test_fused_equals_reference_across_many_key_blocks():
    """The kernel processes keys in blocks; here the first blocks are fully masked and a later one is not."""
    q, k, v = random_qkv(1, 1, queries=40, keys=1100, width=8, value_width=8, dtype=torch.float32)
    mask = torch.zeros(40, 1100, dtype=torch.bool)
    mask[:, 1050:] = True
    mask[3] = False
    out = attend_fused(q, k, v, mask)
    torch.testing.assert_close(out, attend_reference(q, k, v, mask)[0])
    assert (out[:, :, 3] == 0).all()


def test_three_token_example_matches_known_values():
    """Seed 42, three tokens of width 2."""
    q = torch.tensor([[0.3367, 0.1288], [0.2345, 0.2303], [-1.1229, -0.1863]])
    k = torch.tensor([[2.2082, -0.6380], [0.4617, 0.2674], [0.5349, 0.8094]])
    v = torch.tensor([[1.1103, -1.6898], [-0.9890, 0.9580], [1.3221, 0.8172]])
    values = torch.tensor([[0.5698, -0.1520], [0.5379, -0.0265], [0.2246, 0.5556]])
    weights = torch.tensor([[0.4028, 0.2886, 0.3086], [0.3538, 0.3069, 0.3393], [0.1303, 0.4630, 0.4067]])
    out, w = attend_reference(q, k, v)
    torch.testing.assert_close(w, weights, rtol=0, atol=1e-4)
    torch.testing.assert_close(out, values, rtol=0, atol=1e-4)
    torch.testing.assert_close(attend_fused(q, k, v), values, rtol=0, atol=1e-4)


def test_default_beta_is_one_over_sqrt_of_the_key_width():
    q, k, v = random_qkv(width=9, value_width=2)
    torch.testing.assert_close(attend_reference(q, k, v)[1], torch.softmax(q @ k.mT / 3, -1))
    torch.testing.assert_close(attend_fused(q, k, v), attend_fused(q, k, v, beta=1 / 3))


@pytest.mark.parametrize("beta", BETAS)
def test_logit_bias_is_added_after_scaling_and_ignored_at_infinite_beta(beta):
    q, k, v = random_qkv()
    bias = torch.randn(2, 4, 4, dtype=torch.float64)
    beta = 1 / math.sqrt(3) if beta is None else beta
    scores = q @ k.mT
    expected = (softargmax(scores, beta) if math.isinf(beta) else softargmax(beta * scores + bias)) @ v
    torch.testing.assert_close(attend_reference(q, k, v, None, beta, logit_bias=bias)[0], expected)
    torch.testing.assert_close(attend_fused(q, k, v, None, beta, logit_bias=bias), expected)


# --- properties of attention ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("kind", MASKS)
def test_weights_sum_to_one_and_masked_keys_get_zero_weight(kind, beta):
    B, Q, K = 3, 3, 5
    q, k, v = random_qkv(batch=B, queries=Q, keys=K)
    mask = make_mask(kind, B, Q, K)
    _, weights = attend_reference(q, k, v, mask, beta)
    allowed = torch.ones(B, 1, Q, K, dtype=torch.bool) if mask is None else masks.dense(mask).expand(B, 1, Q, K)
    has_visible_key = allowed.any(-1).double().expand(B, 2, Q)
    torch.testing.assert_close(weights.sum(-1), has_visible_key)
    assert (weights[~allowed.expand_as(weights)] == 0).all()
    assert (weights >= 0).all()


def test_beta_zero_averages_the_values_and_infinite_beta_selects_one():
    q, k, v = random_qkv()
    for attend in (attend_reference, attend_fused):
        torch.testing.assert_close(output_of(attend, q, k, v, None, 0.0), v.mean(-2, keepdim=True).expand_as(v))
    best, worst = (q @ k.mT).argmax(-1), (q @ k.mT).argmin(-1)
    for beta, selected in [(math.inf, best), (-math.inf, worst)]:
        expected = v.gather(-2, selected[..., None].expand_as(v))
        for attend in (attend_reference, attend_fused):
            torch.testing.assert_close(output_of(attend, q, k, v, None, beta), expected)


@EVERY_ATTEND
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("beta", [0.0, None, 50.0, -1.0])
def test_a_fully_masked_query_returns_zeros_and_finite_gradients(attend, beta, with_bias):
    inputs = [x.requires_grad_() for x in random_qkv(dtype=torch.float32)]
    bias = torch.randn(2, 4, 4, requires_grad=True) if with_bias else None
    mask = masks.window(4, 1) & masks.padding(torch.tensor([0, 2]), 4)
    assert not mask[1, 0, 3].any(), "one row of a partly visible example is fully masked"
    assert mask[1, 0, 0].any()
    with torch.autograd.set_detect_anomaly(True):
        out = output_of(attend, *inputs, mask, beta, logit_bias=bias)
        out.square().sum().backward()
    assert (out[0] == 0).all()
    assert (out[1, :, 3] == 0).all()
    assert (out[1, :, 0] != 0).any()
    for x in [*inputs, *([bias] if with_bias else [])]:
        assert x.grad.isfinite().all()
    q, k, v = inputs
    for x in (q, k, v):
        assert (x.grad[0] == 0).all()
    assert (v.grad[1, :, :2] != 0).any()


@EVERY_ATTEND
@pytest.mark.parametrize("beta", [0.0, None, -1.0, math.inf])
def test_attention_is_key_permutation_invariant_and_query_permutation_equivariant(attend, beta):
    q, k, v = random_qkv(queries=5, keys=6, value_width=2)
    mask = masks.window(5, 2, 6)
    assert not mask.all()
    keys, queries = torch.randperm(6), torch.randperm(5)
    out = output_of(attend, q, k, v, mask, beta)
    torch.testing.assert_close(output_of(attend, q, k[:, :, keys], v[:, :, keys], mask[:, keys], beta), out)
    torch.testing.assert_close(output_of(attend, q[:, :, queries], k, v, mask[queries], beta), out[:, :, queries])


@EVERY_ATTEND
@pytest.mark.parametrize("beta", [0.0, None, 50.0, -1.0, math.inf])
def test_a_causal_prefix_does_not_depend_on_its_suffix(attend, beta):
    q, k, v = random_qkv(queries=6, keys=6)
    out = output_of(attend, q, k, v, masks.causal(6), beta)
    for x in (q, k, v):
        x[:, :, 3:] = torch.randn(2, 2, 3, 3, dtype=torch.float64)
    changed = output_of(attend, q, k, v, masks.causal(6), beta)
    torch.testing.assert_close(changed[:, :, :3], out[:, :, :3], rtol=0, atol=1e-12)
    assert (changed[:, :, 3:] - out[:, :, 3:]).abs().amax() > 0.1


@EVERY_ATTEND
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("size", [(4, 4), (3, 5), (1, 4), (0, 3)])
def test_a_lazy_causal_mask_equals_its_dense_form(attend, beta, size):
    Q, K = size
    q, k, v = random_qkv(queries=Q, keys=K)
    lazy = masks.causal(Q, K)
    assert isinstance(lazy, masks.CausalMask)
    dense = lazy.dense()
    for bias in (None, torch.randn(2, Q, K, dtype=torch.float64)):
        out = output_of(attend, q, k, v, lazy, beta, logit_bias=bias)
        torch.testing.assert_close(out, output_of(attend, q, k, v, dense, beta, logit_bias=bias))


@pytest.fixture
def kernel_calls(monkeypatch):
    """The keyword arguments of every call of scaled_dot_product_attention."""
    calls, kernel = [], F.scaled_dot_product_attention

    def spy(*args, **kwargs):
        calls.append(kwargs)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return calls


def test_sdpa_gets_is_causal_for_a_lazy_causal_mask_and_a_tensor_otherwise(kernel_calls):
    q, k, v = random_qkv()
    attend_fused(q, k, v, masks.causal(4))
    attend_fused(q, k, v, masks.causal(4) & masks.padding(torch.tensor([2, 4])))
    attend_fused(q[:, :, -1:], k, v, masks.causal(1, 4))
    attend_fused(q[:, :, 2:], k, v, masks.causal(2, 4))
    attend_fused(q, k, v)
    flags = [(call["is_causal"], call["attn_mask"] is None) for call in kernel_calls]
    assert flags == [(True, True), (False, False), (False, True), (False, False), (False, True)]


def test_sdpa_gets_beta_as_scale(kernel_calls):
    q, k, v = random_qkv(width=4)
    for beta in (None, 2.0):
        attend_fused(q, k, v, masks.causal(4), beta)
    assert [call["scale"] for call in kernel_calls] == [0.5, 2.0]


@EVERY_ATTEND
@pytest.mark.parametrize("beta", BETAS)
def test_without_keys_the_output_is_zero(attend, beta):
    q, k, v = random_qkv(queries=3, keys=0, value_width=5)
    for mask in (None, torch.ones(3, 0, dtype=torch.bool)):
        out = output_of(attend, q, k, v, mask, beta)
        assert out.shape == (2, 2, 3, 5)
        assert (out == 0).all()


@EVERY_ATTEND
def test_dropout_preserves_the_expected_output(attend):
    q, k, v = (
        x[:1].expand(20_000, -1, -1, -1) for x in random_qkv(batch=1, heads=1, queries=1, keys=6, dtype=torch.float32)
    )
    expected = attend_fused(q[:1], k[:1], v[:1])
    out = output_of(attend, q, k, v, dropout=0.3)
    error = out.std(0) / math.sqrt(len(out))
    assert (error > 0).all(), "dropout is active"
    assert ((out.mean(0) - expected[0]).abs() < 5 * error).all()


def test_reference_returns_the_weights_before_dropout():
    q, k, v = random_qkv()
    torch.testing.assert_close(attend_reference(q, k, v, dropout=0.9)[1], attend_reference(q, k, v)[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("beta", [None, 1.0, 50.0])
@pytest.mark.parametrize("attend", [attend_reference, attend_fused])
def test_half_precision_error_is_within_rounding(dtype, beta, attend):
    """Large scores overflow in float16 and lose precision in bfloat16 unless they are accumulated in float32."""
    torch.manual_seed(0)
    q, k, v = (scale * torch.randn(1, 2, 5, 64).to(dtype) for scale in (8, 8, 1))
    exact = attend_reference(q.double(), k.double(), v.double(), None, beta)[0]
    out = output_of(attend, q, k, v, None, beta)
    assert out.dtype == dtype
    assert (out.double() - exact).abs().max() < 8 * torch.finfo(dtype).eps
