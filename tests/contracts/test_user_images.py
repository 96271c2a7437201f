"""A run of own pictures, through the commands: its numbers say of how many views they are, and of which pictures."""

import json
import shutil
from pathlib import Path

import pytest

from clearhead.cli.main import main

TINY = ["--training.steps", "2", "--training.threads", "1", "--model.width", "8", "--model.depth", "1"]


@pytest.fixture
def run(pictures, monkeypatch, capsys):
    monkeypatch.chdir(pictures.parent)
    assert main(["train", "folder", "--name", "mine", "--data.folder", "pictures", *TINY]) == 0
    capsys.readouterr()
    return Path("runs/mine")


def test_test_time_augmentation_is_named_beside_its_metrics(run, capsys):
    from clearhead.data.batches import TTA_DESCRIPTIONS
    from clearhead.inference.run import Run

    name = TTA_DESCRIPTIONS[Run(run).config.training.tta]
    assert name
    for command in ("resume", "evaluate"):
        assert main([command, str(run)]) == 0
        assert name in capsys.readouterr().out
    assert main(["evaluate", str(run), "--part", "validation"]) == 0
    assert name not in capsys.readouterr().out
    assert main(["confusion", str(run), "--out", "matrix.svg"]) == 0


@pytest.mark.parametrize("command", ["resume", "evaluate", "confusion"])
def test_an_added_image_prevents_resume_and_evaluation(run, capsys, command):
    shutil.copy("pictures/red/0.png", "pictures/blue/more.png")
    assert main([command, str(run)]) == 2
    err = capsys.readouterr().err
    assert "pictures; restore the original files" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("part", ["test", "validation"])
def test_predictions_list_file_names(run, capsys, part):
    assert main(["predictions", str(run), "--part", part, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["first"]
    assert rows
    for row in rows:
        assert Path("pictures", row["input"]).is_file()
        assert Path(row["input"]).parts[-2] == row["actual"]  # the class is the folder
    assert len({row["input"] for row in rows}) == len(rows)
