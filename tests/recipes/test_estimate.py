import torch

from clearhead.recipes import estimate as module
from clearhead.recipes.all import config_of
from clearhead.recipes.estimate import Estimate, estimate
from clearhead.training.config import MOST_STEPS

SMALL = {"data.limit": 1000, "data.validation": 100, "training.batch_size": 50, "training.epochs": 3}


def test_the_estimate_counts_what_training_will_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "TIMED", 2)
    before = torch.get_rng_state()
    found = estimate(config_of("reverse", SMALL))
    assert torch.equal(torch.get_rng_state(), before)
    assert (found.parameters, found.steps, found.steps_per_epoch, found.examples) == (10_282, 60, 20, 1000)
    assert found.evaluations == 2  # every 50 steps, and at the end
    assert 0 < found.seconds_per_step < 10
    assert list(tmp_path.iterdir()) == []


def test_memory_grows_with_the_batch_and_shrinks_with_portions(monkeypatch):
    monkeypatch.setattr(module, "TIMED", 1)

    def memory(**training):
        return estimate(config_of("reverse", SMALL | {f"training.{k}": v for k, v in training.items()})).memory

    weights = 10_282 * 4
    assert memory() > 4 * weights  # weights, gradients and AdamW's two moments
    assert memory(batch_size=100) > 1.5 * memory() - 4 * weights
    assert memory(batch_size=100, accumulate=4) < memory(batch_size=100) / 2
    assert memory(ema=0.9) - memory() == weights


def test_seconds_add_up():
    found = Estimate(
        parameters=1,
        memory=2**20,
        examples=100,
        steps=60,
        steps_per_epoch=20,
        seconds_per_step=0.5,
        seconds_per_evaluation=2.0,
        evaluations=3,
        padding=(0.05, 0.5),
    )
    assert "5.0% of all tokens; 50.0% without sorting by length" in str(found)
    assert found.seconds == 36
    assert found.seconds_per_epoch == 12
    assert "0:36" in str(found)
    assert "60 (3 epochs)" in str(found)
    assert "done at" in str(found)


def test_what_takes_a_century_has_no_date():
    found = Estimate(
        parameters=1,
        memory=1,
        examples=1,
        steps=MOST_STEPS,
        steps_per_epoch=1,
        seconds_per_step=1.0,
        seconds_per_evaluation=0.0,
        evaluations=0,
        padding=None,
    )
    assert "nobody here will see it done" in str(found)
