"""Each detector of benchmarks/campaign reports an injected fault, and reports nothing without one."""

import json
import os
import random
import struct
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the campaign reads /proc and forks")
pytest.importorskip("benchmarks.soak")

from benchmarks.campaign import (  # noqa: E402
    commands,
    damage,
    disk,
    hangs,
    hostile,
    kills,
    nodes,
    power,
    processes,
    runs,
)

from clearhead.training.checkpoint import step_name  # noqa: E402


def start(shard, workspace, size=1):
    shard.begin(workspace)
    shard.size = size
    return shard


def kinds_of(failures):
    return {failure.kind for failure in failures}


@pytest.mark.slow
def test_lost_save_is_detected(workspace, case):
    run = workspace.copy(workspace.reference_run("language-model"), case)
    assert runs.check_saved(run, runs.STEPS) == []
    newest = run / "checkpoints" / step_name(runs.STEPS)
    newest.rename(newest.with_name("gone"))
    assert kinds_of(runs.check_saved(run, runs.STEPS)) == {"lost save"}


def test_missing_run_is_a_lost_save_only_if_a_checkpoint_was_saved(tmp_path):
    assert kinds_of(runs.check_saved(tmp_path / "none", 4)) == {"lost save"}
    assert runs.check_saved(tmp_path / "none", 0) == []


@pytest.mark.slow
def test_resume_without_rng_state_is_a_silent_difference(workspace, case, monkeypatch):
    from clearhead.training import state

    workspace.reference_run("language-model")
    ended = processes.run(
        workspace.train("language-model"), case, 100, prepare=kills.stop_at(10), may_write=[workspace.cache]
    )
    monkeypatch.setattr(state, "restore_rng", lambda *args: None)  # inherited by the child that resumes
    assert "silent difference" in kinds_of(runs.resume_and_compare(workspace, "language-model", case, ended.saved))


def injected(line):
    """The job of a child process that runs this code instead of `clearhead`."""

    def job():
        exec(line, {"os": os, "Path": Path})
        return 0

    return job


@pytest.mark.parametrize(
    "line",
    [
        "open('../outside.txt', 'w').close()",
        "os.mkdir('../outside')",
        "os.rename('inside.txt', '../outside.txt')",
        "os.unlink('../there.txt')",
        "os.symlink('..', 'link'); open('link/outside.txt', 'w').close()",
        "os.symlink('../there.txt', 'link'); os.truncate('link', 0)",
    ],
)
def test_write_outside_is_detected(line, case):
    (case / "inside.txt").touch()
    (case.parent / "there.txt").write_text("content")
    ended = processes.run([], case, 30, job=injected(line))
    assert kinds_of(runs.check_exit(ended, [0], "it")) == {"write outside"}


def test_writes_inside_are_not_reported(case):
    line = (
        "open('a', 'w').close(); os.mkdir('b'); os.rename('a', 'b/a'); os.symlink('b', 'c'); open('c/d', 'w').close()"
    )
    ended = processes.run([], case, 30, job=injected(line))
    assert runs.check_exit(ended, [0], "it") == []


@pytest.mark.parametrize("read", ["Path('runs/a').read_bytes()", "read_regular(Path('runs/a'))"])
def test_every_read_function_can_be_made_to_fail(read, case):
    (case / "runs").mkdir()
    (case / "runs" / "a").touch()
    job = injected(f"from clearhead.files import read_regular; {read}")
    assert "call read" in processes.run([], case, 30, prepare=disk.fail_at(-1, ""), job=job).lines


@pytest.mark.parametrize("code", [5, 99])
def test_exit_code_5_and_a_crash_are_detected(code, case):
    ended = processes.run([], case, 30, job=lambda: code)
    assert kinds_of(runs.check_exit(ended, [0, 1, 2], "it")) == {"exit 5"}


