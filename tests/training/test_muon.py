import pytest
import torch

from clearhead.training import optim
from clearhead.training.optim import Muon, newton_schulz, orthogonalize


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 8, 32), (1, 1, 5)])
def test_singular_values_become_about_1_and_directions_stay(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-3
    u, s, v = torch.linalg.svd(matrices, full_matrices=False)
    result = newton_schulz(matrices)
    kept = torch.diagonal(u.mT @ result @ v.mT, dim1=-2, dim2=-1)
    larger = kept[s > 0.02 * s.amax(dim=-1, keepdim=True)]  # five steps do not reach the very smallest
    assert larger.min() > 0.6
    assert larger.max() < 1.25
    assert not ((s > 0.6) & (s < 1.25)).any()  # guard: they were elsewhere before


def test_a_zero_gradient_is_no_update():
    assert torch.equal(newton_schulz(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


def test_the_scale_of_a_gradient_does_not_matter():
    x = torch.randn(1, 6, 6)
    torch.testing.assert_close(newton_schulz(x * 1e-12), newton_schulz(x), atol=1e-4, rtol=1e-3)


def test_many_at_once_are_each_alone():
    shapes = [(8, 4), (4, 8), (8, 4), (6, 6), (8, 3, 2, 2), (2, 8, 3, 3), (6, 6)]
    updates = [torch.randn(shape) for shape in shapes]
    together = orthogonalize(updates)
    for update, result in zip(updates, together, strict=True):
        assert result.shape == update.shape
        torch.testing.assert_close(result, orthogonalize([update])[0], atol=1e-5, rtol=1e-4)


def test_matrices_of_one_shape_share_one_call(monkeypatch):
    calls = []
    monkeypatch.setattr(optim, "newton_schulz", lambda stack, dtype: calls.append(tuple(stack.shape)) or stack)
    orthogonalize([torch.ones(8, 4), torch.ones(4, 8), torch.ones(4, 4), torch.ones(4, 2, 2, 2)])
    assert sorted(calls) == [(1, 4, 4), (3, 4, 8)]


def test_a_tall_matrix_is_its_transpose_times_the_root_of_its_shape():
    wide = torch.randn(3, 12)
    (flat,), (tall,) = orthogonalize([wide]), orthogonalize([wide.mT])
    torch.testing.assert_close(tall, flat.mT * (12 / 3) ** 0.5)


def test_a_convolution_is_a_matrix_with_a_row_for_each_output():
    kernel = torch.randn(4, 3, 2, 2)
    torch.testing.assert_close(orthogonalize([kernel])[0].flatten(1), orthogonalize([kernel.flatten(1)])[0])


def test_two_steps_by_the_formula():
    w = torch.nn.Parameter(torch.randn(4, 6))
    optimizer = Muon([w], lr=0.1, momentum=0.9, weight_decay=0.5)
    expected, momentum = w.detach().clone(), torch.zeros(4, 6)
    for _ in range(2):
        gradient = torch.randn(4, 6)
        w.grad = gradient.clone()
        optimizer.step()
        momentum = 0.9 * momentum + 0.1 * gradient
        ahead = 0.1 * gradient + 0.9 * momentum
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * orthogonalize([ahead])[0]
        torch.testing.assert_close(w.detach(), expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(w.grad, gradient)  # not used up


def test_a_weight_without_a_gradient_stays():
    w, idle = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2, 2))
    optimizer = Muon([w, idle], weight_decay=0.1)
    optimizer.step()
    w.grad = torch.eye(2)
    optimizer.step()
    assert torch.equal(idle.detach(), torch.ones(2, 2))
    assert not torch.equal(w.detach(), torch.ones(2, 2))


def test_vectors_are_refused():
    with pytest.raises(ValueError, match=r"got a parameter of shape \(3,\)"):
        Muon([torch.nn.Parameter(torch.ones(3))])
