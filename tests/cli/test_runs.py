import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clearhead.cli.main import main
from clearhead.recipes import config_of
from clearhead.training.run_directory import RunDirectory, is_locked


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def record(kind, step, **numbers):
    return {"kind": kind, "step": step, "epoch": step / 100, "loss": 1.0, **numbers}


def make(name, records=(), checkpoint=False, **changes):
    """A run's folder as training leaves it: 2 epochs of 100 steps."""
    folder = Path("runs") / name
    (folder / "checkpoints").mkdir(parents=True)
    config = config_of("reverse", {"training.epochs": 2} | changes)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if checkpoint:
        (folder / "checkpoints/step-00000100").mkdir()
    return folder


def listed(capsys, *argv):
    assert main(["runs", *argv, "--json"]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


VALIDATED = [record("train", 100), record("validation", 100, accuracy=0.5), record("validation", 200, accuracy=0.4)]
STALE = [record("validation", step, accuracy=accuracy) for step, accuracy in ((30, 0.5), (60, 0.4), (100, 0.5))]
"""two evaluations without a better one"""
TESTED = [*VALIDATED, record("test", 200, accuracy=0.45)]


@pytest.mark.parametrize(
    ("records", "changes", "state"),
    [
        (TESTED, {}, "finished"),
        (VALIDATED, {}, "interrupted"),  # killed before its test
        (VALIDATED[:2], {}, "interrupted"),
        ([*VALIDATED[:2], {"kind": "diverged", "step": 120}], {}, "diverged"),
        ([*VALIDATED[:2], {"kind": "diverged", "step": 120}, record("train", 130)], {}, "interrupted"),
        ([*STALE, record("test", 100, accuracy=0.5)], {"training.patience": 2}, "finished"),
        ([*STALE, record("test", 100, accuracy=0.5)], {"training.patience": 3}, "interrupted"),  # lengthened since
        (TESTED, {"training.epochs": 5}, "interrupted"),  # lengthened, and killed before the next record
    ],
)
def test_state_of_a_run(capsys, records, changes, state):
    make("mine", records, checkpoint=True, **changes)
    assert listed(capsys)["mine"]["state"] == state


def test_states_without_a_test_set_and_without_a_checkpoint(capsys):
    folder = make("text", VALIDATED, checkpoint=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"data": {"name": "text", "file": "my.txt"}}))
    make("begun", [record("train", 10)])
    make("new")
    found = listed(capsys)
    assert {name: row["state"] for name, row in found.items()} == {
        "text": "finished",
        "begun": "no checkpoint yet",
        "new": "no checkpoint yet",
    }
    assert (found["new"]["total_steps"], found["new"]["epochs"]) == (None, 2)


def test_json_has_steps_and_accuracies(capsys):
    make("mine", TESTED, checkpoint=True)
    row = listed(capsys)["mine"]
    assert (row["recipe"], row["step"], row["total_steps"]) == ("reverse", 200, 200)
    assert (row["best_validation_accuracy"], row["test_accuracy"]) == (0.5, 0.45)
    assert main(["runs"]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "recipe", "step", "validation", "test", "state", "last", "change"]
    assert line.split()[:8] == ["mine", "reverse", "200", "/", "200", "50.00%", "45.00%", "finished"]
    assert line.endswith(" s ago")


def test_newest_run_is_first_and_a_damaged_run_is_listed(capsys):
    for i, name in enumerate(("old", "broken", "new")):
        folder = make(name, TESTED)
        os.utime(folder / "metrics.jsonl", (1000 * i, 1000 * i))
    Path("runs/broken/config.json").write_text("{")
    make("odd", ["no record"])
    make("alien")
    Path("runs/alien/config.json").write_text('{"recipe": 3, "surprise": 1}')
    Path("runs/a file").write_text("")
    Path("runs/no run").mkdir()
    found = listed(capsys)
    assert [name for name in found if name in ("old", "broken", "new")] == ["new", "broken", "old"]
    assert set(found) == {"old", "broken", "new", "odd", "alien"}
    for name in ("broken", "odd", "alien"):
        assert found[name]["state"] == "unreadable"
        assert found[name]["problem"]
    assert main(["runs"]) == 0
    assert "unreadable: " in capsys.readouterr().out


def test_a_locked_run_is_running_and_stays_locked(capsys):
    make("mine", VALIDATED, checkpoint=True)
    run = RunDirectory.open("mine")
    with run.lock():
        before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
        assert listed(capsys)["mine"]["state"] == "running"
        assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before
        code = "from clearhead.training.run_directory import RunDirectory as R; R.open('mine').lock().__enter__()"
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "locked by" in child.stderr  # the lock is still held
    assert listed(capsys)["mine"]["state"] == "interrupted"


def test_listing_runs_does_not_block_training(monkeypatch):
    """Whoever starts at the very moment when somebody looks waits until they have looked."""
    import fcntl

    make("mine")
    run = RunDirectory.open("mine")
    with run.lock():
        pass
    file = os.open(run.path / "lock", os.O_RDONLY)
    fcntl.flock(file, fcntl.LOCK_SH)
    naps = []
    monkeypatch.setattr(
        "clearhead.training.run_directory.time.sleep", lambda s: naps.append(s) or (len(naps) == 9 and os.close(file))
    )
    with run.lock():
        assert is_locked(run.path)
    assert len(naps) == 9
    assert not is_locked(run.path)


def test_an_empty_folder_suggests_a_command(capsys, tmp_path):
    assert main(["runs"]) == 0
    assert capsys.readouterr().out == "No runs in runs. Start one with: clearhead train reverse\n"
    assert listed(capsys) == {}
    assert main(["runs", "nowhere"]) == 2
    assert capsys.readouterr().err == "clearhead: no such folder: nowhere\n"


def test_real_runs_in_another_folder_or_a_single_run(capsys, trained):
    found = listed(capsys, str(trained))
    assert {row["state"] for row in found.values()} == {"finished"}
    assert found["reverse"]["step"] == found["reverse"]["total_steps"] == 12
    assert set(listed(capsys, str(trained / "reverse"))) == {"reverse"}


def test_commands_accept_the_bare_name_of_a_run(capsys, trained):
    shutil.copytree(trained / "reverse", "runs/mine")
    for argv in (["evaluate", "mine"], ["predict", "mine", "--ids", *"3141592653589793"], ["curves", "mine"]):
        assert main(argv) == 0
    assert main(["evaluate", "mnie"]) == 2
    assert "did you mean runs/mine?" in capsys.readouterr().err


def test_figure_of_a_run_given_by_name_is_saved_in_its_folder(capsys, trained):
    shutil.copytree(trained / "mnist", "runs/mine")
    assert main(["confusion", "mine"]) == 0
    assert capsys.readouterr().out == "runs/mine/figures/confusion.png\n"
    assert Path("runs/mine/figures/confusion.png").is_file()


def test_runs_does_not_import_torch():
    code = "import sys; from clearhead.cli.main import main; main(['runs']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
