import io
import sys

import pytest

from clearhead.cli.main import main


@pytest.mark.parametrize("columns", ["80", "120"])
@pytest.mark.parametrize("argv", ["shapes transformer_base --depth 1", "steps --causal"])
def test_output_is_plain_text_that_fits(told, monkeypatch, argv, columns):
    monkeypatch.setenv("COLUMNS", columns)
    out = told(*argv.split())
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= int(columns)
    assert not any(line.endswith(" ") for line in out.splitlines())


def test_letters_that_a_terminal_lacks_do_no_harm(monkeypatch):
    plain = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", plain)
    assert main(["steps"]) == 0
    assert b"scores = q k?" in plain.buffer.getvalue()


@pytest.mark.parametrize("columns", ["0", "20", "60"])
def test_a_narrow_terminal_loses_no_number(monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["shapes", "attention", "--width", "768"]) == 0
    out = capsys.readouterr().out
    assert "q_proj.weight" in out
    assert "589,824" in out
    assert main(["steps"]) == 0
