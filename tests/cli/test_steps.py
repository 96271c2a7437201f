import json

import pytest

from clearhead.cli.main import main


def test_steps_from_a_file_with_options(told, tmp_path):
    path = tmp_path / "my.json"
    path.write_text(json.dumps({"q": [[1, 0], [0, 1]], "k": [[1, 0], [0, 1]], "v": [[1, 2], [3, 4]], "beta": 0}))
    shared = json.loads(told("steps", "--file", str(path), "--json"))
    assert shared["steps"][-1]["matrices"]["z"]["values"] == [[2, 3], [2, 3]]
    sharp = json.loads(told("steps", "--file", str(path), "--beta", "inf", "--json"))
    assert sharp["steps"][-1]["matrices"]["z"]["values"] == [[1, 2], [3, 4]]
    causal = json.loads(told("steps", "--file", str(path), "--causal", "--json"))
    assert causal["steps"][-1]["matrices"]["z"]["values"] == [[1, 2], [2, 3]]


def test_a_negative_beta_needs_no_equals_sign(capsys):
    assert main(["steps", "--beta", "-inf"]) == 0
    assert main(["steps", "--beta", "-1e5"]) == 0


def numbers(told, *argv):
    steps = json.loads(told("steps", *argv, "--json"))["steps"]
    return {name: matrix["values"] for step in steps for name, matrix in step["matrices"].items()}


def test_a_mask_by_name_or_from_a_file(told, tmp_path):
    (tmp_path / "mine.txt").write_text("1 0 0\n1 1 0\n1 1 1\n")
    assert numbers(told, "--mask", "causal") == numbers(told, "--causal")
    assert numbers(told, "--mask", "causal") == numbers(told, "--mask", str(tmp_path / "mine.txt"))
    assert numbers(told, "--mask", "causal") != numbers(told)
    (tmp_path / "mine.txt").write_text("1 1 1\n0 0 1\n1 1 1\n")
    both = numbers(told, "--causal", "--mask", str(tmp_path / "mine.txt"))
    assert both["weights"][1] == [0, 0, 0]


def test_several_heads(told):
    assert "scores, head 2 [3,3]" in told("steps", "--heads", "2")
    assert len(numbers(told, "--heads", "4")["weights"]) == 4


def test_figure_and_latex(told, tmp_path):
    path = tmp_path / "steps.svg"
    assert told("steps", "--figure", str(path)).endswith(f"Figure: {path}\n")
    assert path.read_bytes().startswith(b"<?xml")
    tex = told("steps", "--heads", "2", "--latex")
    assert tex.startswith("\\documentclass")
    assert tex.count("bmatrix") > 20


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--mask casual", "unknown mask 'casual'; did you mean causal?"),
        ("--mask window", "unknown mask 'window'; use causal or a file (.txt, .csv, .npy)"),
        ("--mask none.txt", "cannot read none.txt: No such file or directory"),
        ("--heads 3", "heads must divide the 4 columns of q, got 3 heads"),
        ("--heads 0", "heads must divide the 4 columns of q, got 0 heads"),
        ("--figure steps.gif", "got 'steps.gif'"),
        ("--latex --json", "--json: not allowed with argument --latex"),
    ],
)
def test_mistakes_are_one_line(capsys, line, message):
    assert main(["steps", *line.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err
