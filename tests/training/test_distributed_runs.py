"""Distributed training equals training in one process. ranks.py trains each run once; the tests examine the results."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clearhead.recipes.trial import compare
from clearhead.training.run_directory import RunDirectory

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("ranks.py")
    done = subprocess.run([sys.executable, "-W", "error", script, folder], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def done(runs):
    return json.loads((runs / "done.json").read_text())


def records(folder):
    return RunDirectory.open(folder).records()


def assert_close(folder, expected, n_evaluations=2):
    assert len(records(folder)) == len(records(expected)) == 8 + n_evaluations + 1
    for mine, theirs in zip(records(folder), records(expected), strict=True):
        assert (mine["kind"], mine["step"], mine["epoch"]) == (theirs["kind"], theirs["step"], theirs["epoch"])
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6)


@pytest.mark.parametrize("name", ["of2", "of3", "sharded"])
def test_losses_do_not_depend_on_the_world_size(runs, done, name):
    """Compares the loss of every step and evaluation, with batches of 11, and 13 or 513 (512 + 1) examples."""
    assert set(done[name]["codes"]) == {0}
    assert_close(runs / name, runs / "of1")
    environment = RunDirectory.open(runs / name).latest_checkpoint().state["environment"]
    assert environment["world_size"] == (3 if name == "of3" else 2)
    assert environment["sharded"] is (name == "sharded")


@pytest.mark.parametrize("name", ["of2", "of3", "sharded"])
def test_distributed_evaluation_counts_each_example_once(runs, name):
    """Accuracies are ratios of integer counts and therefore equal bit for bit."""
    mine, theirs = ([r["accuracy"] for r in records(runs / n) if r["kind"] != "train"] for n in (name, "of1"))
    assert mine == theirs


def test_sharded_evaluation_restores_the_raw_weights_after_ema(runs):
    """Parameters that FSDP gathered for a forward pass must not outlive the evaluation with averaged weights."""
    assert [r["step"] for r in records(runs / "frequent-eval-1") if r["kind"] == "validation"] == list(range(1, 9))
    assert len(list((runs / "frequent-eval-1/checkpoints").glob("step-*"))) < 8
    assert_close(runs / "frequent-eval-2", runs / "frequent-eval-1", n_evaluations=8)


@pytest.mark.parametrize("name", ["seq2seq of 2", "seq2seq sharded"])
def test_losses_of_padded_sequences_do_not_depend_on_the_world_size(runs, done, name):
    """Each rank pads to its own longest word, and one rank has no test example in the last batch."""
    assert set(done[name]["codes"]) == {0}
    assert_close(runs / name, runs / "seq2seq of 1")


def test_checkpoint_of_a_sharded_run_holds_full_tensors(runs):
    split, whole = (RunDirectory.open(runs / name).latest_checkpoint() for name in ("sharded", "of1"))
    assert {n: t.shape for n, t in split.model.items()} == {n: t.shape for n, t in whole.model.items()}
    moments = {n: t.shape for n, t in whole.optimizer.items() if not n.startswith("random.")}
    assert {n: t.shape for n, t in split.optimizer.items() if not n.startswith("random.")} == moments


def test_signal_to_one_rank_stops_all_and_resume_is_exact_with_dropout(runs, done):
    assert done["stopped"]["codes"] == [3, 3]
    assert done["continued"]["codes"] == [0, 0]
    assert compare(runs / "stopped", runs / "uninterrupted") == []
    states = RunDirectory.open(runs / "uninterrupted").latest_checkpoint().optimizer
    assert not torch.equal(states["random.rank0"], states["random.rank1"])  # each rank draws its own dropout masks


def test_sharded_run_resumes_bit_for_bit(runs, done):
    assert (done["stopped sharded"]["codes"], done["resharded"]["codes"]) == ([3, 3], [0, 0])
    assert compare(runs / "resharded", runs / "sharded") == []


def test_resume_with_another_world_size_continues_at_the_right_example(runs, done):
    assert (done["stopped2"]["codes"], done["recounted"]["codes"]) == ([3, 3], [0, 0, 0])
    assert_close(runs / "recounted", runs / "of1")


def test_killed_rank_ends_all_ranks_and_resume_is_exact(runs, done):
    assert done["killed"]["codes"] == [1, -9]
    assert done["killed"]["seconds"] < 30
    assert done["after the kill"] == [2, 4]
    assert done["revived"]["codes"] == [0, 0]
    assert compare(runs / "killed", runs / "of2") == []


def test_killed_launcher_stops_its_ranks_with_a_checkpoint(runs, done):
    assert done["orphaned"] == {"launcher": 9, "codes": [3, 3]}
    assert 3 <= done["after the launcher"][-1] < 8
    assert done["relaunched"]["codes"] == [0, 0]
    assert compare(runs / "orphaned", runs / "of2") == []