def test_traceback_is_detected(case):
    ended = processes.run([], case, 30, job=lambda: 1 // 0)
    assert kinds_of(runs.check_exit(ended, [0, 99], "it")) == {"exit 5"}


def spin(seconds):
    """Uses this many seconds of CPU time."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


@pytest.mark.parametrize(
    ("job", "why"),
    [(lambda: time.sleep(60), "no progress for 0.3 s"), (lambda: spin(60), "more than 0.3 s of CPU time")],
    ids=["asleep", "busy"],
)
def test_hang_is_detected(job, why, case):
    ended = processes.run([], case, 0.3, job=lambda: job() or 0)
    assert kinds_of(runs.check_exit(ended, [0], "it")) == {"hang"}
    assert why in ended.hang


def write_slowly():
    for _ in range(30):
        time.sleep(0.05)
        print("still here")


def compute_slowly():
    for _ in range(6):
        time.sleep(0.25)
        spin(0.1)


@pytest.mark.parametrize("job", [write_slowly, compute_slowly])
def test_slow_process_that_makes_progress_is_not_a_hang(job, case):
    """It takes 1.5 s or more; each pause is shorter than the limit."""
    ended = processes.run([], case, 1.0, job=lambda: job() or 0)
    assert runs.check_exit(ended, [0], "it") == []


@pytest.mark.parametrize(("is_waiting", "is_hang"), [(True, False), (False, True)])
def test_process_waiting_for_a_cpu_is_not_a_hang(is_waiting, is_hang, monkeypatch):
    monkeypatch.setattr(hangs, "usage_of", lambda pid: hangs.Usage(cpu=1.0, written=5, is_waiting=is_waiting))
    detector = hangs.HangDetector(0.2)
    until, found = time.monotonic() + 0.6, set()
    while time.monotonic() < until:
        found.add(detector.check([1]))
        time.sleep(0.01)
    assert any(found) == is_hang


def test_wall_time_alone_is_a_hang_only_after_many_times_the_limit(monkeypatch):
    monkeypatch.setattr(hangs, "usage_of", lambda pid: hangs.Usage(cpu=1.0, written=5, is_waiting=True))
    monkeypatch.setattr(hangs, "BACKSTOP", 3)
    detector = hangs.HangDetector(0.1)
    began = time.monotonic()
    while not (why := detector.check([1])):
        time.sleep(0.01)
    assert time.monotonic() - began >= 0.3
    assert "took more than" in why


def test_child_is_killed_with_the_campaign(case):
    """The campaign runs in a child process, which is killed while it waits for its own child."""

    def campaign():
        child = processes.Child([], case, job=lambda: time.sleep(60) or 0, name="inner")
        (case / "pid").write_text(str(child.pid))
        return child.wait(60).code

    outer = processes.Child([], case, job=campaign, name="outer")
    until = time.monotonic() + 30
    while not ((case / "pid").exists() and (case / "pid").read_text()) and time.monotonic() < until:
        time.sleep(0.01)
    inner = int((case / "pid").read_text())
    assert nodes.is_alive(inner)
    time.sleep(0.2)  # it has asked for its end by then
    os.kill(outer.pid, 9)
    outer.wait(30)
    while nodes.is_alive(inner) and time.monotonic() < until:
        time.sleep(0.01)
    assert not nodes.is_alive(inner)


@pytest.mark.slow
def test_non_finite_checkpoint_is_detected(workspace, case):
    from safetensors.torch import load_file, save_file

    run = workspace.copy(workspace.reference_run("language-model"), case)
    assert damage.not_finite(run) == []
    path = max(run.glob("checkpoints/step-*")) / "optimizer.safetensors"
    tensors = load_file(path)
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel() > 1)
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, path)
    assert [line.split()[0] for line in damage.not_finite(run)] == [name]


@pytest.mark.slow
def test_save_without_fsync_is_lost_in_a_power_failure(workspace, case):
    made = start(power.PowerFailures(), workspace)
    made.operations = [op for op in made.operations if op["do"] != "fsync"]
    found = set()
    for number in range(12):
        folder = case / str(number)
        folder.mkdir()
        power.survivors(made.operations, random.Random(number)).build(folder)
        found |= kinds_of(runs.check_saved(folder / "runs" / "run", runs.STEPS))
    assert "lost save" in found


def test_synced_bytes_survive_a_power_failure(tmp_path):
    written = {"do": "write", "path": "a", "data": "b25l"}
    synced = [{"do": "create", "path": "a"}, written, {"do": "fsync", "path": "a"}, {"do": "fsync", "path": "."}]
    contents = set()
    for number in range(40):
        folder = tmp_path / str(number)
        power.survivors([*synced, written | {"data": "dHdv"}], random.Random(number)).build(folder)
        contents.add((folder / "a").read_bytes())
    assert all(content.startswith(b"one") for content in contents)
    assert {b"one", b"onetwo", b"one\0\0\0"} <= contents


def test_name_without_a_folder_fsync_may_be_lost(tmp_path):
    unsynced = [{"do": "create", "path": "a"}, {"do": "fsync", "path": "a"}]
    there = set()
    for number in range(40):
        folder = tmp_path / str(number)
        power.survivors(unsynced, random.Random(number)).build(folder)
        there.add((folder / "a").exists())
    assert there == {True, False}


@pytest.mark.slow
def test_undetected_bit_flip_is_a_silent_difference(workspace, case, monkeypatch):
    """With a reader that does not verify digests."""
    from clearhead.training import checkpoint

    made = start(damage.Flips(), workspace)
    best = json.loads((made.stopped / "best.json").read_text())["step"]
    path = f"checkpoints/{step_name(best)}/optimizer.safetensors"  # whose averaged weights are what predicts
    header = 8 + struct.unpack("<Q", (made.stopped / path).read_bytes()[:8])[0]
    monkeypatch.setattr(made, "choose_flip", lambda kind, number: (path, 8 * (header + 4 * number + 3) + 6))
    made.size = 200
    monkeypatch.setattr(checkpoint, "disagreements", lambda files, written: {})
    assert "silent difference" in kinds_of(made.case("checkpoint", 20, random.Random(1), case))


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ((0, "other", ""), "silent difference"),
        ((0, "other", "warning: damaged"), None),
        ((0, "good", ""), None),
        ((2, "", "clearhead: damaged"), None),
        ((5, "", "clearhead: KeyError"), "exit 5"),
    ],
)
def test_output_after_a_bit_flip_is_judged(answer, kind, monkeypatch):
    shard = damage.Flips()
    shard.intact = {tuple(command): (0, "good", "") for command in damage.commands_for("config")}
    monkeypatch.setattr(damage, "run_command", lambda command: answer)
    assert kinds_of(shard.check_flip("config", "bit 1")) == ({kind} if kind else set())


def test_change_outside_through_a_link_is_detected(tmp_path):
    (tmp_path / "victim.txt").write_text("precious")
    before = hostile.tree_state(tmp_path)
    assert hostile.changes(before, hostile.tree_state(tmp_path)) == []
    (tmp_path / "victim.txt").write_text("gone")
    (tmp_path / "new.txt").touch()
    assert hostile.changes(before, hostile.tree_state(tmp_path)) == ["new.txt was created", "victim.txt was changed"]
    (tmp_path / "victim.txt").unlink()
    assert "victim.txt was deleted" in hostile.changes(before, hostile.tree_state(tmp_path))


@pytest.mark.parametrize("kind", list(hostile.Links.counts))
@pytest.mark.parametrize("place", ["lock", "checkpoints"])
def test_link_replaces_a_missing_or_an_existing_path(kind, place, tmp_path):
    outside, run = tmp_path / "outside", tmp_path / "run"
    (outside / "victims").mkdir(parents=True)
    (outside / "victim.txt").touch()
    (run / "checkpoints").mkdir(parents=True)
    hostile.plant(kind, run / place, outside)
    assert os.path.lexists(run / place)
    assert not (run / place).is_file() or (run / place).stat().st_ino == (outside / "victim.txt").stat().st_ino


def test_growing_memory_and_files_are_leaks():
    flat, rising = [10**8] * 50, [10**8 + 10**6 * i for i in range(50)]
    assert commands.find_leaks(flat, [9] * 50, 16 * 2**20) == []
    assert kinds_of(commands.find_leaks(rising, [9] * 50, 16 * 2**20)) == {"leak"}
    assert kinds_of(commands.find_leaks(flat, list(range(50)), 16 * 2**20)) == {"leak"}


def test_two_simultaneous_owners_are_detected():
    def owner(begin, end):
        return processes.ChildResult(0, [f"owns {begin}", f"owned {end}"])

    assert kills.overlapping_owners([owner(1, 5), owner(5, 9)]) == []
    assert kinds_of(kills.overlapping_owners([owner(1, 5), owner(4, 9)])) == {"two owners"}
