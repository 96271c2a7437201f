import pytest
import torch
from torch import nn

from clearhead.training.optim import WeightEMA, eval_weights


def test_the_average_is_the_weighted_sum_of_all_weights_so_far():
    """With a constant decay d: d^n w_0 + (1 - d) sum d^(n-i) w_i."""
    model = nn.Linear(2, 1, bias=False)
    average = WeightEMA(model, decay=0.05)  # below (1 + 0) / (10 + 0): constant from the first step
    seen = [model.weight.detach().clone()]
    for step in range(4):
        nn.init.normal_(model.weight)
        seen.append(model.weight.detach().clone())
        average.update(step)
    d, n = 0.05, 4
    expected = d**n * seen[0] + sum((1 - d) * d ** (n - i) * seen[i] for i in range(1, n + 1))
    torch.testing.assert_close(average.averages["weight"], expected)


def test_the_first_steps_forget_faster():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    average = WeightEMA(model, decay=0.999)
    nn.init.ones_(model.weight)
    average.update(0)
    assert average.averages["weight"].item() == pytest.approx(1 - 1 / 10)
    late = WeightEMA(model, decay=0.999)
    nn.init.zeros_(model.weight)
    late.update(10**6)
    assert late.averages["weight"].item() == pytest.approx(0.999)


def test_the_model_has_the_average_inside_and_its_own_weights_after_an_error_too():
    model = nn.Linear(2, 2)
    average = WeightEMA(model, decay=0.9)
    own = {name: nn.init.normal_(weight).detach().clone() for name, weight in model.named_parameters()}
    average.update(0)
    with pytest.raises(KeyError), average.average_parameters():  # noqa: PT012
        assert all(torch.equal(w, average.averages[n]) for n, w in model.named_parameters())
        assert not torch.equal(model.weight, own["weight"])
        raise KeyError
    assert all(torch.equal(w, own[n]) for n, w in model.named_parameters())


def test_a_checkpoint_is_used_with_its_averages_if_it_has_any():
    model, average = {"w": torch.zeros(1), "buffer": torch.ones(1)}, torch.full((1,), 2.0)
    assert eval_weights(model, {"optim.w.exp_avg": average}) == model
    assert eval_weights(model, {"ema.w": average}) == {"w": average, "buffer": model["buffer"]}
