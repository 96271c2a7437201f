import math

import pytest
import torch
from torch import nn

import clearhead
from clearhead.insight.heads import (
    class_token_mass,
    diagonality,
    distance,
    edit,
    entropy,
    head_importance,
    pairwise_distances,
)
from clearhead.nn.attention import MultiHeadAttention


def test_entropy_of_uniform_is_log_n_and_of_one_key_is_zero():
    weights = torch.stack([torch.full((4, 8), 1 / 8), torch.eye(8)[:4]])[None]  # two heads
    assert torch.allclose(entropy(weights), torch.tensor([math.log(8), 0.0]))


def test_rows_without_weights_are_left_out():
    weights = torch.full((1, 1, 3, 4), 0.25)
    weights[..., 0, :] = 0
    assert entropy(weights).item() == pytest.approx(math.log(4))
    assert class_token_mass(weights).item() == pytest.approx(0.25)
    assert entropy(torch.zeros(1, 1, 2, 2)).item() == 0


def test_distance_on_a_line():
    shifted = torch.eye(6).roll(2, dims=1)[:4].unsqueeze(0)
    both = torch.stack([torch.eye(6), torch.cat([shifted[0], torch.zeros(2, 6)])])[None]  # itself, and two further
    assert torch.equal(distance(both), torch.tensor([0.0, 2.0]))


def test_distance_on_a_grid_is_the_straight_line():
    steps = pairwise_distances(12, (3, 4))
    assert steps[0, 11] == pytest.approx(math.hypot(2, 3))
    assert steps[1, 5] == 1
    assert pairwise_distances(12)[0, 11] == 11


def test_distance_leaves_out_the_class_token():
    patches = torch.eye(4).roll(1, dims=0)
    weights = torch.zeros(1, 1, 5, 5)
    weights[0, 0, 0] = 0.2
    weights[0, 0, 1:, 0] = 0.9  # nearly all to the class token: the rest still counts as a whole
    weights[0, 0, 1:, 1:] = 0.1 * patches
    assert distance(weights, (2, 2), class_token=True).item() == pytest.approx(
        (pairwise_distances(4, (2, 2)) * patches).sum(-1).mean().item()
    )
    with pytest.raises(ValueError, match=r"2 x 2 has 4 patches, got 5 tokens; .*class_token=True"):
        distance(weights, (2, 2))
    with pytest.raises(ValueError, match="got 3 queries and 5 keys"):
        distance(weights[..., :3, :])


def test_diagonality_of_both_diagonals():
    weights = torch.stack([torch.eye(5), torch.eye(5).flip(-1), torch.full((5, 5), 0.2)])[None]
    assert torch.allclose(diagonality(weights), torch.tensor([1.0, 0.2, 0.2]))
    assert torch.allclose(diagonality(weights.flip(-1)), torch.tensor([0.2, 1.0, 0.2]))
    assert diagonality(weights, within=1)[2].item() == pytest.approx((2 + 3 * 3 + 2) / 25)


def test_diagonality_of_cross_attention_goes_from_corner_to_corner():
    aligned = torch.zeros(1, 1, 3, 5)
    for query, key in enumerate((0, 2, 4)):
        aligned[..., query, key] = 1
    assert diagonality(aligned).item() == 1
    assert diagonality(aligned.flip(-1)).item() == pytest.approx(1 / 3)


def test_class_token_mass_is_the_weight_of_its_key():
    weights = torch.tensor([[[[0.5, 0.5], [0.3, 0.7]]]])
    assert class_token_mass(weights).item() == pytest.approx(0.4)
    assert class_token_mass(weights, index=1).item() == pytest.approx(0.6)


class Heads(nn.Module):
    """A layer of four heads and one of two; the third head of the first has no way out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = MultiHeadAttention(8, 4), MultiHeadAttention(8, 2)
        with torch.no_grad():
            self.first.out_proj.weight[:, 4:6] = 0

    def forward(self, x, scale=1.0):
        x = x + self.first(x)
        return (x + self.second(x)) * scale


def test_a_head_without_a_way_out_is_not_needed():
    changes = head_importance(Heads(), torch.randn(2, 5, 8), lambda output: output.square().mean())
    assert changes.shape == (2, 4)
    assert changes[0, 2] == 0
    assert (changes[0, [0, 1, 3]].abs() > 1e-4).all()
    assert changes[1, :2].abs().min() > 1e-4
    assert changes[1, 2:].isnan().all()  # there are no such heads


def test_the_change_is_the_score_without_the_head_minus_with_it():
    model, x = Heads(), torch.randn(2, 5, 8)
    score = lambda output: output.square().mean()  # noqa: E731
    found = clearhead.head_importance(model, (x, 3.0), score, pattern="uniform", names=["second"])
    with torch.no_grad(), edit(model, "second", head=1, pattern="uniform"):
        without = score(model(x, 3.0))
    assert found.shape == (1, 2)
    assert found[0, 1].item() == pytest.approx((without - score(model(x, 3.0))).item(), abs=1e-6)


def test_score_must_be_a_single_number():
    with pytest.raises(ValueError, match=r"score must return a single number, got a tensor of shape \(2, 5, 8\)"):
        head_importance(Heads(), torch.randn(2, 5, 8), lambda output: output)
