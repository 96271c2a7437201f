"""benchmarks/step.py measures every installed peer in a balanced order."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

from clearhead.models.presets import vit_tiny
from clearhead.models.vit import VisionTransformer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = {"torch.nn": "torch", "timm": "timm", "vit-pytorch": "vit_pytorch", "transformers": "transformers"}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    file = tmp_path_factory.mktemp("step") / "report.json"
    command = [sys.executable, BENCHMARKS / "step.py", "--rounds", "1", "--batch", "2", "--json", file]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # more threads would be slow beside other tests
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=one_thread)
    assert done.returncode == 0, done.stderr
    return {**json.loads(file.read_text()), "printed": done.stdout}


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with its folder on the path as when Python runs it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("step")


@pytest.mark.slow
def test_clearhead_is_measured_in_both_modes(report):
    for mode in ("forward", "train"):
        names = [row["name"] for row in report[mode]["rows"]]
        assert "clearhead" in names
        assert report[mode]["fastest_peer"] in names
        assert report[mode]["fastest_peer"] != "clearhead"
    assert "threads" in report["printed"]
    assert "matmul peak" in report["printed"]


@pytest.mark.slow
@pytest.mark.parametrize("peer", MODULES)
def test_installed_peer_is_measured(report, peer):
    if importlib.util.find_spec(MODULES[peer]) is None:
        assert f"{peer} is left out" in report["printed"]
        pytest.skip(f"{peer} is not installed: pip install 'clearhead[bench]'")
    for mode in ("forward", "train"):
        row = next(row for row in report[mode]["rows"] if row["name"] == peer)
        assert row["milliseconds"] > 0
        assert row["parameters"] == pytest.approx(2_693_386, rel=0.01)


@pytest.fixture
def twice_as_slow(step, monkeypatch):
    """The script with fake times: 2 seconds for ours, 1 second for torch.nn, and no other peer."""
    config = vit_tiny()
    models = {name: VisionTransformer.from_config(config) for name in ("clearhead", "torch.nn")}
    seconds = {"clearhead": [2.0, 4.0, 2.0], "torch.nn": [1.0, 2.0, 1.0], step.MATMUL: [1.0, 1.0, 1.0]}
    monkeypatch.setattr(step, "build_all", lambda config: (models, {}))
    monkeypatch.setattr(step, "time_rounds", lambda *arguments: {"forward": seconds, "train": seconds})
    return step


@pytest.mark.parametrize(("check", "code"), [("0.4", 0), ("0.5", 0), ("0.6", 1)])
def test_check_fails_only_below_the_ratio(twice_as_slow, check, code, capsys):
    assert twice_as_slow.main(["--check", check]) == code
    assert ("wanted 0.6" in capsys.readouterr().err) == bool(code)


@pytest.mark.parametrize("n", [2, 3, 5, 6])
def test_every_model_follows_every_other_equally_often(step, n):
    names = [str(i) for i in range(n)]
    rounds = [step.order(names, i) for i in range(2 * n)]
    assert all(sorted(order) == names for order in rounds)
    follows = Counter(pair for order in rounds for pair in pairwise(order))
    assert len(follows) == n * (n - 1)
    assert len(set(follows.values())) == 1


def test_multiply_adds_count_linear_layers_and_attention_scores(step):
    config = vit_tiny()
    linears = [m for m in VisionTransformer.from_config(config).modules() if isinstance(m, nn.Linear)]
    patches, *blocks, head = linears
    weights = sum(m.weight.numel() for m in blocks)
    scores = config.depth * 2 * 65**2 * config.width
    assert step.multiply_adds(config) == 64 * patches.weight.numel() + 65 * weights + head.weight.numel() + scores
