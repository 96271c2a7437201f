import math
import re
from dataclasses import replace

import pytest
import torch

from clearhead.data import Augmentation
from clearhead.data.dataset import Subset
from clearhead.training import checkpoint, loop
from clearhead.training.config import OptimizerConfig
from clearhead.training.distributed import Ranks
from clearhead.training.loop import DivergedError, lr_multiplier, resume, train
from clearhead.training.optim import Optimizers
from clearhead.training.progress import FINISHED, STOPPED
from clearhead.training.run_directory import RunDirectory
from clearhead.training.state import TrainState
from support.runs import assert_identical, records_of, with_training


def without_randomness(config):
    model = replace(config.model, dropout=0.0, attention_dropout=0.0, drop_path=0.0)
    return replace(config, model=model, data=replace(config.data, augmentation=Augmentation()))


def test_test_record_names_the_step_of_its_checkpoint(config, tmp_path, monkeypatch):
    judge = TrainState.update_best
    monkeypatch.setattr(TrainState, "update_best", lambda self, score: self.step == 4 and judge(self, score))
    tested = train(config, tmp_path / "run", quiet=True).test
    assert tested["best_step"] == RunDirectory.open(tmp_path / "run").best_step() == 4
    run = RunDirectory.open(tmp_path / "run", report=lambda line: None)
    kept = [line for line in (run.path / "metrics.jsonl").read_text().splitlines() if '"test"' not in line]
    (run.path / "metrics.jsonl").write_text("\n".join([*kept, ""]))
    (checkpoint.checkpoint_path(run.path, tested["best_step"]) / "state.json").write_text("{")
    assert resume(run.path, quiet=True).test["best_step"] == 12


@pytest.mark.parametrize(("best", "said"), [(4, "best checkpoint (step 4)"), (None, "last checkpoint (step 12)")])
def test_printed_test_result_names_the_step_of_its_checkpoint(config, tmp_path, monkeypatch, capsys, best, said):
    """Regression test: the line once named the last step, whose weights were not the ones tested."""
    judge = TrainState.update_best
    monkeypatch.setattr(TrainState, "update_best", lambda self, score: self.step == best and judge(self, score))
    outcome = train(config, tmp_path / "run")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("test")]
    expected = f"test of the {said}  loss {outcome.test['loss']:.4f}  accuracy {outcome.test['accuracy']:.2%}"
    assert line.startswith(expected)


def test_records_of_a_run_have_the_expected_kinds_steps_and_values(config, tmp_path):
    outcome = train(config, tmp_path / "run", quiet=True)
    found = RunDirectory.open(tmp_path / "run").records()
    assert [(r["kind"], r["step"]) for r in found] == [
        ("validation", 4),
        ("train", 5),
        ("validation", 8),
        ("train", 10),
        ("train", 12),
        ("validation", 12),
        ("test", 12),
    ]
    assert found[1]["epoch"] == 5 / 5  # 57 examples are 5 full batches of 10
    assert found[1]["lr"] == pytest.approx(0.01 * (1 + torch.cos(torch.tensor(torch.pi / 9)).item()) / 2)
    assert found[-1] == outcome.test
    assert found[-1]["tta"] == "none"
    best = max((r for r in found if r["kind"] == "validation"), key=lambda r: (r["accuracy"], -r["loss"]))
    assert (
        outcome.best_step == found[-1]["best_step"] == best["step"] == RunDirectory.open(tmp_path / "run").best_step()
    )


def test_finished_run_is_tested_only_once(config, tmp_path, monkeypatch):
    first = train(config, tmp_path / "run", quiet=True)
    monkeypatch.setattr(loop, "evaluate", None)
    assert resume(tmp_path / "run", quiet=True) == first
    assert [r["kind"] for r in records_of(tmp_path / "run")].count("test") == 1


def test_run_without_validation_examples_tests_its_last_step(config, tmp_path, monkeypatch):

    data = config.data.load(0)
    empty = replace(data, validation=type(data.validation)(data.validation.images[:0], data.validation.labels[:0]))
    monkeypatch.setattr(type(config.data), "read", lambda task, seed: empty)
    outcome = train(config, tmp_path / "run", quiet=True)
    assert outcome.best_step is None
    assert outcome.test["best_step"] == 12
    assert not [r for r in records_of(tmp_path / "run") if r["kind"] == "validation"]


