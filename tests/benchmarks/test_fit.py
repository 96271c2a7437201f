"""benchmarks/fit.py times `fit` and the hand-written loop alternately."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "fit.py"


def test_every_round_has_a_time_of_both(tmp_path):
    file = tmp_path / "times.json"
    options = ["--rounds", "2", "--steps", "1", "--batch", "2", "--json", str(file), "--check", "1000"]
    done = subprocess.run([sys.executable, BENCHMARK, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "paired" in done.stdout
    times = json.loads(file.read_text())
    assert {name: len(values) for name, values in times.items()} == {"fit": 2, "loop": 2}
    assert all(seconds > 0 for values in times.values() for pair in values for seconds in pair)
