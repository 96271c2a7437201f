"""benchmarks/compare_versions.py distinguishes identical from different losses."""

import importlib.util
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def compare():
    spec = importlib.util.spec_from_file_location("compare_versions", ROOT / "benchmarks/compare_versions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_losses_of_the_same_checkout_are_identical(compare, capsys):
    options = [
        "--recipes",
        "reverse=reverse",
        "--steps",
        "3",
        "--rounds",
        "1",
        "--timed",
        "reverse",
        "--tolerance",
        "99",
    ]
    assert compare.main([str(ROOT), str(ROOT), *options]) == 0
    shown = capsys.readouterr().out
    assert "3 losses identical" in shown
    assert "medians of 10" in shown


@pytest.mark.slow
def test_different_initialization_is_detected(compare, tmp_path, capsys):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "mnist"))
    setup = tmp_path / "src/clearhead/training/context.py"
    changed = setup.read_text().replace("torch.manual_seed(config.seed)", "torch.manual_seed(config.seed + 1)")
    assert changed != setup.read_text()
    setup.write_text(changed)
    assert compare.main([str(ROOT), str(tmp_path), "--recipes", "reverse", "--steps", "2", "--rounds", "0"]) == 1
    assert "DIFFERENT from step 1" in capsys.readouterr().out
