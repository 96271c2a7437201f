"""Resuming an interrupted run reproduces the uninterrupted run bit for bit."""

import json
import os
import shutil
import signal
from dataclasses import replace

import pytest

from clearhead.data.batches import Batches
from clearhead.training import checkpoint, loop
from clearhead.training.loop import resume, train
from clearhead.training.progress import FINISHED, STOPPED
from clearhead.training.run_directory import RunDirectory
from support.runs import assert_identical, records_of, with_training


def test_run_interrupted_at_any_step_resumes_bit_for_bit(config, tmp_path, signal_at):
    assert train(config, tmp_path / "whole", quiet=True).reason == "finished"
    for step in range(1, 12):
        undo = signal_at(step)
        stopped = train(config, tmp_path / f"at{step}", quiet=True)
        undo()
        assert (stopped.reason, stopped.step, stopped.test, stopped.exit_code) == ("stopped", step, None, STOPPED)
        ended = resume(tmp_path / f"at{step}", quiet=True)
        assert (ended.reason, ended.step, ended.exit_code) == ("finished", 12, FINISHED)
        assert_identical(tmp_path / f"at{step}", tmp_path / "whole")


@pytest.mark.parametrize("from_the_end", [1, 2], ids=["during the test", "during the last validation"])
def test_signal_after_the_last_step_stops_before_the_test_is_recorded(
    config, tmp_path, monkeypatch, capfd, from_the_end
):
    asked, whole, n_evaluations = [], loop.evaluate, 0

    def counted(*args, **options):
        result = whole(*args, **options)
        asked.append(args)
        if len(asked) == n_evaluations - from_the_end + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    monkeypatch.setattr(loop, "evaluate", counted)
    train(config, tmp_path / "whole", quiet=True)
    n_evaluations = len(asked)
    asked.clear()
    stopped = train(config, tmp_path / "run", quiet=True)
    assert (stopped.reason, stopped.step, stopped.test, stopped.exit_code) == ("stopped", 12, None, STOPPED)
    assert ("SIGTERM: stopping (repeat" in capfd.readouterr().err) == (from_the_end == 1)
    assert resume(tmp_path / "run", quiet=True).test is not None
    assert_identical(tmp_path / "run", tmp_path / "whole")


def test_signal_in_the_last_step_stops_before_the_test(config, tmp_path, signal_at):
    train(config, tmp_path / "whole", quiet=True)
    undo = signal_at(12)
    stopped = train(config, tmp_path / "last", quiet=True)
    undo()
    assert (stopped.reason, stopped.step, stopped.exit_code) == ("stopped", 12, STOPPED)
    assert resume(tmp_path / "last", quiet=True).reason == "finished"
    assert_identical(tmp_path / "last", tmp_path / "whole")


def test_run_with_only_damaged_checkpoints_does_not_restart(config, tmp_path):
    train(config, tmp_path / "run", quiet=True)
    for place in (tmp_path / "run/checkpoints").iterdir():
        (place / "state.json").write_text("{")
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    with pytest.raises(OSError, match="no checkpoint can be used"):
        resume(tmp_path / "run", quiet=True)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_run_with_missing_checkpoints_does_not_restart(config, tmp_path):
    train(config, tmp_path / "run", quiet=True)
    shutil.rmtree(tmp_path / "run/checkpoints")
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    for _ in ("best.json names a step", "the log has a test record"):
        with pytest.raises(OSError, match="its checkpoints are missing; restore them"):
            resume(tmp_path / "run", quiet=True)
        (tmp_path / "run/best.json").unlink(missing_ok=True)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_extended_run_reports_the_change_and_is_tested_again(config, tmp_path, capsys):
    first = train(config, tmp_path / "run", quiet=True)
    settings = json.loads((tmp_path / "run/config.json").read_text())
    settings["training"]["steps"] = 16
    (tmp_path / "run/config.json").write_text(json.dumps(settings))
    longer = resume(tmp_path / "run")
    assert (
        "config.json has changed since the checkpoint was saved: training.steps was 12, is 16"
        in capsys.readouterr().err
    )
    assert (first.test["step"], longer.test["step"]) == (12, 16)
    assert resume(tmp_path / "run", quiet=True).test == longer.test


def test_killed_run_resumes_from_its_latest_checkpoint(config, tmp_path, monkeypatch):
    train(config, tmp_path / "whole", quiet=True)
    whole = Batches.at

    def at(self, step, rank=0, world=1):
        if step == 10:
            raise KeyboardInterrupt
        return whole(self, step, rank, world)

    monkeypatch.setattr(Batches, "at", at)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "killed", quiet=True)
    monkeypatch.setattr(Batches, "at", whole)
    assert records_of(tmp_path / "killed")[-1]["step"] == 10  # logged after the checkpoint: must be dropped
    assert checkpoint.saved_steps(tmp_path / "killed")[-1] == 9
    resume(tmp_path / "killed", quiet=True)
    assert_identical(tmp_path / "killed", tmp_path / "whole")


def test_runs_with_different_seeds_are_not_identical(config, tmp_path):
    train(config, tmp_path / "a", quiet=True)
    train(replace(config, seed=1), tmp_path / "b", quiet=True)
    with pytest.raises(AssertionError):
        assert_identical(tmp_path / "a", tmp_path / "b")


def test_sequence_model_resumes_bit_for_bit(sequences, tmp_path, signal_at):
    train(sequences, tmp_path / "whole", quiet=True)
    undo = signal_at(5)
    assert train(sequences, tmp_path / "stopped", quiet=True).reason == "stopped"
    undo()
    assert resume(tmp_path / "stopped", quiet=True).step == 12
    assert_identical(tmp_path / "stopped", tmp_path / "whole")


def test_auto_precision_is_chosen_once_and_recorded(config, tmp_path, monkeypatch, signal_at):
    """A resumed run keeps its precision: another machine might choose another one."""
    chosen = iter(["bf16", "float32"])
    monkeypatch.setattr("clearhead.training.context.faster_precision", lambda step, device: (next(chosen), "measured"))
    undo = signal_at(5)
    train(with_training(config, precision="auto"), tmp_path / "run", quiet=True)
    undo()
    assert RunDirectory.open(tmp_path / "run").config["training"]["precision"] == "bf16"
    resume(tmp_path / "run", quiet=True)
    train(with_training(config, precision="bf16"), tmp_path / "named", quiet=True)
    assert_identical(tmp_path / "run", tmp_path / "named")
    assert next(chosen) == "float32"
