"""A sample of published architectures: `look` misses nothing in silence, and leaves every model as it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZE = 40


@pytest.mark.slow
def test_look_is_complete_on_a_sample_of_the_zoo(tmp_path):
    path = tmp_path / "results.jsonl"
    command = [sys.executable, BENCHMARKS / "zoo.py", "--sample", str(SIZE), "--results", path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    results = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(results) == SIZE, done.stderr
    assert [r for r in results if r["class"] in ("silent", "wrong", "refused", "failed")] == []
    dense = [r for r in results if r["kind"] == "dense"]
    assert len(dense) > 30
    assert [r for r in dense if r["class"] != "complete"] == []
    assert all(r["recorded"] > 0 for r in dense if r["judged"])
    assert {r["library"] for r in results} >= {"transformers", "timm", "vit-pytorch", "x-transformers"}


def test_the_list_of_architectures_does_not_shrink():
    listed = json.loads((BENCHMARKS / "zoo_architectures.json").read_text())
    assert len(listed["architectures"]) >= 619
    assert {entry["kind"] for entry in listed["architectures"]} == {"dense", "sparse", "none"}
    assert all(entry["reason"] for entry in listed["exclusions"])
    names = [(e["library"], e["name"], e.get("variant"), str(e.get("kwargs"))) for e in listed["architectures"]]
    assert len(set(names)) == len(names)