def test_gradient_accumulation_equals_the_full_batch(config, tmp_path):
    """After one step, the moments of the optimizers are the gradient up to a factor."""
    config = without_randomness(config)
    for n in (1, 3):
        train(with_training(config, grad_accum_steps=n, steps=1), tmp_path / f"in{n}", quiet=True)
    one, three = (RunDirectory.open(tmp_path / f"in{n}").latest_checkpoint() for n in (1, 3))
    moments = [name for name in one.optimizer if name.endswith(("exp_avg", "momentum"))]
    assert len(moments) == len(one.model)
    for name in moments:
        torch.testing.assert_close(three.optimizer[name], one.optimizer[name], rtol=1e-4, atol=1e-7)


def test_early_stopping_by_patience_survives_a_kill_before_the_test(config, tmp_path, monkeypatch):
    config = with_training(config, patience=2, evaluate_every=2, checkpoint_every=100, ema=0.0)
    config = replace(config, optimizer=replace(config.optimizer, lr=0.0, muon_lr=0.0))
    with monkeypatch.context() as patch:
        patch.setattr(loop, "test_best_checkpoint", lambda *parts: None)  # simulates a kill before the test
        outcome = train(config, tmp_path / "run", quiet=True)
    assert (outcome.reason, outcome.step, outcome.best_step) == ("patience", 6, 2)
    outcome = resume(tmp_path / "run", quiet=True)
    assert (outcome.reason, outcome.step, outcome.test["best_step"]) == ("patience", 6, 2)


def test_non_finite_loss_stops_the_run_and_is_not_saved(config, tmp_path):
    optimizer = replace(config.optimizer, name="adamw", lr=1e30, grad_clip=0.0, warmup=0)
    config = with_training(replace(config, optimizer=optimizer), checkpoint_every=1, log_every=1)
    with pytest.raises(DivergedError, match=r"must be finite, got loss .* at step \d+, which was not saved") as caught:
        train(config, tmp_path / "run", quiet=True)
    assert caught.value.exit_code not in (FINISHED, STOPPED)
    failed = int(str(caught.value).split("at step ")[1].split(",")[0])
    assert checkpoint.saved_steps(tmp_path / "run") == list(range(1, failed))
    assert records_of(tmp_path / "run")[-1] == {"kind": "diverged", "step": failed}
    assert records_of(tmp_path / "run")[-2]["step"] == failed - 1


