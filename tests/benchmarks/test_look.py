"""benchmarks/look.py measures every way of obtaining attention weights."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/look.py"


@pytest.mark.slow
def test_every_method_is_measured_and_the_check_fails():
    command = [sys.executable, SCRIPT, "--rounds", "1", "--batch", "2", "--check", "0.0001"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 1, done.stderr  # an unattainable limit
    assert "wanted 0.0001" in done.stderr
    for way in ("ours, look", "Hugging Face, look", "Hugging Face, eager with output_attentions"):
        assert f"\n{way} " in done.stdout
    memory = float(done.stdout.split("16,384 tokens: ")[1].split(" MB")[0])
    assert memory < 50
