"""benchmarks/text.py alternates between both settings and reports when each reaches the target loss."""

import importlib.util
import json
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "text.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_text", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def text(tmp_path):
    (tmp_path / "my.txt").write_text("To be, or not to be: that is the question.\n" * 40)
    return str(tmp_path / "my.txt")


def test_settings_alternate_until_the_end(bench, text, tmp_path, capsys):
    arguments = ["--file", text, "--steps", "4", "--every", "2", "--target", "99", "--json", str(tmp_path / "x.json")]
    assert bench.main(arguments) == 0
    turns = [line.split(",")[0].strip() for line in capsys.readouterr().out.splitlines() if "loss" in line][:3]
    assert turns == ["clearhead text: step 2", "nanoGPT's setting: step 2", "nanoGPT's setting: step 4"]
    ours, theirs, _ = json.loads((tmp_path / "x.json").read_text())
    assert (ours["reached"][0], theirs["reached"][0]) == (2, 2)
    assert bench.main([*arguments, "--check", "1e9"]) == 1


def test_target_that_is_not_reached_fails_the_check(bench, text, capsys):
    assert bench.main(["--file", text, "--steps", "2", "--every", "2", "--target", "0", "--check", "1"]) == 1
    assert capsys.readouterr().out.count("not reached") == 2


def test_config_of_the_published_setting(bench, text):
    ours, theirs = bench.entries(text, 0, {}, 1)
    config = theirs.ctx.config
    assert (config.model.depth, config.model.num_heads, config.model.width, config.data.length) == (4, 4, 128, 64)
    assert (config.training.batch_size, config.training.steps, config.optimizer.lr) == (12, 2000, 1e-3)
    assert ours.ctx.config.model.width == 128