def test_training_preserves_the_rng_state_and_the_number_of_threads(config, tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    train(with_training(config, steps=1, threads=2), tmp_path / "run", quiet=True)
    assert torch.equal(torch.rand(1), expected)
    assert torch.get_num_threads() == 1


def test_bf16_trains_close_to_float32_and_keeps_float32_weights(config, tmp_path):
    config = without_randomness(config)
    for precision in ("float32", "bf16"):
        train(with_training(config, precision=precision, steps=4, ema=0.0), tmp_path / precision, quiet=True)
    exact, rough = (RunDirectory.open(tmp_path / precision) for precision in ("float32", "bf16"))
    assert rough.latest_checkpoint().model["head.weight"].dtype == torch.float32
    exact_loss, rough_loss = exact.records()[0]["loss"], rough.records()[0]["loss"]
    assert rough_loss == pytest.approx(exact_loss, rel=0.1)
    assert rough_loss != exact_loss


def test_existing_folder_is_not_overwritten(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/mine.txt").write_text("precious")
    with pytest.raises(ValueError, match="needs a new folder"):
        train(config, tmp_path / "run", quiet=True)


def test_config_that_does_not_fit_the_data_creates_no_folder(config, tmp_path):
    with pytest.raises(ValueError, match="batch_size must be from 1 to the 57"):
        train(with_training(config, batch_size=58), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_output_without_a_terminal_is_plain_lines(config, tmp_path, capsys):
    train(config, tmp_path / "run")
    out = capsys.readouterr().out
    assert "step 12/12" in out
    assert "examples/s" in out
    assert "test of the best checkpoint (step " in out
    assert "\x1b" not in out


def corrupt_weights(monkeypatch, at):
    """From this step on, updates make weights non-finite."""
    step = Optimizers.step

    def step_and_corrupt(self, multiplier):
        step(self, multiplier)
        step_and_corrupt.made += 1
        if step_and_corrupt.made >= at:
            next(iter(self.weights.values())).data.fill_(float("inf"))

    step_and_corrupt.made = 0
    monkeypatch.setattr(Optimizers, "step", step_and_corrupt)


@pytest.mark.parametrize("evaluate_every", [3, 100])
def test_weights_made_non_finite_by_an_update_are_not_saved(config, tmp_path, monkeypatch, evaluate_every):
    training = replace(config.training, steps=4, evaluate_every=evaluate_every, checkpoint_every=1, log_every=100)
    corrupt_weights(monkeypatch, at=3)
    with pytest.raises(DivergedError, match="not finite after step 3"):
        train(replace(config, training=training), tmp_path / "run", quiet=True)
    assert max(checkpoint.saved_steps(tmp_path / "run")) == 2


def test_gradient_accumulation_of_padded_sequences_equals_the_full_batch(sequences, tmp_path):
    config = replace(sequences, model=replace(sequences.model, dropout=0.0))
    train(with_training(config, grad_accum_steps=1), tmp_path / "one", quiet=True)
    train(with_training(config, grad_accum_steps=3), tmp_path / "three", quiet=True)
    for mine, theirs in zip(records_of(tmp_path / "one"), records_of(tmp_path / "three"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


def test_padding_and_mask_check_are_printed_once_at_the_start(sequences, tmp_path, capsys, signal_at):
    undo = signal_at(5)
    train(sequences, tmp_path / "run")
    undo()
    said = capsys.readouterr().out
    assert said.count("masks      checked: no output depends on later tokens or on padding") == 1
    assert re.search(r"^padding    [\d.]+% of all tokens; [\d.]+% without sorting by length$", said, re.MULTILINE)
    resume(tmp_path / "run")
    assert "masks      checked" not in capsys.readouterr().out


def test_run_without_a_test_set_finishes_without_a_test(sequences, tmp_path, monkeypatch):
    data = loop.build_context(sequences, Ranks(), shard=False, report=pytest.fail).data
    none = Subset(data.test, torch.arange(0))
    monkeypatch.setattr(type(sequences.data), "read", lambda task, seed: replace(data, test=none))
    outcome = train(sequences, tmp_path / "run", quiet=True)
    assert (outcome.reason, outcome.test) == ("finished", None)
    assert {record["kind"] for record in records_of(tmp_path / "run")} == {"train", "validation"}


def test_measuring_precisions_does_not_change_training(config, tmp_path, monkeypatch):
    monkeypatch.setattr("clearhead.training.context.has_bf16", lambda device: True)
    train(with_training(config, precision="auto"), tmp_path / "auto", quiet=True)
    chosen = RunDirectory.open(tmp_path / "auto").config["training"]["precision"]
    train(with_training(config, precision=chosen), tmp_path / "named", quiet=True)
    assert_identical(tmp_path / "auto", tmp_path / "named")


def at(step, **fields):
    return lr_multiplier(step, 110, OptimizerConfig(warmup=10, **fields))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_warmup_rises_linearly_to_1(schedule):
    assert [at(step, schedule=schedule) for step in range(10)] == [(step + 1) / 10 for step in range(10)]
    assert at(10, schedule=schedule) == 1


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("final", [0.0, 0.1])
def test_schedule_decays_monotonically_to_the_final_fraction(schedule, final):
    values = [at(step, schedule=schedule, final_lr_fraction=final) for step in range(10, 111)]
    assert values[-1] == pytest.approx(final)
    assert values == sorted(values, reverse=True)
    assert values[50] == pytest.approx((1 + final) / 2)
    assert at(500, schedule=schedule, final_lr_fraction=final) == pytest.approx(final)


def test_schedules_match_their_closed_forms():
    assert at(35, schedule="cosine") == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert at(35, schedule="linear") == pytest.approx(0.75)
    assert at(35, schedule="constant", final_lr_fraction=0.1) == 1


def test_warmup_as_long_as_training_does_not_divide_by_zero():
    assert lr_multiplier(4, 5, OptimizerConfig(warmup=5)) == 1
    assert lr_multiplier(0, 1, OptimizerConfig()) == 1
