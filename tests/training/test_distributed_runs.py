"""Laws about several processes. ranks.py trains them all once; each test below looks at what came out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clearhead.training.run_directory import RunDirectory
from clearhead.training.verify_resume import compare

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
def test_any_number_of_processes_learns_the_same(runs, done, name):
    """Losses of every step and evaluation, with 11 examples to a batch, and 13 and 513 (512 + 1) to evaluate."""
    assert set(done[name]["codes"]) == {0}
    assert_close(runs / name, runs / "of1")
    environment = RunDirectory.open(runs / name).latest_checkpoint().state["environment"]
    assert environment["world_size"] == (3 if name == "of3" else 2)
    assert environment["sharded"] is (name == "sharded")


@pytest.mark.parametrize("name", ["of2", "of3", "sharded"])
def test_evaluation_counts_each_example_once(runs, name):
    """Accuracies are quotients of counts: equal to the last bit."""
    mine, theirs = ([r["accuracy"] for r in records(runs / n) if r["kind"] != "train"] for n in (name, "of1"))
    assert mine == theirs


def test_evaluation_leaves_no_averaged_weights_behind_where_weights_are_split(runs):
    """Whole weights that a forward pass put together must not outlive the evaluation of their averages."""
    assert [r["step"] for r in records(runs / "seldom1") if r["kind"] == "validation"] == list(range(1, 9))
    assert len(list((runs / "seldom1/checkpoints").glob("step-*"))) < 8
    assert_close(runs / "seldom2", runs / "seldom1", n_evaluations=8)


@pytest.mark.parametrize("name", ["written by 2", "written sharded"])
def test_padded_words_are_learnt_alike_by_any_number_of_processes(runs, done, name):
    """Each process pads to its own longest word, and one of them has no test example in the last batch."""
    assert set(done[name]["codes"]) == {0}
    assert_close(runs / name, runs / "written by 1")


def test_split_weights_are_saved_whole(runs):
    split, whole = (RunDirectory.open(runs / name).latest_checkpoint() for name in ("sharded", "of1"))
    assert {n: t.shape for n, t in split.model.items()} == {n: t.shape for n, t in whole.model.items()}
    moments = {n: t.shape for n, t in whole.optimizer.items() if not n.startswith("random.")}
    assert {n: t.shape for n, t in split.optimizer.items() if not n.startswith("random.")} == moments


def test_a_signal_to_one_process_stops_all_and_resume_is_exact_with_dropout(runs, done):
    assert done["stopped"]["codes"] == [3, 3]
    assert done["continued"]["codes"] == [0, 0]
    assert compare(runs / "stopped", runs / "whole") == []
    states = RunDirectory.open(runs / "whole").latest_checkpoint().optimizer
    assert not torch.equal(states["random.rank0"], states["random.rank1"])  # each drops something else


def test_sharded_resume_is_exact(runs, done):
    assert (done["stopped sharded"]["codes"], done["resharded"]["codes"]) == ([3, 3], [0, 0])
    assert compare(runs / "resharded", runs / "sharded") == []


def test_another_number_of_processes_goes_on_at_the_right_example(runs, done):
    assert (done["stopped2"]["codes"], done["recounted"]["codes"]) == ([3, 3], [0, 0, 0])
    assert_close(runs / "recounted", runs / "of1")


def test_one_killed_process_ends_all_at_once_and_resume_is_exact(runs, done):
    assert done["killed"]["codes"] == [1, -9]
    assert done["killed"]["seconds"] < 30
    assert done["after the kill"] == [2, 4]
    assert done["revived"]["codes"] == [0, 0]
    assert compare(runs / "killed", runs / "of2") == []


def test_a_killed_launcher_stops_its_processes_with_a_checkpoint(runs, done):
    assert done["orphaned"] == {"launcher": 9, "codes": [3, 3]}
    assert 3 <= done["after the launcher"][-1] < 8
    assert done["relaunched"]["codes"] == [0, 0]
    assert compare(runs / "orphaned", runs / "of2") == []
