from dataclasses import replace

import pytest
import torch

from clearhead.recipes import config_of, trial
from clearhead.recipes.trial import Estimate, estimate
from clearhead.training.config import MAX_STEPS

SMALL = {"data.limit": 1000, "data.validation": 100, "training.batch_size": 50, "training.epochs": 3}


def test_the_estimate_counts_parameters_steps_and_evaluations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trial, "TIMED_STEPS", 2)
    before = torch.get_rng_state()
    found = estimate(config_of("reverse", SMALL))
    assert torch.equal(torch.get_rng_state(), before)
    assert (found.parameters, found.steps, found.steps_per_epoch, found.examples) == (10_282, 60, 20, 1000)
    assert found.evaluations == 2  # every 50 steps and at the end
    assert 0 < found.seconds_per_step < 10
    assert list(tmp_path.iterdir()) == []


def test_memory_grows_with_the_batch_and_shrinks_with_gradient_accumulation(monkeypatch):
    monkeypatch.setattr(trial, "TIMED_STEPS", 1)

    def memory(**training):
        return estimate(config_of("reverse", SMALL | {f"training.{k}": v for k, v in training.items()})).memory

    weights = 10_282 * 4
    assert memory() > 4 * weights  # weights, gradients and AdamW's two moments
    assert memory(batch_size=100) > 1.5 * memory() - 4 * weights
    assert memory(batch_size=100, grad_accum_steps=4) < memory(batch_size=100) / 2
    assert memory(ema=0.9) - memory() == weights


ESTIMATE = Estimate(
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


def test_total_time_is_the_sum_of_its_parts():
    assert "5.0% of all tokens; 50.0% without sorting by length" in str(ESTIMATE)
    assert ESTIMATE.seconds == 60 * 0.5 + 3 * 2 + 9
    assert ESTIMATE.seconds_per_epoch == 20 * 0.5 + 2
    assert "45 s, including the test; if started now, it ends at" in str(ESTIMATE)
    assert "60 (3 epochs)" in str(ESTIMATE)
    assert "20 (1 epoch)" in str(replace(ESTIMATE, steps=20))
    assert "test" not in str(replace(ESTIMATE, seconds_per_test=0.0))


def test_times_are_formatted_without_scientific_notation():
    """Regression test: an epoch of 5,560 s was shown as 5.56e+03."""
    slow = replace(ESTIMATE, steps_per_epoch=5556, seconds_per_step=1.0, steps=33336)
    assert "time per step      1.0 s\n" in str(slow)
    assert "time per epoch     1 h 33 min, including validation\n" in str(slow)
    assert "total time         9 h 16 min, including the test" in str(slow)
    assert "e+0" not in str(replace(slow, steps_per_epoch=3, steps=10**7))


def test_epoch_time_does_not_depend_on_the_number_of_steps():
    assert replace(ESTIMATE, steps=1, evaluations=1).seconds_per_epoch == ESTIMATE.seconds_per_epoch
    assert replace(ESTIMATE, evaluations_per_epoch=4.0).seconds_per_epoch == 20 * 0.5 + 4 * 2


def test_evaluations_per_epoch_do_not_depend_on_the_number_of_steps(monkeypatch):
    monkeypatch.setattr(trial, "TIMED_STEPS", 1)
    short = {"training.epochs": 0, "training.steps": 2}
    assert estimate(config_of("reverse", SMALL | short | {"training.evaluate_every": 5})).evaluations_per_epoch == 4
    assert estimate(config_of("reverse", SMALL | short | {"training.evaluate_every": 0})).evaluations_per_epoch == 1
    assert estimate(config_of("reverse", SMALL | short | {"data.validation": 0})).evaluations_per_epoch == 0


@pytest.mark.parametrize(("tta", "n_views"), [("none", 1), ("flip", 2), ("shift", 6)])
def test_test_time_includes_every_tta_view(monkeypatch, tta, n_views):
    monkeypatch.setattr(trial, "TIMED_STEPS", 1)
    monkeypatch.setattr(trial, "time_example", lambda ctx: 0.25)
    small = {"data.limit": 100, "data.validation": 40, "training.batch_size": 10, "model.width": 8, "model.depth": 1}
    found = estimate(config_of("mnist", small | {"training.tta": tta}))
    assert found.seconds_per_evaluation == 40 * 0.25
    assert found.seconds_per_test == 10_000 * n_views * 0.25


def test_without_validation_the_test_set_is_timed(monkeypatch):
    monkeypatch.setattr(trial, "TIMED_STEPS", 1)
    found = estimate(config_of("reverse", SMALL | {"data.validation": 0}))
    assert found.seconds_per_evaluation == 0
    assert 0 < found.seconds_per_test < 100


def test_runs_longer_than_a_century_have_no_finish_date():
    found = replace(ESTIMATE, steps=MAX_STEPS, steps_per_epoch=1, seconds_per_step=1.0)
    assert "more than a century from now" in str(found)
