import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch
from safetensors.torch import save as to_safetensors

from clearhead.cli.main import main
from clearhead.recipes import config_of
from clearhead.training.checkpoint import Checkpoint, manifest
from clearhead.training.run_directory import RunDirectory
from clearhead.training.snapshots import DIGEST, snapshot_digest

STATE = "checkpoints/step-00000004/state.json"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def mine():
    """A complete run with every kind of file."""
    config = json.loads(json.dumps(config_of("reverse", {}).to_dict()))
    run = RunDirectory.create("runs/mine", config, pytest.fail)
    with run.lock():
        for step in range(1, 5):
            run.log({"kind": "train", "step": step, "epoch": 0.5 * step, "loss": 0.5, "accuracy": 0.5})
            if step % 2 == 0:
                state = {"train_state": {"best_step": 2}, "config": config}
                run.save(Checkpoint(step, {"w": torch.full((2,), float(step))}, {}, state), keep=2)
        run.mark_best(2)
        run.log({"kind": "test", "step": 4, "loss": 0.5})
    (run.path / "snapshots").mkdir()
    for step in (0, 4):
        (run.path / f"snapshots/step-{step:08d}.safetensors").write_bytes(to_safetensors({"a": torch.ones(1, 1, 2, 2)}))
    (run.path / "figures").mkdir()
    (run.path / "figures/curves.png").write_bytes(b"")
    return run.path


def findings(capsys, code=1):
    """The (path, kind) of every finding, and all problems joined in one string."""
    assert main(["verify", "mine", "--json"]) == code
    out, err = capsys.readouterr()
    assert err == ""
    found = json.loads(out)
    assert found["is_intact"] is (code == 0)
    return {(one["path"], one["kind"]) for one in found["findings"]}, " ".join(
        one["problem"] for one in found["findings"]
    )


def rewrite(path: Path, change) -> None:
    path.write_bytes(change(path.read_bytes()))


def test_intact_run_is_reported_and_unchanged(mine, capsys):
    before = {path: path.stat().st_mtime_ns for path in [mine, *mine.rglob("*")]}
    assert findings(capsys, 0) == (set(), "")
    assert main(["verify", "runs/mine"]) == 0
    assert capsys.readouterr().out == "runs/mine is intact\nintact checkpoints: 2, 4; records: 5; files: 15\n"
    assert {path: path.stat().st_mtime_ns for path in [mine, *mine.rglob("*")]} == before


def test_real_runs_are_intact(trained, capsys):
    for name in ("reverse", "mnist", "pronounce", "text"):
        assert main(["verify", str(trained / name)]) == 0, capsys.readouterr().out


def test_problems_are_listed_in_a_table(mine, capsys):
    (mine / STATE).unlink()
    (mine / "not\x1b[31mes").write_text("")
    assert main(["verify", "mine"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "runs/mine is not intact: 2 problems"
    assert [line.split()[:2] for line in lines[3:5]] == [[STATE, "missing"], ["not\\x1b[31mes", "unexpected"]]
    assert lines[-1] == "intact checkpoints: 2; records: 5; files: 15"


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_changed_and_missing_checkpoint_files_are_found(mine, capsys, name):
    for step in (2, 4):
        path = f"checkpoints/step-{step:08d}/{name}"
        whole = (mine / path).read_bytes()
        rewrite(mine / path, lambda content: content[:-1] + bytes([content[-1] ^ 1]))
        assert (path, "changed") in findings(capsys)[0]
        (mine / path).unlink()
        assert (path, "missing") in findings(capsys)[0]
        (mine / path).write_bytes(whole)


@pytest.mark.parametrize("state", [b"[]", b'{"step": 3, "state": {}}', b'{"step": 4, "state": {}, "records": 3}'])
def test_forged_state_is_found(mine, capsys, state):
    (mine / STATE).write_bytes(state)
    files = ("model.safetensors", "optimizer.safetensors", "state.json")
    contents = {name: (mine / STATE).with_name(name).read_bytes() for name in files}
    (mine / STATE).with_name("manifest.json").write_bytes(manifest(contents))
    assert findings(capsys)[0] == {(STATE, "changed")}


def test_oversized_manifest_is_reported_and_not_read(mine, capsys):
    with (mine / STATE).with_name("manifest.json").open("r+b") as file:
        file.truncate(65 * 2**20)
    assert findings(capsys) == ({("checkpoints/step-00000004/manifest.json", "unreadable")}, ANY)


def test_missing_changed_and_malformed_records_are_found(mine, capsys):
    path = mine / "metrics.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[2:]))
    assert findings(capsys) == ({("metrics.jsonl", "missing")}, "1 of 4 records are missing since step 4 was saved")
    path.write_bytes(whole.replace(b"0.5}", b"0.4}"))
    assert findings(capsys)[0] == {("metrics.jsonl", "changed")}
    path.write_bytes(whole + b"[]\n{")
    found, problems = findings(capsys)
    assert found == {("metrics.jsonl", "changed"), ("metrics.jsonl", "leftover")}
    assert "line 6 is not a JSON object" in problems
    path.write_bytes(b"".join([lines[0], b"nonsense\n", *lines[3:]]))
    assert findings(capsys) == (
        {("metrics.jsonl", "changed"), ("metrics.jsonl", "missing")},
        "line 2 is not a JSON object 1 of 4 records are missing since step 4 was saved",
    )
    path.unlink()
    assert findings(capsys)[0] == {("metrics.jsonl", "missing")}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"stap": 2}', "it cannot be used"),
        ("1e999", "it cannot be used"),
        ('{"step": 3}', "it names step 3, which has no checkpoint"),
    ],
)
def test_damaged_and_missing_best_json_are_found(mine, capsys, content, problem):
    (mine / "best.json").write_text(content)
    found, problems = findings(capsys)
    assert found == {("best.json", "changed")}
    assert problem in problems
    (mine / "best.json").unlink()
    assert findings(capsys) == ({("best.json", "missing")}, "the best step is 2, according to the checkpoint of step 4")


