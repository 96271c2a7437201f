import os

import pytest
import torch

from clearhead.cli.main import main


def test_prediction_and_figure_paths_are_printed(trained, tmp_path, capsys):
    assert main(["look", str(trained / "reverse"), "--ids", "3", "1", "4", "--out", str(tmp_path / "new")]) == 0
    out, err = capsys.readouterr()
    assert "was trained on sequences of 16 digits, got 3; its prediction is unreliable\n" in err
    assert err.endswith("Drawing figures ...\n")
    assert out.startswith("Predicted: ")
    assert "Actual" not in out
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"wall.png", "head.png", "tokens.png", "heads.png"}
    assert all(str(path) in out for path in (tmp_path / "new").iterdir())


def test_busy_machine_is_reported_before_drawing(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0, 0.0, 0.0))
    assert main(["look", str(trained / "reverse"), "--sample", "0", "--out", str(tmp_path / "new")]) == 0
    hint, drawing = capsys.readouterr().err.splitlines()
    assert hint.startswith("hint: the machine is busy (load average 3.0 on 2 cores)")
    assert hint.endswith("try again with the environment variable OMP_NUM_THREADS=1")
    assert drawing == "Drawing figures ..."


def test_figures_are_saved_in_the_run_by_default(trained, capsys):
    assert main(["look", str(trained / "repeat"), "--sample", "0"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("Predicted: ")
    assert ". Actual: " in first
    assert first.endswith(("The prediction is correct.", "The prediction is wrong."))
    assert (trained / "repeat/figures/look/wall.png").is_file()


def test_training_dynamics_of_a_run_with_snapshots(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = "--training.steps 4 --snapshots.every 2 --data.limit 300 --data.validation 50 --training.threads 1"
    assert main(["train", "reverse", "--name", "watched", "--snapshots", "3", *small.split()]) == 0
    capsys.readouterr()
    assert main(["look", "runs/watched", "--training-dynamics"]) == 0
    out = capsys.readouterr().out
    for name in ("entropy.png", "strip.png", "head.gif"):
        assert str(tmp_path / "runs/watched/figures/look" / name) in out or f"runs/watched/figures/look/{name}" in out
        assert (tmp_path / "runs/watched/figures/look" / name).is_file()


@pytest.mark.parametrize(
    ("name", "text", "pictures"),
    [
        ("pronounce", "cab", {"alignment.png", "cross.png", "encoder.png", "decoder.png", "heads.png"}),
        ("words", "cab", {"wall.png", "head.png", "tokens.png", "heads.png"}),
        ("text", "to be", {"wall.png", "head.png", "tokens.png", "heads.png"}),
    ],
)
def test_figures_of_words_and_text(trained, tmp_path, capsys, name, text, pictures):
    assert main(["look", str(trained / name), "--text", text, "--out", str(tmp_path / "new")]) == 0
    assert capsys.readouterr().out.startswith("Predicted: ")
    assert {path.name for path in (tmp_path / "new").iterdir()} == pictures


def test_figures_of_a_test_word_by_index(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(trained.parent)
    assert main(["look", "runs/pronounce", "--sample", "1", "--out", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new/alignment.png").is_file()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            "RUN/mnist",
            "--text and --training-dynamics, got none of them; try --sample 0",
        ),
        ("RUN/mnist --sample 1 --ids 3", "got --sample and --ids"),
        ("RUN/mnist --training-dynamics", "has no attention snapshots"),
        ("RUN/mnist --ids 3", "takes images, got --ids; try --image"),
        ("RUN/mnist --sample -1", "from 0 to 9999, got -1"),
        ("RUN/reverse --image a.png", "takes digits, got --image; try --ids"),
        ("RUN/reverse --text word", "takes digits, got --text; try --ids"),
        ("RUN/pronounce --text xyz", "unknown token 'x' in 'xyz'; the vocabulary is 'abcd'"),
        ("RUN/reverse --ids 33", "ids must be from 0 to 9, got 33"),
    ],
)
def test_errors_are_one_line(trained, capsys, argv, message):
    assert main(["look", *argv.replace("RUN", str(trained)).split()]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
