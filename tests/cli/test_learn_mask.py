"""`clearhead mask` and `clearhead steps`: the terminal, the figure and the JSON show the values of nn/masks.py."""

import json
import math

import numpy as np
import pytest
import torch

from clearhead.cli.main import main
from clearhead.models.mask_view import MaskView, draw_mask
from clearhead.nn import masks
from clearhead.nn.attention import attend_reference

CAUSAL_5 = """\
       key
query  1  2  3  4  5
    1  1  0  0  0  0
    2  1  1  0  0  0
    3  1  1  1  0  0
    4  1  1  1  1  0
    5  1  1  1  1  1
"""


def as_json(run_cli, line):
    return json.loads(run_cli("mask", *line.split(), "--json"))


def test_causal_mask_of_five_tokens_is_printed(run_cli):
    out = run_cli("mask", "causal", "--tokens", "5")
    assert out.startswith("Causal mask: 5 tokens   shape [5,5]\n")
    assert CAUSAL_5 in out
    assert "1 (True) = may attend, 0 (False) = may not. 15 of 25 query-key pairs are visible (60%)." in " ".join(
        out.split()
    )


def test_additive_causal_mask_is_printed(run_cli):
    out = run_cli("mask", "causal", "--tokens", "5", "--additive", "-10000")
    assert "    2       0       0  -10000  -10000  -10000\n" in out
    assert "    1     0  -inf  -inf  -inf  -inf\n" in run_cli("mask", "causal", "--additive")


@pytest.mark.parametrize(
    ("line", "mask"),
    [
        ("causal --tokens 7", masks.causal(7).dense()),
        ("causal --tokens 7 --queries 2", masks.causal(2, 7).dense()),
        ("window --window 2 --tokens 6", masks.window(6, 2)),
        ("--window 2 causal --tokens 6", masks.window(6, 2) & masks.causal(6)),
        ("causal --tokens 6 window --window 2", masks.window(6, 2) & masks.causal(6)),
        ("padding --lengths 1 3", masks.padding([1, 3])[:, 0].expand(2, 3, 3)),
        ("--lengths 1 3 --tokens 4 causal", masks.padding([1, 3], 4)[:, 0] & masks.causal(4)),
    ],
)
def test_json_equals_the_masks_of_the_library(run_cli, line, mask):
    data = as_json(run_cli, line)
    assert data["values"] == mask.tolist()
    assert data["shape"] == list(mask.shape)
    assert data["visible"] == int(mask.sum())
    assert data["convention"] == "True = may attend"
    additive = as_json(run_cli, f"{line} --additive -10000")["additive"]
    assert additive == masks.to_additive(mask, -10_000).tolist()


def test_minus_infinity_is_valid_json(run_cli):
    assert as_json(run_cli, "causal --tokens 2 --additive")["additive"] == [[0, "-inf"], [0, 0]]


