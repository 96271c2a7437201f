from dataclasses import replace

import pytest
import torch

from clearhead.recipes import estimate as module
from clearhead.recipes.estimate import Estimate, estimate
from clearhead.recipes.registry import config_of
from clearhead.training.config import MAX_STEPS

SMALL = {"data.limit": 1000, "data.validation": 100, "training.batch_size": 50, "training.epochs": 3}


def test_the_estimate_counts_what_training_will_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "TIMED_STEPS", 2)
    before = torch.get_rng_state()
    found = estimate(config_of("reverse", SMALL))
    assert torch.equal(torch.get_rng_state(), before)
    assert (found.parameters, found.steps, found.steps_per_epoch, found.examples) == (10_282, 60, 20, 1000)
    assert found.evaluations == 2  # every 50 steps, and at the end
    assert 0 < found.seconds_per_step < 10
    assert list(tmp_path.iterdir()) == []


def test_memory_grows_with_the_batch_and_shrinks_with_portions(monkeypatch):
    monkeypatch.setattr(module, "TIMED_STEPS", 1)

    def memory(**training):
        return estimate(config_of("reverse", SMALL | {f"training.{k}": v for k, v in training.items()})).memory

    weights = 10_282 * 4
    assert memory() > 4 * weights  # weights, gradients and AdamW's two moments
    assert memory(batch_size=100) > 1.5 * memory() - 4 * weights
    assert memory(batch_size=100, grad_accum_steps=4) < memory(batch_size=100) / 2
    assert memory(ema=0.9) - memory() == weights


PARTS = Estimate(
    parameters=1,
    memory=2**20,
    examples=100,
    steps=60,
    steps_per_epoch=20,
    seconds_per_step=0.5,
    seconds_per_evaluation=2.0,
    evaluations=3,
    evaluations_per_epoch=1.0,
    seconds_per_test=9.0,
    padding=(0.05, 0.5),
)


def test_seconds_add_up():
    assert "5.0% of all tokens; 50.0% without sorting by length" in str(PARTS)
    assert PARTS.seconds == 60 * 0.5 + 3 * 2 + 9
    assert PARTS.seconds_per_epoch == 20 * 0.5 + 2
    assert "45 s, including the test; if started now, it ends at" in str(PARTS)
    assert "60 (3 epochs)" in str(PARTS)
    assert "20 (1 epoch)" in str(replace(PARTS, steps=20))
    assert "test" not in str(replace(PARTS, seconds_per_test=0.0))


def test_times_are_in_hours_and_minutes_never_in_scientific_notation():
    """An epoch of 5,560 s was shown as 5.56e+03."""
    slow = replace(PARTS, steps_per_epoch=5556, seconds_per_step=1.0, steps=33336)
    assert "time per step      1.0 s\n" in str(slow)
    assert "time per epoch     1 h 33 min, including validation\n" in str(slow)
    assert "total time         9 h 16 min, including the test" in str(slow)
    assert "e+0" not in str(replace(slow, steps_per_epoch=3, steps=10**7))


def test_a_run_shorter_than_an_epoch_does_not_change_how_long_an_epoch_is():
    assert replace(PARTS, steps=1, evaluations=1).seconds_per_epoch == PARTS.seconds_per_epoch
    assert replace(PARTS, evaluations_per_epoch=4.0).seconds_per_epoch == 20 * 0.5 + 4 * 2


def test_evaluations_of_an_epoch_are_counted_whatever_the_run_is(monkeypatch):
    monkeypatch.setattr(module, "TIMED_STEPS", 1)
    short = {"training.epochs": 0, "training.steps": 2}
    assert estimate(config_of("reverse", SMALL | short | {"training.evaluate_every": 5})).evaluations_per_epoch == 4
    assert estimate(config_of("reverse", SMALL | short | {"training.evaluate_every": 0})).evaluations_per_epoch == 1
    assert estimate(config_of("reverse", SMALL | short | {"data.validation": 0})).evaluations_per_epoch == 0


@pytest.mark.parametrize(("tta", "n_views"), [("none", 1), ("flip", 2), ("shift", 6)])
def test_the_test_asks_each_view_of_each_of_its_examples(monkeypatch, tta, n_views):
    monkeypatch.setattr(module, "TIMED_STEPS", 1)
    monkeypatch.setattr(module, "time_example", lambda ctx: 0.25)
    small = {"data.limit": 100, "data.validation": 40, "training.batch_size": 10, "model.width": 8, "model.depth": 1}
    found = estimate(config_of("mnist", small | {"training.tta": tta}))
    assert found.seconds_per_evaluation == 40 * 0.25
    assert found.seconds_per_test == 10_000 * n_views * 0.25


def test_without_validation_the_test_is_timed_by_its_own_examples(monkeypatch):
    monkeypatch.setattr(module, "TIMED_STEPS", 1)
    found = estimate(config_of("reverse", SMALL | {"data.validation": 0}))
    assert found.seconds_per_evaluation == 0
    assert 0 < found.seconds_per_test < 100


def test_what_takes_a_century_has_no_date():
    found = replace(PARTS, steps=MAX_STEPS, steps_per_epoch=1, seconds_per_step=1.0)
    assert "more than a century from now" in str(found)
