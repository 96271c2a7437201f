import os
import signal
from dataclasses import replace

import pytest
import torch

from clearhead.data.batches import Batches
from clearhead.models.config import PredictorConfig
from clearhead.recipes.trial import compare, train_and_kill, verify_resume
from clearhead.tasks.sequences import Reverse
from clearhead.training import checkpoint
from clearhead.training.config import OptimizerConfig, RunConfig, TrainingConfig
from clearhead.training.loop import train

REVERSE = RunConfig(
    recipe="reverse",
    model=PredictorConfig(width=8, depth=1, num_heads=1, in_features=10, out_features=10, dropout=0.1),
    data=Reverse(length=4, validation=50, limit=500),
    optimizer=OptimizerConfig(name="muon"),
    training=TrainingConfig(
        steps=40, batch_size=16, checkpoint_every=6, evaluate_every=40, ema=0.9, precision="float32"
    ),
)


@pytest.mark.slow
def test_killed_run_resumes_bit_for_bit(tmp_path):
    lines: list[str] = []
    found = verify_resume(REVERSE, tmp_path, lines.append)
    assert found.is_exact, found.differences
    assert found.steps == 40
    assert 20 <= found.killed_at < 40
    assert found.resumed_from in range(18, 40, 6)
    assert lines == [
        "training without interruption ...",
        "trained 40 steps; training again in a process that is killed halfway ...",
        f"killed at step {found.killed_at}; resuming from step {found.resumed_from} ...",
        "resumed and finished; comparing the two runs ...",
    ]


def test_compare_names_every_difference(tmp_path):
    train(REVERSE, tmp_path / "a", quiet=True)
    train(REVERSE, tmp_path / "b", quiet=True)
    assert compare(tmp_path / "a", tmp_path / "b") == []
    place = tmp_path / "b/checkpoints" / checkpoint.step_name(REVERSE.training.steps)
    state = checkpoint.load(place)
    state.model["head.bias"][0] = (
        -0.0 if state.model["head.bias"][0] == 0 else torch.nextafter(state.model["head.bias"][0], torch.tensor(9.0))
    )
    state.state["train_state"]["evals_since_best"] += 1
    checkpoint.save(tmp_path / "b", state)
    assert compare(tmp_path / "a", tmp_path / "b") == ["the training state", "head.bias"]


@pytest.mark.slow
def test_failing_child_is_an_error_and_imports_nothing_from_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torch.py").write_text("open('PWNED', 'w')")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/mine.txt").write_text("precious")
    config = replace(REVERSE, seed=1)
    with pytest.raises(ValueError, match=r"training failed before step 3, .*: ValueError: a new run needs a new"):
        train_and_kill(config, tmp_path / "run", 3)
    assert not (tmp_path / "PWNED").exists()


def test_child_imports_the_same_package_as_its_parent(tmp_path, monkeypatch):
    """Even if the package was imported from a folder that is not on the path of other processes."""
    package = tmp_path / "home/clearhead"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import sys; raise SystemExit(f'mine, safe_path={sys.flags.safe_path}')")
    monkeypatch.setattr("clearhead.recipes.trial.PACKAGE_ROOT", tmp_path / "home")
    with pytest.raises(ValueError, match=r"failed before step 3, .*: mine, safe_path=True"):
        train_and_kill(REVERSE, tmp_path / "run", 3)


def test_interrupted_verification_reports_no_difference(tmp_path, monkeypatch):
    def at(self, step, rank=0, world=1):
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return whole(self, step, rank, world)

    whole, lines = Batches.at, []
    monkeypatch.setattr(Batches, "at", at)
    with pytest.raises(KeyboardInterrupt):
        verify_resume(REVERSE, tmp_path, lines.append)
    assert lines == ["training without interruption ..."]


def test_run_too_short_to_kill_is_refused(tmp_path):
    short = replace(REVERSE, training=replace(REVERSE.training, steps=3))
    with pytest.raises(ValueError, match="needs at least 4 steps to kill a run halfway, got 3"):
        verify_resume(short, tmp_path)