def test_config_that_differs_from_the_checkpoint_is_found(mine, capsys):
    whole = (mine / "config.json").read_bytes()
    values = json.loads(whole)
    values["model"]["num_heads"] *= 2
    values["training"]["steps"] += 1  # resume may change it
    (mine / "config.json").write_text(json.dumps(values))
    assert findings(capsys) == ({("config.json", "changed")}, "model.num_heads is 2, was 1 at step 4")
    for content in (b"{", b"[]", b"{}", whole.replace(b'"recipe"', b'"recipes"'), b'{"a":' * 900 + b"1" + b"}" * 900):
        (mine / "config.json").write_bytes(content)
        assert findings(capsys)[0] == {("config.json", "changed")}


def test_surplus_files_and_leftovers_are_found(mine, capsys):
    for name in ("checkpoints/saving-step-00000005", "checkpoints/damaged-step-00000003", "checkpoints/step-000000099"):
        (mine / name).mkdir()
        (mine / name / "state.json").write_text("{}")
    for name in ("notes.txt", ".config.json.0123.part", "snapshots/.step.part", "snapshots/other", STATE + ".bak"):
        (mine / name).write_text("")
    assert findings(capsys)[0] == {
        ("checkpoints/saving-step-00000005", "leftover"),
        ("checkpoints/damaged-step-00000003", "unexpected"),
        ("checkpoints/step-000000099", "unexpected"),
        ("notes.txt", "unexpected"),
        (".config.json.0123.part", "leftover"),
        ("snapshots/.step.part", "leftover"),
        ("snapshots/other", "unexpected"),
        (STATE + ".bak", "unexpected"),
    }


def test_files_in_progress_of_a_running_run_are_not_leftovers(mine, capsys):
    with RunDirectory.open("mine").lock():
        (mine / "checkpoints/saving-step-00000005").mkdir()
        with (mine / "metrics.jsonl").open("a") as file:
            file.write("{")
        assert findings(capsys, 0)[0] == set()
        assert main(["verify", "mine"]) == 0
        assert capsys.readouterr().out.startswith("runs/mine is intact (a process is training it)\n")


def test_changed_digit_in_the_test_record_is_found(mine, capsys):
    """The test record is written after the last checkpoint and therefore carries its own digest."""
    rewrite(mine / "metrics.jsonl", lambda data: data[:-150] + data[-150:].replace(b'"loss": 0.5', b'"loss": 0.4'))
    found, problem = findings(capsys)
    assert found == {("metrics.jsonl", "changed")}
    assert "line 5 does not match its SHA-256 digest" in problem


@pytest.mark.parametrize(
    "name", ["config.json", "metrics.jsonl", "best.json", "lock", STATE, "snapshots/step-00000004.safetensors"]
)
@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/dev/zero"), os.mkfifo], ids=["link", "pipe"])
def test_links_and_special_files_are_reported_without_blocking(mine, capsys, name, make):
    (mine / name).unlink()
    make(mine / name)
    assert main(["verify", "mine", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [one["kind"] for one in found if one["path"] == name] == ["unsafe"]


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/step-00000004", "snapshots", "figures"])
def test_linked_folders_are_not_followed(mine, capsys, name, tmp_path):
    (mine / name).rename(tmp_path / "moved")
    (mine / name).symlink_to(tmp_path / "moved")
    assert (name, "unsafe") in findings(capsys)[0]


def test_hard_links_are_reported(mine, capsys, tmp_path):
    os.link(mine / "metrics.jsonl", tmp_path / "other")
    assert findings(capsys) == ({("metrics.jsonl", "unsafe")}, "it is a file with 2 hard links")


def test_damaged_snapshots_are_found(mine, capsys):
    path = "snapshots/step-00000004.safetensors"
    (mine / path).write_bytes(b"\0")
    assert findings(capsys)[0] == {(path, "changed")}
    (mine / path).write_bytes(to_safetensors({"b": torch.ones(1, 1, 2, 2)}))
    assert findings(capsys)[0] == {(path, "changed")}


def test_snapshots_are_compared_with_the_digest_in_their_header(mine, capsys):
    maps, path = {"a": torch.ones(1, 1, 2, 2)}, mine / "snapshots/step-00000004.safetensors"
    path.write_bytes(to_safetensors(maps, {DIGEST: snapshot_digest(to_safetensors(maps))}))
    assert findings(capsys, 0)[0] == set()
    rewrite(path, lambda content: content[:-1] + b"\x40")
    assert findings(capsys)[0] == {("snapshots/step-00000004.safetensors", "changed")}


@pytest.mark.parametrize("argv", [["nowhere"], [], ["mine", "--jsno"]])
def test_errors_are_one_line(mine, capsys, argv):
    assert main(["verify", *argv]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_new_run_without_checkpoints_is_intact(capsys):
    RunDirectory.create("runs/mine", config_of("reverse", {}).to_dict())
    assert main(["verify", "mine"]) == 0
    assert capsys.readouterr().out == "runs/mine is intact\nintact checkpoints: none; records: 0; files: 1\n"


def test_verify_does_not_import_torch(mine):
    code = "import sys; from clearhead.cli.main import main; main(['verify', 'mine']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_copy_of_an_intact_run_is_intact(mine, capsys):
    shutil.copytree(mine, "runs/copy")
    assert main(["verify", "copy"]) == 0