def test_mask_from_a_file_alone_and_combined(run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("mine.npy", np.array([[1, 0, 1], [1, 1, 1], [0, 0, 1]]))
    assert as_json(run_cli, "--file mine.npy")["values"][0] == [True, False, True]
    assert as_json(run_cli, "--file mine.npy causal")["values"][0] == [True, False, False]
    assert "mine.npy (read as bool mask): 3 tokens" in run_cli("mask", "--file", "mine.npy")


def test_fully_masked_rows_are_reported(run_cli, tmp_path):
    (tmp_path / "mine.txt").write_text("1 0\n1 1\n0 0\n")
    out = run_cli("mask", "--file", str(tmp_path / "mine.txt"))
    assert "Note: Query 3 may attend to nothing: its output is zeros." in out
    assert as_json(run_cli, f"--file {tmp_path / 'mine.txt'}")["empty_rows"] == [[2]]
    assert "may attend to nothing" not in run_cli("mask", "causal")
    many = " ".join(run_cli("mask", "padding", "--lengths", "2", "0").split())
    assert "sequence 2 (length 0): queries 1 to 2" not in many
    assert "sequence 2 (length 0): queries 1 and 2 may attend to nothing: their outputs are zeros." in many


def test_notes_about_a_fully_masked_row_are_true():
    """Zeros with a bool mask, NaN with -inf added, the weights without any mask with -10000 added."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 3, 4, dtype=torch.float64)
    mask = torch.tensor([[True, False, False], [False, False, False], [True, True, True]])
    scores = q @ k.T / 2
    assert attend_reference(q, k, v, mask)[0][1].eq(0).all()
    assert (scores + masks.to_additive(mask)).softmax(-1)[1].isnan().all()
    torch.testing.assert_close((scores + masks.to_additive(mask, -10_000)).softmax(-1)[1], scores.softmax(-1)[1])
    notes = {low: " ".join(MaskView(mask, "x", low=low).notes()) for low in (None, -math.inf, -10_000.0)}
    assert notes[None] == "Query 2 may attend to nothing: its output is zeros."
    assert "softmax of its row is 0/0, NaN" in notes[-math.inf]
    assert "so no key is hidden. With the bool mask, its output is zeros." in notes[-10_000.0]


def test_additive_value_too_small_to_mask_is_reported(run_cli):
    assert "-10 does not hide a key" in run_cli("mask", "causal", "--additive", "-10")
    assert "does not hide" not in run_cli("mask", "causal", "--additive", "-10000")


@pytest.mark.parametrize("line", ["causal --tokens 100", "causal --tokens 30 --additive -10000", "--lengths 9 0 3"])
@pytest.mark.parametrize("width", ["80", "120"])
def test_output_fits_the_width_of_the_terminal(run_cli, monkeypatch, line, width):
    monkeypatch.setenv("COLUMNS", width)
    out = run_cli("mask", *line.split())
    assert max(map(len, out.splitlines())) <= int(width)
    assert ("--json and --figure show everything" in out) == ("--tokens" in line)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_figures_are_saved(run_cli, tmp_path, suffix):
    path = tmp_path / f"mask.{suffix}"
    assert run_cli("mask", "causal", "padding", "--lengths", "2", "3", "--figure", str(path)).endswith(
        f"Figure: {path}\n"
    )
    assert path.stat().st_size > 1000


def test_figure_shows_the_values_and_colors_of_the_mask():
    mask = masks.causal(4) & torch.tensor([True, True, False, True])
    (axes,) = draw_mask(MaskView(mask, "mine", low=-10_000.0)).axes
    assert [text.get_text() for text in axes.texts] == ["0" if seen else "−10000" for seen in mask.flatten().tolist()]
    assert axes.images[0].get_array().tolist() == mask.int().tolist()
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "2", "3", "4"]
    assert not draw_mask(MaskView(mask, "mine")).axes[0].patches
    nothing = torch.zeros(4, 4, dtype=torch.bool)
    assert len(draw_mask(MaskView(nothing, "mine")).axes[0].patches) == 4


def test_mask_without_arguments_prints_the_help(run_cli):
    assert run_cli("mask") == run_cli("mask", "--help")
    assert max(map(len, run_cli("mask").splitlines())) <= 83


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("casual", "unknown mask 'casual'; did you mean causal? Choose from causal, padding, window"),
        ("xyz", "unknown mask 'xyz'; choose from"),
        ("window", "the window mask needs --window, such as --window 2"),
        ("padding", "the padding mask needs --lengths, such as --lengths 3 5"),
        ("causal --tokens 0", "--tokens must be from 1 to 2048, got 0"),
        ("causal --tokens 5000", "--tokens must be from 1 to 2048, got 5000"),
        ("causal --queries 6", "--queries must be at most the number of tokens, got 6 queries for 5 tokens"),
        ("causal --window -1", "--window must be from 0 to 2048, got -1"),
        (f"causal --window {10**30}", f"--window must be from 0 to 2048, got {10**30}"),
        (
            f"padding --lengths 2048 {'1 ' * 99}",
            "a mask may have at most 4,194,304 values, got 419,430,400; give fewer",
        ),
        ("padding --lengths 6 --tokens 5", "--lengths must be from 0 to 5 tokens, got [6]"),
        ("causal --additive 3", "--additive: must be a negative number or -inf, got '3'"),
        ("causal --figure mask.gif", "a figure is saved as .png, .svg, .pdf, got 'mask.gif'"),
        ("causal --form torch", "--form needs --file"),
        ("--file none.txt", "cannot read none.txt: No such file or directory"),
        ("--file none.txt --tokens 4", "--file gives the number of tokens"),
    ],
)
def test_mask_errors_are_one_line(capsys, line, message):
    assert main(["mask", *line.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_figure_title_does_not_overlap_panel_titles():
    figure = draw_mask(MaskView(torch.ones(2, 1, 5, 5).tril().bool(), "mine"))
    figure.draw_without_rendering()
    title, panel = (text.get_window_extent() for text in (figure._suptitle, figure.axes[0].title))
    assert figure.axes[0].get_title()
    assert (title.y0 - panel.y1) / figure.dpi > 0.1  # inches


def test_steps_from_a_file_with_options(run_cli, tmp_path):
    path = tmp_path / "my.json"
    path.write_text(json.dumps({"q": [[1, 0], [0, 1]], "k": [[1, 0], [0, 1]], "v": [[1, 2], [3, 4]], "beta": 0}))
    shared = json.loads(run_cli("steps", "--file", str(path), "--json"))
    assert shared["steps"][-1]["matrices"]["z"]["values"] == [[2, 3], [2, 3]]
    sharp = json.loads(run_cli("steps", "--file", str(path), "--beta", "inf", "--json"))
    assert sharp["steps"][-1]["matrices"]["z"]["values"] == [[1, 2], [3, 4]]
    causal = json.loads(run_cli("steps", "--file", str(path), "--causal", "--json"))
    assert causal["steps"][-1]["matrices"]["z"]["values"] == [[1, 2], [2, 3]]


def test_negative_beta_needs_no_equals_sign(capsys):
    assert main(["steps", "--beta", "-inf"]) == 0
    assert main(["steps", "--beta", "-1e5"]) == 0


def matrices(run_cli, *argv):
    steps = json.loads(run_cli("steps", *argv, "--json"))["steps"]
    return {name: matrix["values"] for step in steps for name, matrix in step["matrices"].items()}


def test_steps_with_a_mask_by_name_or_from_a_file(run_cli, tmp_path):
    (tmp_path / "mine.txt").write_text("1 0 0\n1 1 0\n1 1 1\n")
    assert matrices(run_cli, "--mask", "causal") == matrices(run_cli, "--causal")
    assert matrices(run_cli, "--mask", "causal") == matrices(run_cli, "--mask", str(tmp_path / "mine.txt"))
    assert matrices(run_cli, "--mask", "causal") != matrices(run_cli)
    (tmp_path / "mine.txt").write_text("1 1 1\n0 0 1\n1 1 1\n")
    both = matrices(run_cli, "--causal", "--mask", str(tmp_path / "mine.txt"))
    assert both["weights"][1] == [0, 0, 0]


def test_steps_with_several_heads(run_cli):
    assert "scores, head 2 [3,3]" in run_cli("steps", "--heads", "2")
    assert len(matrices(run_cli, "--heads", "4")["weights"]) == 4


def test_steps_figure_and_latex(run_cli, tmp_path):
    path = tmp_path / "steps.svg"
    assert run_cli("steps", "--figure", str(path)).endswith(f"Figure: {path}\n")
    assert path.read_bytes().startswith(b"<?xml")
    tex = run_cli("steps", "--heads", "2", "--latex")
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
def test_steps_errors_are_one_line(capsys, line, message):
    assert main(["steps", *line.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err
