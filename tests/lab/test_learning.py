import pytest
import torch
from torch import nn

from clearhead.data.vocab import IGNORE_INDEX
from clearhead.lab import masks_and_training
from clearhead.lab.learning import accuracy, learning_curve, mean_over_seeds, run_seeds, step_budgets, train_recipe


def argmax_task(random, n):
    numbers = torch.randn(n, 3, generator=random)
    return numbers, numbers.argmax(1)


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))


def test_smaller_budget_is_a_prefix_of_a_larger_one():
    curve = learning_curve(small_net(), argmax_task, budgets=[5, 50, 120], seed=0)
    for i, budget in enumerate((5, 50, 120)):
        assert learning_curve(small_net(), argmax_task, budgets=[budget], seed=0) == [curve[i]]
    assert curve[-1] > curve[0]


def test_step_budgets_are_sorted_and_positive():
    assert step_budgets(200, 0.5, 1, 5) == [100, 200, 1000]
    assert step_budgets(1, 0.25, 1, 5) == [1, 5]


def test_accuracy_excludes_ignored_targets():
    def task(random, n):
        return torch.eye(2), torch.tensor([0, IGNORE_INDEX])

    assert accuracy(nn.Identity(), task, seed=0) == 1


def test_seeds_use_disjoint_training_runs():
    runs = [run_seed for seed in range(4) for run_seed in run_seeds(seed, 3)]
    assert len(set(runs)) == len(runs) == 12
    assert run_seeds(7, 1) == [7]


def test_mean_over_seeds_averages_each_number():
    assert mean_over_seeds(lambda seed: [seed, 10 * seed], 0, 3) == [1, 10]
    assert mean_over_seeds(lambda seed: [seed, 10 * seed], 1, 3) == [4, 40]


@pytest.mark.parametrize("has_bf16", [True, False])
def test_lab_models_are_trained_in_float32_on_every_processor(has_bf16, monkeypatch):
    """With bfloat16 on processors that support it, `augmentation` was refuted there and held elsewhere."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    for ctx in (
        masks_and_training.train_small_vit(2, 100, 1, seed=0),
        train_recipe("mnist-plain", {"data.limit": 200}, 1),
    ):
        assert ctx.environment()["precision"] == "float32"
