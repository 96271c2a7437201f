"""An untrusted run directory: no link or special file in it makes a command access files outside, or block."""

import os
import socket
from pathlib import Path

import pytest
import torch

from clearhead.cli.main import main
from clearhead.files import UnsafeFileError
from clearhead.training import checkpoint, metrics_log
from clearhead.training.checkpoint import Checkpoint
from clearhead.training.run_directory import RunDirectory
from clearhead.training.snapshots import snapshot_files

IN_A_CHECKPOINT = [f"checkpoints/step-00000002/{name}" for name in ("model.safetensors", "state.json", "manifest.json")]
FILES = ["lock", "config.json", "metrics.jsonl", "best.json", "snapshots/step-00000002.safetensors", *IN_A_CHECKPOINT]
FOLDERS = [
    "checkpoints",
    "checkpoints/step-00000002",
    "snapshots",
    "figures",
    "figures/look",
    "checkpoints/step-00000009",
]
OTHERS = [".lock.0123.part", "checkpoints/saving-step-00000003", "checkpoints/deleting-step-00000001", "notes.txt"]


def record(step: int) -> dict:
    return {"kind": "train", "step": step, "epoch": step / 2, "loss": 0.5, "accuracy": 0.5}


@pytest.fixture
def path(tmp_path):
    """A run with every kind of file."""
    run = RunDirectory.create(tmp_path / "runs/mine", {"recipe": "reverse"}, pytest.fail)
    with run.lock():
        for step in (1, 2):
            run.log(record(step))
            run.save(Checkpoint(step, {"w": torch.ones(2)}, {}, {}))
        run.mark_best(2)
    (run.path / "snapshots").mkdir()
    (run.path / "snapshots/step-00000002.safetensors").write_bytes(b"maps")
    (run.path / "figures/look").mkdir(parents=True)
    return run.path


@pytest.fixture
def victims(tmp_path):
    """A file and a folder outside the run; they must be unchanged when the test ends."""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "victims/step-00000009").mkdir(parents=True)
    for name in ("curves.png", ".a.part", "state.json", "step-00000009/model.safetensors"):
        (tmp_path / "victims" / name).write_text("precious")
    before = contents_of(tmp_path)
    yield tmp_path
    assert contents_of(tmp_path) == before


def contents_of(home: Path) -> dict:
    found = [home / "victim", home / "victims", *sorted((home / "victims").rglob("*"))]
    return {path: path.read_text() if path.is_file() else None for path in found}


def make_room(run: Path, name: str) -> None:
    """Removes whatever has this name, so that a link can take its place."""
    place = run / name
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_dir():
        place.rename(run.parent / f"was-{place.name}")
    elif place.exists():
        place.unlink()


def assert_refused(command: list, capsys, name: str) -> None:
    assert main(list(map(str, command))) == 1
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert err.endswith(f"{name}\n")
    assert out == ""


@pytest.mark.parametrize("name", [*FILES, *FOLDERS, *OTHERS])
def test_symbolic_link_is_refused_in_one_line_that_names_it(path, victims, capsys, name):
    make_room(path, name)
    (path / name).symlink_to(victims / ("victim" if "." in Path(name).name or name == "lock" else "victims"))
    for command in (
        ["resume", path],
        ["predict", path, "--ids", "3"],
        ["evaluate", path],
        ["look", path, "--sample", "0"],
    ):
        assert_refused(command, capsys, f"a symbolic link is not allowed in a run directory: {path / name}")


@pytest.mark.parametrize("name", ["lock", "config.json", "metrics.jsonl", "best.json", "checkpoints", "figures"])
def test_commands_that_load_no_weights_refuse_symbolic_links(path, victims, capsys, name):
    make_room(path, name)
    (path / name).symlink_to(victims / ("victims" if name in FOLDERS else "victim"))
    assert_refused(["curves", path], capsys, f": {path / name}")
    if name not in ("metrics.jsonl", "config.json"):
        assert_refused(["curves", path / "metrics.jsonl"], capsys, f": {path / name}")
    assert main(["runs", str(path.parent)]) == 0
    assert "a symbolic link is not allowed in a run directory" in " ".join(capsys.readouterr().out.split())


def test_dangling_link_is_refused_and_creates_no_file(path, victims, capsys):
    for name in ("lock", "metrics.jsonl", "config.json"):
        make_room(path, name)
        (path / name).symlink_to(victims / "new")
        assert_refused(["resume", path], capsys, f": {path / name}")
        (path / name).unlink()
        (path / name).write_text("{}")
    assert not (victims / "new").exists()


