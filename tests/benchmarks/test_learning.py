"""benchmarks/learning.py finds the step at which each target accuracy is reached."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from clearhead.recipes import config_of

FILE = Path(__file__).parents[2] / "benchmarks" / "learning.py"


@pytest.fixture(scope="module")
def learning():
    spec = importlib.util.spec_from_file_location("learning", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_targets_are_reached_in_order_or_not_at_all(learning, capsys):
    entry = learning.Entry("tiny", config_of("reverse", {"training.steps": 4}), (0.0, 0.01, 1.0), 2)
    first, second, last = learning.reach(entry, seed=0)
    assert (first.target, first.steps) == (0.0, 2)
    assert (second.target, second.steps) == (0.01, 2)
    assert first.seconds > 0
    assert first.is_reached
    assert (last.target, last.steps) == (1.0, 4)
    assert last.seconds > first.seconds
    assert not last.is_reached
    assert last.best < 1
    assert "tiny: step 4" in capsys.readouterr().out


def test_tasks_have_sorted_targets_and_comparable_recipes(learning):
    for make in learning.TASKS.values():
        for entry in make():
            assert entry.targets == tuple(sorted(entry.targets))
    ours, theirs = (entry.config for entry in learning.TASKS["reverse"]())
    # the notebook has ReLU, and a norm in its output net
    assert ours.model == replace(theirs.model, activation="gelu", head_norm=False)
    assert ours.data == theirs.data
    assert theirs.optimizer.lr == 5e-4


def test_matmul_peak_is_positive(learning):
    assert learning.matmul_peak(size=64, tries=2) > 1e6
