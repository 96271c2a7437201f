"""softargmax: exact at its limits, stable for huge logits, equal to softmax otherwise."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.nn.attention import softargmax


def test_beta_zero_gives_uniform_weights():
    z = torch.tensor([[3.0, -1.0, 1e30, 0.0]])
    assert softargmax(z, 0.0).tolist() == [[0.25] * 4]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_infinite_beta_selects_the_extreme_and_splits_ties(dtype):
    z = torch.tensor([[1.0, 4.0, 4.0, -2.0], [5.0, 0.0, 0.0, 0.0]], dtype=dtype)
    largest, smallest = softargmax(z, math.inf), softargmax(z, -math.inf)
    assert largest.tolist() == [[0, 0.5, 0.5, 0], [1, 0, 0, 0]]
    assert smallest[0].tolist() == [0, 0, 0, 1]
    torch.testing.assert_close(smallest[1], torch.tensor([0, 1 / 3, 1 / 3, 1 / 3], dtype=dtype))
    assert largest.dtype == smallest.dtype == dtype


@pytest.mark.parametrize("beta", [0.0, 0.25, 1.0, 50.0, -1.0, -50.0, math.inf, -math.inf])
@pytest.mark.parametrize(("huge", "dtype"), [(3e38, torch.float32), (1e308, torch.float64)])
def test_huge_logits_of_both_signs_are_stable(huge, dtype, beta):
    z = torch.tensor([huge, 0.0, -huge, huge], dtype=dtype, requires_grad=True)
    expected = [0.25] * 4 if beta == 0 else [0.5, 0, 0, 0.5] if beta > 0 else [0, 0, 1, 0]
    weights = softargmax(z, beta)
    assert weights.tolist() == expected
    assert softargmax(z, beta, where=torch.tensor([True, True, False, True])).isfinite().all()
    if math.isfinite(beta):
        (gradient,) = torch.autograd.grad(weights[0], z)
        assert gradient.isfinite().all()


@given(seed=st.integers(0, 2**16), beta=st.floats(-50, 50), n=st.integers(1, 6))
@settings(deadline=None, max_examples=12, derandomize=True)
def test_softargmax_equals_softmax_of_beta_z_and_is_shift_invariant(seed, beta, n):
    z = torch.randn(3, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    weights = softargmax(z, beta)
    torch.testing.assert_close(weights, torch.softmax(beta * z, -1))
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(softargmax(z + 7.5, beta), weights, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("beta", [0.0, 1.0, -2.0, math.inf, -math.inf])
def test_softargmax_works_along_any_dim(beta):
    z = torch.randn(2, 3, 4)
    where = torch.rand(2, 3, 4) > 0.3
    assert not where.all()
    for dim in (0, 1, 2, -3, -2):
        along_last = softargmax(z.movedim(dim, -1), beta, where=where.movedim(dim, -1)).movedim(-1, dim)
        torch.testing.assert_close(softargmax(z, beta, dim=dim, where=where), along_last)


@pytest.mark.parametrize("beta", [0.0, 1.0, 50.0, -1.0, -50.0, math.inf, -math.inf])
def test_excluded_entries_get_zero_weight_and_zero_gradient(beta):
    z = torch.tensor([[1.0, 9.0, 2.0, -9.0, 2.0]] * 2, requires_grad=True)
    where = torch.tensor([[True, False, True, False, True], [False] * 5])
    weights = softargmax(z, beta, where=where)
    torch.testing.assert_close(weights[0, where[0]], softargmax(z[0, where[0]], beta))
    assert weights[0, ~where[0]].tolist() == [0, 0], "excluded entries get no weight although they are the extremes"
    assert weights[1].tolist() == [0] * 5, "a row without any True gets zeros"
    if math.isfinite(beta):
        (gradient,) = torch.autograd.grad((weights * torch.randn(2, 5)).sum(), z)
        assert gradient.isfinite().all()
        assert (gradient[~where] == 0).all()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, 50.0, -1.0])
def test_softargmax_has_the_gradients_of_softmax(beta):
    z = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(3, 5, dtype=torch.float64)
    (ours,) = torch.autograd.grad(softargmax(z, beta), z, upstream)
    (theirs,) = torch.autograd.grad(torch.softmax(beta * z, -1), z, upstream)
    torch.testing.assert_close(ours, theirs)
    assert torch.autograd.gradcheck(lambda z: softargmax(z, beta), z)
    where = torch.rand(3, 5) > 0.4
    assert not where.all()
    assert torch.autograd.gradcheck(lambda z: softargmax(z, beta, where=where), z)


def test_integer_and_empty_inputs_are_supported():
    torch.testing.assert_close(softargmax(torch.tensor([1, 2])), torch.softmax(torch.tensor([1.0, 2.0]), -1))
    assert softargmax(torch.empty(3, 0)).shape == (3, 0)


def test_nan_beta_raises():
    with pytest.raises(ValueError, match="beta must be a number, got nan"):
        softargmax(torch.zeros(2), math.nan)


@pytest.mark.parametrize("beta", [0.5, 1.0, 50.0, math.inf])
def test_infinite_logits_act_as_the_largest_and_smallest_numbers(beta):
    inf = math.inf
    assert softargmax(torch.tensor([inf, 0.0, inf]), beta).tolist() == [0.5, 0.0, 0.5]
    assert softargmax(torch.tensor([-inf, 0.0, -inf]), beta).tolist() == [0.0, 1.0, 0.0]
    assert softargmax(torch.tensor([-inf, -inf]), beta).tolist() == [0.5, 0.5]
    assert softargmax(torch.tensor([-inf, 5.0]), beta, where=torch.tensor([True, False])).tolist() == [1.0, 0.0]
    assert softargmax(torch.tensor([math.nan, 5.0]), beta).isnan().all()


def test_gradients_are_zero_at_infinite_beta():
    z = torch.randn(3, 4, requires_grad=True)
    softargmax(z, math.inf)[:, 0].sum().backward()
    assert torch.equal(z.grad, torch.zeros(3, 4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: softargmax(torch.tensor(1.0)), "must be real and have at least one dimension"),
        (lambda: softargmax(torch.tensor([1j])), "must be real and have at least one dimension"),
        (lambda: softargmax(torch.zeros(2), "1"), "beta must be a number, got '1'"),
        (lambda: softargmax(torch.zeros(2), where=torch.ones(2)), "a mask must be bool"),
    ],
)
def test_invalid_arguments_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()
