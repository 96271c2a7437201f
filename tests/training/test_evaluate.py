from dataclasses import replace

import pytest
import torch
from torch import nn

from clearhead.data import datasets
from clearhead.data.dataset import Images
from clearhead.models.config import build_model
from clearhead.training import objectives as home
from clearhead.training.distributed import Ranks
from clearhead.training.loop import train
from clearhead.training.objectives import OBJECTIVES, evaluate
from clearhead.training.optim import eval_weights
from clearhead.training.run_directory import RunDirectory


class Rows(nn.Module):
    """Scores that are the pixels of the first row; dropout would spoil them."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.9)
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        assert len(images)
        return self.dropout(images[:, 0, 0])


def images(n):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (n, 1, 2, 3), generator=generator)
    return Images(pixels.float(), torch.randint(3, (n,), generator=generator))


def test_it_is_loss_and_accuracy_over_all_examples_without_dropout(monkeypatch):
    monkeypatch.setattr(home, "BATCH_SIZE", 4)
    data, model = images(10), Rows()
    scores = data.images[:, 0, 0]
    found = evaluate(model, OBJECTIVES["classification"], data, None)
    assert found["accuracy"] == (scores.argmax(1) == data.labels).double().mean().item()
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(scores, data.labels).item(), rel=1e-6)
    assert model.calls == 3
    assert model.training


def test_processes_share_the_examples_each_once(monkeypatch):
    """A process without a share of the last batch still asks the model, as the others do, and counts nothing."""
    monkeypatch.setattr(home, "BATCH_SIZE", 4)
    data, whole = images(9), torch.zeros(5, dtype=torch.float64)
    sums, calls = [], []
    monkeypatch.setattr(Ranks, "all_reduce_sum", lambda self, numbers: sums.append(numbers.clone()) or numbers + 1)
    for rank in range(3):
        model = Rows()
        evaluate(model, OBJECTIVES["classification"], data, None, Ranks(rank, 3))
        calls.append(model.calls)
    evaluate(Rows(), OBJECTIVES["classification"], data, None)
    *parts, whole = sums
    assert calls == [3, 3, 3]
    assert min(part[1] for part in parts) < max(part[1] for part in parts)
    torch.testing.assert_close(sum(parts), whole)


def test_flip_averaging_is_the_mean_of_both_answers():
    data = images(7)
    found = evaluate(Rows(), OBJECTIVES["classification"], data, None, tta="flip")
    scores = data.images[:, 0, 0]
    mean = (scores + scores.flip(-1)) / 2
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(mean, data.labels).item(), rel=1e-6)
    assert found["loss"] != pytest.approx(nn.functional.cross_entropy(scores, data.labels).item(), rel=1e-3)


def test_evaluation_draws_no_random_numbers():
    torch.manual_seed(0)
    expected = torch.get_rng_state()
    evaluate(Rows(), OBJECTIVES["classification"], images(3), None)
    assert torch.equal(torch.get_rng_state(), expected)


def test_evaluation_is_in_float32_whatever_the_precision_of_training(config, tmp_path):
    train(replace(config, training=replace(config.training, precision="bf16")), tmp_path / "run", quiet=True)
    run = RunDirectory.open(tmp_path / "run")
    data, found = datasets.load_dataset(config.data, 0), run.best_checkpoint()
    model = build_model(config.model)
    model.load_state_dict(eval_weights(found.model, found.optimizer))
    expected = evaluate(model, OBJECTIVES[config.objective], data.test, data.normalize)
    tested = run.records()[-1]
    assert {name: tested[name] for name in expected} == expected
