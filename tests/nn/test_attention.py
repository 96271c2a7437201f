"""Laws of attention. The first of them: the fused kernel computes the formula, in values and in gradients.

softargmax and the modules have files of their own: test_attention_softargmax.py, test_attention_modules.py.
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
BOTH = pytest.mark.parametrize("attend", [attend_reference, attend_fused])
few = settings(deadline=None, max_examples=8, derandomize=True)


def out_of(attend, *args, **kwargs):
    out = attend(*args, **kwargs)
    return out[0] if isinstance(out, tuple) else out


def random_qkv(batch=2, heads=2, queries=4, keys=4, width=3, value_width=3, dtype=torch.float64):
    sizes = [(queries, width), (keys, width), (keys, value_width)]
    return [torch.randn(batch, heads, *size, dtype=dtype) for size in sizes]


# --- fused = reference ------------------------------------------------------------------------------------------------


def make_mask(kind, batch, n_queries, n_keys):
    """A mask that hides something: with padding, the first example is hidden wholly."""
    lengths = torch.tensor([0, n_keys, n_keys - 1])[:batch]
    mask = {
        "none": lambda: None,
        "causal": lambda: masks.causal(n_queries, n_keys),
        "padding": lambda: masks.padding(lengths, n_keys),
        "window": lambda: masks.window(n_queries, 0, n_keys),
        "causal & padding": lambda: masks.causal(n_queries, n_keys) & masks.padding(lengths, n_keys),
    }[kind]()
    assert mask is None or not masks.dense(mask).all(), "a mask that hides nothing proves nothing"
    return mask


@st.composite
def shapes(draw):
    """(B,H,Q,K,D,Dv) that fit every mask: 2 <= Q <= K. The kernels for Q = K and D = Dv are others: both are drawn."""
    B, H = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    Q, D = draw(st.integers(2, 5)), draw(st.integers(1, 5))
    K = draw(st.sampled_from([Q, Q + 3]))
    Dv = draw(st.sampled_from([D, D + 2]))
    return B, H, Q, K, D, Dv


def value_and_gradients(attend, inputs, mask, beta, upstream):
    """The output, and the gradient of each of q, k, v (and bias); an input that plays no part has gradient 0."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    q, k, v, bias = [*inputs, None][:4]
    out = out_of(attend, q, k, v, mask, beta, logit_bias=bias)
    gradients = torch.autograd.grad(out, inputs, upstream, allow_unused=True)
    return [out.detach()] + [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("kind", MASKS)
@given(shape=shapes(), with_bias=st.booleans(), seed=st.integers(0, 2**16))
@few
def test_fused_equals_reference_in_values_and_gradients(kind, beta, dtype, shape, with_bias, seed):
    B, H, Q, K, _, Dv = shape
    torch.manual_seed(seed)
    inputs = random_qkv(*shape, dtype=dtype)
    if with_bias:
        inputs.append(torch.randn(H, Q, K, dtype=dtype))
    mask, upstream = make_mask(kind, B, Q, K), torch.randn(B, H, Q, Dv, dtype=dtype)
    expected = value_and_gradients(attend_reference, inputs, mask, beta, upstream)
    came = value_and_gradients(attend_fused, inputs, mask, beta, upstream)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    # beta multiplies the rounding of the scores, and the gradients once more: float32 at 50 cannot be better
    steepness = max(1.0, abs(beta)) if beta is not None and math.isfinite(beta) else 1.0
    for name, a, b in zip(["out", "q", "k", "v", "bias"], expected, came, strict=False):
        assert a.isfinite().all(), f"reference {name}"
        limit = tolerance * max(1.0, a.abs().max().item()) * (1.0 if name == "out" else steepness)
        torch.testing.assert_close(b, a, rtol=0, atol=limit, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("beta", BETAS)
def test_more_queries_than_keys_and_a_single_query(beta):
    for Q, K in [(5, 2), (1, 4)]:
        q, k, v = random_qkv(queries=Q, keys=K, value_width=5)
        for mask in (None, masks.padding(torch.tensor([1, K]), K)):
            torch.testing.assert_close(attend_fused(q, k, v, mask, beta), attend_reference(q, k, v, mask, beta)[0])


def test_fused_equals_reference_over_many_blocks_of_keys():
    """The kernel works through the keys in blocks: here some are masked wholly before one that is not."""
    q, k, v = random_qkv(1, 1, queries=40, keys=1100, width=8, value_width=8, dtype=torch.float32)
    mask = torch.zeros(40, 1100, dtype=torch.bool)
    mask[:, 1050:] = True
    mask[3] = False
    out = attend_fused(q, k, v, mask)
    torch.testing.assert_close(out, attend_reference(q, k, v, mask)[0])
    assert (out[:, :, 3] == 0).all()


def test_golden_vector():
    """R2: seed 42, three tokens of width 2."""
    q = torch.tensor([[0.3367, 0.1288], [0.2345, 0.2303], [-1.1229, -0.1863]])
    k = torch.tensor([[2.2082, -0.6380], [0.4617, 0.2674], [0.5349, 0.8094]])
    v = torch.tensor([[1.1103, -1.6898], [-0.9890, 0.9580], [1.3221, 0.8172]])
    values = torch.tensor([[0.5698, -0.1520], [0.5379, -0.0265], [0.2246, 0.5556]])
    weights = torch.tensor([[0.4028, 0.2886, 0.3086], [0.3538, 0.3069, 0.3393], [0.1303, 0.4630, 0.4067]])
    out, w = attend_reference(q, k, v)
    torch.testing.assert_close(w, weights, rtol=0, atol=1e-4)
    torch.testing.assert_close(out, values, rtol=0, atol=1e-4)
    torch.testing.assert_close(attend_fused(q, k, v), values, rtol=0, atol=1e-4)


def test_default_beta_is_one_over_the_root_of_the_key_width():
    q, k, v = random_qkv(width=9, value_width=2)
    torch.testing.assert_close(attend_reference(q, k, v)[1], torch.softmax(q @ k.mT / 3, -1))
    torch.testing.assert_close(attend_fused(q, k, v), attend_fused(q, k, v, beta=1 / 3))


@pytest.mark.parametrize("beta", BETAS)
def test_a_bias_is_added_after_beta_and_is_nothing_beside_an_infinite_one(beta):
    q, k, v = random_qkv()
    bias = torch.randn(2, 4, 4, dtype=torch.float64)
    beta = 1 / math.sqrt(3) if beta is None else beta
    scores = q @ k.mT
    expected = (softargmax(scores, beta) if math.isinf(beta) else softargmax(beta * scores + bias)) @ v
    torch.testing.assert_close(attend_reference(q, k, v, None, beta, logit_bias=bias)[0], expected)
    torch.testing.assert_close(attend_fused(q, k, v, None, beta, logit_bias=bias), expected)


# --- laws of attention ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("kind", MASKS)
def test_weights_sum_to_one_where_anything_is_seen_and_are_zero_where_masked(kind, beta):
    B, Q, K = 3, 3, 5
    q, k, v = random_qkv(batch=B, queries=Q, keys=K)
    mask = make_mask(kind, B, Q, K)
    _, weights = attend_reference(q, k, v, mask, beta)
    allowed = torch.ones(B, 1, Q, K, dtype=torch.bool) if mask is None else masks.dense(mask).expand(B, 1, Q, K)
    sees = allowed.any(-1).double().expand(B, 2, Q)
    torch.testing.assert_close(weights.sum(-1), sees)
    assert (weights[~allowed.expand_as(weights)] == 0).all()
    assert (weights >= 0).all()


def test_beta_zero_gives_the_mean_of_the_values_and_infinity_one_value():
    """R4.1"""
    q, k, v = random_qkv()
    for attend in (attend_reference, attend_fused):
        torch.testing.assert_close(out_of(attend, q, k, v, None, 0.0), v.mean(-2, keepdim=True).expand_as(v))
    best, worst = (q @ k.mT).argmax(-1), (q @ k.mT).argmin(-1)
    for beta, chosen in [(math.inf, best), (-math.inf, worst)]:
        picked = v.gather(-2, chosen[..., None].expand_as(v))
        for attend in (attend_reference, attend_fused):
            torch.testing.assert_close(out_of(attend, q, k, v, None, beta), picked)


@BOTH
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("beta", [0.0, None, 50.0, -1.0])
def test_a_query_that_sees_nothing_gives_zeros_and_no_nan_in_any_gradient(attend, beta, with_bias):
    inputs = [x.requires_grad_() for x in random_qkv(dtype=torch.float32)]
    bias = torch.randn(2, 4, 4, requires_grad=True) if with_bias else None
    mask = masks.window(4, 1) & masks.padding(torch.tensor([0, 2]), 4)
    assert not mask[1, 0, 3].any(), "in an example that sees something, a single row sees nothing too"
    assert mask[1, 0, 0].any()
    with torch.autograd.set_detect_anomaly(True):
        out = out_of(attend, *inputs, mask, beta, logit_bias=bias)
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


@BOTH
@pytest.mark.parametrize("beta", [0.0, None, -1.0, math.inf])
def test_order_of_keys_does_not_matter_and_queries_carry_theirs(attend, beta):
    """R2.6"""
    q, k, v = random_qkv(queries=5, keys=6, value_width=2)
    mask = masks.window(5, 2, 6)
    assert not mask.all()
    keys, queries = torch.randperm(6), torch.randperm(5)
    out = out_of(attend, q, k, v, mask, beta)
    torch.testing.assert_close(out_of(attend, q, k[:, :, keys], v[:, :, keys], mask[:, keys], beta), out)
    torch.testing.assert_close(out_of(attend, q[:, :, queries], k, v, mask[queries], beta), out[:, :, queries])


@BOTH
@pytest.mark.parametrize("beta", [0.0, None, 50.0, -1.0, math.inf])
def test_a_causal_prefix_is_blind_to_its_suffix(attend, beta):
    q, k, v = random_qkv(queries=6, keys=6)
    out = out_of(attend, q, k, v, masks.causal(6), beta)
    for x in (q, k, v):
        x[:, :, 3:] = torch.randn(2, 2, 3, 3, dtype=torch.float64)
    changed = out_of(attend, q, k, v, masks.causal(6), beta)
    torch.testing.assert_close(changed[:, :, :3], out[:, :, :3], rtol=0, atol=1e-12)
    assert (changed[:, :, 3:] - out[:, :, 3:]).abs().amax() > 0.1


@BOTH
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("size", [(4, 4), (3, 5), (1, 4), (0, 3)])
def test_a_lazy_causal_mask_answers_as_its_dense_form(attend, beta, size):
    Q, K = size
    q, k, v = random_qkv(queries=Q, keys=K)
    lazy = masks.causal(Q, K)
    assert isinstance(lazy, masks.CausalMask)
    dense = lazy.dense()
    for bias in (None, torch.randn(2, Q, K, dtype=torch.float64)):
        out = out_of(attend, q, k, v, lazy, beta, logit_bias=bias)
        torch.testing.assert_close(out, out_of(attend, q, k, v, dense, beta, logit_bias=bias))


@pytest.fixture
def kernel_calls(monkeypatch):
    """The keyword arguments of every call of the kernel."""
    calls, kernel = [], F.scaled_dot_product_attention

    def spy(*args, **kwargs):
        calls.append(kwargs)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return calls


def test_the_kernel_gets_a_flag_for_a_lazy_causal_mask_and_a_tensor_for_any_other(kernel_calls):
    q, k, v = random_qkv()
    attend_fused(q, k, v, masks.causal(4))
    attend_fused(q, k, v, masks.causal(4) & masks.padding(torch.tensor([2, 4])))
    attend_fused(q[:, :, -1:], k, v, masks.causal(1, 4))
    attend_fused(q[:, :, 2:], k, v, masks.causal(2, 4))
    attend_fused(q, k, v)
    flags = [(call["is_causal"], call["attn_mask"] is None) for call in kernel_calls]
    assert flags == [(True, True), (False, False), (False, True), (False, False), (False, True)]


def test_the_kernel_gets_beta_as_its_scale(kernel_calls):
    q, k, v = random_qkv(width=4)
    for beta in (None, 2.0):
        attend_fused(q, k, v, masks.causal(4), beta)
    assert [call["scale"] for call in kernel_calls] == [0.5, 2.0]


@BOTH
@pytest.mark.parametrize("beta", BETAS)
def test_without_keys_every_query_gets_zeros(attend, beta):
    q, k, v = random_qkv(queries=3, keys=0, value_width=5)
    for mask in (None, torch.ones(3, 0, dtype=torch.bool)):
        out = out_of(attend, q, k, v, mask, beta)
        assert out.shape == (2, 2, 3, 5)
        assert (out == 0).all()


@BOTH
def test_dropout_keeps_the_mean_and_drops_something(attend):
    q, k, v = (
        x[:1].expand(20_000, -1, -1, -1) for x in random_qkv(batch=1, heads=1, queries=1, keys=6, dtype=torch.float32)
    )
    whole = attend_fused(q[:1], k[:1], v[:1])
    out = out_of(attend, q, k, v, dropout=0.3)
    error = out.std(0) / math.sqrt(len(out))
    assert (error > 0).all(), "something is dropped"
    assert ((out.mean(0) - whole[0]).abs() < 5 * error).all()


def test_reference_shows_its_weights_before_dropout():
    q, k, v = random_qkv()
    torch.testing.assert_close(attend_reference(q, k, v, dropout=0.9)[1], attend_reference(q, k, v)[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("beta", [None, 1.0, 50.0])
@pytest.mark.parametrize("attend", [attend_reference, attend_fused])
def test_half_precision_loses_no_more_than_its_own_rounding(dtype, beta, attend):
    """Large scores overflow float16 and are coarse in bfloat16 unless they are summed in float32."""
    torch.manual_seed(0)
    q, k, v = (scale * torch.randn(1, 2, 5, 64).to(dtype) for scale in (8, 8, 1))
    exact = attend_reference(q.double(), k.double(), v.double(), None, beta)[0]
    out = out_of(attend, q, k, v, None, beta)
    assert out.dtype == dtype
    assert (out.double() - exact).abs().max() < 8 * torch.finfo(dtype).eps
