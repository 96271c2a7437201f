import json
from dataclasses import replace

import pytest
import torch

from clearhead.training.context import build_context, isolated_torch_state
from clearhead.training.distributed import Ranks
from clearhead.training.loop import train_step
from clearhead.training.progress import StopRequest
from clearhead.training.state import TrainState, capture_state, load_eval_weights, report_environment_changes, restore


@pytest.fixture
def ctx(config):
    with isolated_torch_state(1):
        yield build_context(config, Ranks(), shard=False, report=pytest.fail)


def test_train_state_round_trips_through_json_with_elapsed_time():
    state = TrainState(
        step=3, sums=[0.1, 1.0, 2.0, 3.0, 1e-300], best_step=2, best_score=[0.5, -1 / 3], evals_since_best=1
    )
    state.start_time -= 100
    back = TrainState.from_json(json.loads(json.dumps(state.to_json())))
    assert back.seconds == pytest.approx(state.seconds, abs=1)
    back.start_time = state.start_time
    assert back == state


def test_best_has_the_highest_accuracy_then_the_lowest_loss():
    state = TrainState()
    results = [(0.5, 1.0), (0.4, 0.1), (0.5, 0.9), (0.5, 0.9), (0.6, 2.0)]
    results_of_update = []
    for state.step, (accuracy, loss) in enumerate(results, 1):
        results_of_update.append((state.update_best([accuracy, -loss]), state.evals_since_best, state.best_step))
    assert results_of_update == [(True, 0, 1), (False, 1, 1), (True, 0, 3), (False, 1, 3), (True, 0, 5)]


def test_restored_state_reproduces_the_next_step_bit_for_bit(ctx):
    state = TrainState()
    train_step(ctx, state, StopRequest())
    saved = capture_state(ctx, state)
    saved = type(saved)(
        saved.step,
        {n: t.clone() for n, t in saved.model.items()},
        {n: t.clone() for n, t in saved.optimizer.items()},
        json.loads(json.dumps(saved.state)),
    )
    train_step(ctx, state, StopRequest())
    expected = {name: weight.clone() for name, weight in ctx.model.state_dict().items()}
    again = build_context(ctx.config, Ranks(), shard=False, report=pytest.fail)
    back = restore(again, saved, pytest.fail)
    assert back.step == 1
    train_step(again, back, StopRequest())
    assert back.sums == state.sums
    assert all(torch.equal(weight, expected[name]) for name, weight in again.model.state_dict().items())


def test_load_eval_weights_loads_the_averages(ctx):
    state = TrainState()
    train_step(ctx, state, StopRequest())
    averages = {name: tensor.clone() for name, tensor in ctx.ema.averages.items()}
    assert not torch.equal(averages["head.weight"], ctx.model.head.weight)
    load_eval_weights(ctx, capture_state(ctx, state))
    assert all(torch.equal(weight, averages[name]) for name, weight in ctx.model.named_parameters())


def test_rank_without_a_saved_rng_state_draws_its_own_numbers(ctx):
    saved = capture_state(ctx, TrainState())
    other = build_context(ctx.config, Ranks(rank=1), shard=False, report=pytest.fail)
    restore(other, saved, pytest.fail)
    assert not torch.equal(torch.get_rng_state(), saved.optimizer["random.rank0"])


def test_resume_with_a_changed_data_file_is_refused(ctx):
    def reading(digest):
        return replace(ctx, data=replace(ctx.data, files={"my.dict": digest}))

    saved = capture_state(reading("one"), TrainState())
    assert restore(reading("one"), saved, pytest.fail).step == 0
    with pytest.raises(ValueError, match=r"data has changed: my\.dict"):
        restore(reading("other"), saved, pytest.fail)
    assert (
        restore(reading("other"), capture_state(ctx, TrainState()), pytest.fail).step == 0
    )  # a checkpoint without digests


def test_restore_without_a_checkpoint_starts_at_step_0(ctx):
    assert restore(ctx, None, pytest.fail).step == 0


def test_changed_environment_is_reported():
    reports = []
    report_environment_changes({"torch": "2.6", "threads": 2}, {"torch": "2.6", "threads": 2}, reports.append)
    assert reports == []
    report_environment_changes({"torch": "2.6"}, {"torch": "2.6", "new field": 1}, reports.append)
    assert reports == []
    report_environment_changes({"torch": "2.6", "threads": 2}, {"torch": "2.7", "threads": 2}, reports.append)
    assert reports == [
        "results may differ in the last digits from those of an uninterrupted run: torch was 2.6, is 2.7"
    ]


def test_changed_precision_is_reported(ctx, config):
    saved, reports = capture_state(ctx, TrainState()), []
    other = replace(config, training=replace(config.training, precision="bf16"))
    restore(build_context(other, Ranks(), shard=False, report=pytest.fail), saved, reports.append)
    assert reports[-1] == "results will differ from those of an uninterrupted run: precision was float32, is bf16"


@pytest.mark.parametrize("has", [True, False])
def test_configured_precision_does_not_depend_on_the_processor(config, monkeypatch, has):
    monkeypatch.setattr("clearhead.training.context.has_bf16", lambda device: has)
    assert build_context(config, Ranks(), shard=False, report=pytest.fail).environment()["precision"] == "float32"