@pytest.mark.parametrize("name", [*FILES, ".lock.0123.part"])
def test_file_with_a_second_hard_link_is_not_written(path, victims, name):
    make_room(path, name)
    (path / name).hardlink_to(victims / "victim")
    run = (
        RunDirectory(path, {}, pytest.fail) if name == "config.json" else RunDirectory.open(path)
    )  # opening only reads
    with pytest.raises(UnsafeFileError, match="a file with 2 hard links is not allowed") as caught:
        run.lock().__enter__()
    assert caught.value.filename == str(path / name)


@pytest.mark.parametrize("name", FILES)
def test_named_pipe_is_refused_without_blocking(path, capsys, name):
    """A failure of this test is a hang."""
    make_room(path, name)
    os.mkfifo(path / name)
    for command in (["resume", path], ["evaluate", path], ["curves", path]):
        assert_refused(command, capsys, f"a named pipe is not allowed in a run directory: {path / name}")
    assert main(["runs", str(path.parent)]) == 0


def test_socket_is_refused(path, capsys, monkeypatch):
    (path / "lock").unlink()
    monkeypatch.chdir(path)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("lock")
        assert_refused(["resume", path], capsys, f"a socket is not allowed in a run directory: {path / 'lock'}")


def test_run_itself_may_be_a_symbolic_link(path, tmp_path):
    (tmp_path / "link").symlink_to(path)
    run = RunDirectory.open(tmp_path / "link", pytest.fail)
    with run.lock():
        run.log(record(3))
    assert run.best_checkpoint().step == 2
    assert len(metrics_log.read(path / "metrics.jsonl")) == 3


def test_metrics_file_given_by_path_may_be_a_symbolic_link(path, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.jsonl").symlink_to(path / "metrics.jsonl")
    assert main(["curves", "link.jsonl", "--csv", "-"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


class TestAfterTheCheck:
    """Links created after the run was checked are not followed either."""

    @pytest.mark.parametrize("make", ["symbolic", "hard"])
    def test_metrics_log_link_is_refused(self, path, victims, make):
        with RunDirectory.open(path).lock() as run:
            (path / "metrics.jsonl").unlink()
            if make == "symbolic":
                (path / "metrics.jsonl").symlink_to(victims / "victim")
            else:
                (path / "metrics.jsonl").hardlink_to(victims / "victim")
            for write in (
                lambda: run.log(record(3)),
                lambda: run.save(Checkpoint(3, {}, {}, {})),
                lambda: metrics_log.fsync_log(path / "metrics.jsonl"),
            ):
                with pytest.raises(UnsafeFileError):
                    write()

    def test_lock_link_is_refused(self, path, victims, monkeypatch):
        (path / "lock").unlink()
        (path / "lock").symlink_to(victims / "victim")
        monkeypatch.setattr("clearhead.training.run_directory.check_tree", lambda *args, **how: None)
        with pytest.raises(UnsafeFileError, match="expected a regular file, got a symbolic link"):
            RunDirectory(path, {}, print).lock().__enter__()

    def test_checkpoints_folder_link_is_refused(self, path, victims):
        with RunDirectory.open(path).lock() as run:
            (path / "checkpoints").rename(path / "moved")
            (path / "checkpoints").symlink_to(victims / "victims")
            for use in (
                lambda: run.save(Checkpoint(3, {}, {}, {})),
                lambda: run.latest_checkpoint(),
                lambda: run.mark_best(9),
                lambda: checkpoint.clean(path),
                lambda: checkpoint.load(checkpoint.checkpoint_path(path, 9)),
                lambda: checkpoint.remove(checkpoint.checkpoint_path(path, 9)),
            ):
                with pytest.raises(OSError, match="expected a folder, got a symbolic link"):
                    use()

    def test_checkpoint_link_is_refused_on_read_and_replaced_on_save(self, path, victims):
        with RunDirectory.open(path).lock() as run:
            checkpoint.checkpoint_path(path, 9).symlink_to(victims / "victims/step-00000009")
            with pytest.raises(UnsafeFileError):
                run.latest_checkpoint()
            run.save(Checkpoint(9, {}, {}, {}))  # replaces the link
            assert not checkpoint.checkpoint_path(path, 9).is_symlink()

    def test_best_json_link_is_refused(self, path, victims):
        with RunDirectory.open(path).lock() as run:
            (path / "best.json").unlink()
            (path / "best.json").symlink_to(victims / "victim")
            with pytest.raises(UnsafeFileError):
                run.best_checkpoint()
            run.change_config({"recipe": "other"})

    def test_snapshots_folder_link_is_refused(self, path, victims):
        make_room(path, "snapshots")
        (path / "snapshots").symlink_to(victims / "victims")
        with pytest.raises(UnsafeFileError):
            snapshot_files(path)
