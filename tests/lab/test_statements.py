"""Formulas and statements of single claims, verified independently of their experiments."""

import math

import pytest
import torch

from clearhead import lab
from clearhead.lab import find, temperature
from clearhead.lab import keys as key_lesson
from clearhead.nn.attention import attend_reference


def values(slug, **changes):
    return {check.name: check.value for check in lab.run(slug, **changes).checks}


def test_misconception_divides_the_weight_of_the_scaled_key():
    weights = torch.tensor([0.4, 0.3, 0.2, 0.1])
    misconception = key_lesson.divided_by_alpha(weights, torch.zeros(4), 1.0, 2.0)
    torch.testing.assert_close(misconception, torch.tensor([0.2, 0.2, 0.4 / 3, 0.2 / 3]))


@pytest.mark.parametrize("alpha", [0.5, 3.0])
@pytest.mark.parametrize("score", [-1.5, 1.5])
def test_output_change_formula_equals_attention(alpha, score):
    """Compared with attention before and after: the formula needs the weight of the scaled key only."""
    random = torch.Generator().manual_seed(1)
    keys, v = torch.randn(2, 5, 4, generator=random, dtype=torch.float64)
    query = torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64)
    keys[0, 0] = score
    scaled = keys.clone()
    scaled[0] *= alpha
    (before_out, before), (after_out, after) = (attend_reference(query, k, v, beta=0.7) for k in (keys, scaled))
    change = key_lesson.output_change(before[0], after[0], v)
    torch.testing.assert_close(change, (after_out - before_out)[0])
    predicted = key_lesson.exact(before[0], keys[:, 0], 0.7, alpha)
    torch.testing.assert_close(predicted, after[0])


def test_overflowing_ratio_gives_weight_one():
    weights = torch.tensor([0.5, 0.5], dtype=torch.float64)
    for score, expected in ((1.0, [1.0, 0.0]), (-1.0, [0.0, 1.0])):
        after = key_lesson.exact(weights, torch.tensor([score, 0.0], dtype=torch.float64), 10.0, 1000.0)
        torch.testing.assert_close(after, torch.tensor(expected, dtype=torch.float64))


def test_tied_keys_and_bound_of_the_other_weights():
    q, k = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.0, 5.0]])
    assert temperature.tie_error(q, k, torch.eye(2), math.inf) == 0
    assert temperature.tie_error(q, k, torch.eye(2), 1.0) > 0.01
    scores = q @ k.T
    weights = torch.softmax(3 * scores, -1)
    rest, bound = temperature.other_weight_and_bound(weights, scores, 3.0)
    assert rest == pytest.approx(weights[0, 1].item())
    assert rest <= bound == pytest.approx(math.exp(-3))


def test_unscaled_gradients_vanish_with_many_keys():
    with_scale, without = (
        temperature.measure(256, scale, 256, torch.Generator().manual_seed(0)).vanished for scale in (1 / 16, 1.0)
    )
    assert with_scale < 0.005
    assert without > 0.95


def test_head_outputs_formula_includes_beta():
    assert values("head-outputs")["the same with beta = 1: difference"] > 1
    assert "softargmax(beta " in find("head-outputs").formula


def test_input_sizes_accepted_by_vit_and_cnn():
    measured = values("input-size")
    assert measured["ViT with interpolated positions: accepted image sizes of 4"] == 4
    assert measured["CNN with mean + linear: accepted image sizes of 4"] == 4
    assert measured["CNN with flatten + linear: accepted image sizes of 4"] == 1


def test_classifier_input_is_one_vector_of_model_width():
    claim = find("class-token")
    assert values("class-token", width=24)["input width of the classifier, either pooling"] == 24
    assert "flattened" in claim.misconception
    assert "flattened" not in claim.statement


@pytest.mark.slow
def test_model_trained_to_reverse_attends_to_the_mirror_token():
    measured = values("self-weight")
    assert measured["trained to reverse: fraction of tokens with the largest weight on themselves"] == 0
    assert measured["trained to reverse: mean weight of a token on itself"] < 0.05
    assert measured["trained to reverse: mean weight of a token on its mirror token"] > 0.5
