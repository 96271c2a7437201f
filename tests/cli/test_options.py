import io
import sys

import pytest

from clearhead.cli.main import main
from clearhead.cli.options import closest_option

KNOWN = ["--name", "--seed", "--training.steps", "--optimizer.lr", "--model.width", "--data.limit", "--model.depth"]


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--nmae", "--name"),
        ("--steps", "--training.steps"),
        ("--step", "--training.steps"),
        ("--lr", "--optimizer.lr"),
        ("--optim.lr", "--optimizer.lr"),
        ("--optimizer.learning-rate", "--optimizer.lr"),
        ("--modle.widht", "--model.width"),
        ("--learning-rate", "--optimizer.lr"),
        ("--model.dim", "--model.width"),
        ("--num-layers", "--model.depth"),
        ("--zzz", None),
    ],
)
def test_nearest_option_by_full_name_or_last_part(option, expected):
    assert closest_option(option, KNOWN) == expected


def test_leading_dashes_do_not_count_as_similarity():
    assert closest_option("--heads", ["--beta", "--causal"]) is None


@pytest.mark.parametrize("columns", ["80", "120"])
@pytest.mark.parametrize("argv", ["shapes transformer_base --depth 1", "steps --causal"])
def test_output_is_plain_text_that_fits(run_cli, monkeypatch, argv, columns):
    monkeypatch.setenv("COLUMNS", columns)
    out = run_cli(*argv.split())
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= int(columns)
    assert not any(line.endswith(" ") for line in out.splitlines())


def test_characters_missing_from_the_encoding_are_replaced(monkeypatch):
    plain = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", plain)
    assert main(["steps"]) == 0
    assert b"scores = q k?" in plain.buffer.getvalue()


@pytest.mark.parametrize("columns", ["0", "20", "60"])
def test_narrow_terminal_keeps_all_numbers(monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["shapes", "attention", "--width", "768"]) == 0
    out = capsys.readouterr().out
    assert "q_proj.weight" in out
    assert "589,824" in out
    assert main(["steps"]) == 0
