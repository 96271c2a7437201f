"""Each detector of benchmarks/campaign reports an injected fault, and reports nothing without one."""

import importlib
import io
import json
import os
import random
import struct
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the campaign reads /proc and forks")
pytest.importorskip("benchmarks.soak")

from benchmarks.campaign import (  # noqa: E402
    commands,
    damage,
    disk,
    fuzz,
    hangs,
    hostile,
    kills,
    media,
    nodes,
    power,
    processes,
    runs,
    shards,
)

from clearhead.training.checkpoint import step_name  # noqa: E402


def begun(shard, stage, size=1):
    shard.begin(stage)
    shard.size = size
    return shard


def kinds_of(failures):
    return {failure.kind for failure in failures}


@pytest.mark.slow
def test_a_lost_save_is_found(stage, case):
    run = stage.copy(stage.undisturbed("language-model"), case)
    assert runs.check_saved(run, runs.STEPS) == []
    newest = run / "checkpoints" / step_name(runs.STEPS)
    newest.rename(newest.with_name("gone"))
    assert kinds_of(runs.check_saved(run, runs.STEPS)) == {"lost save"}


def test_a_run_that_is_gone_is_a_lost_save_only_if_something_was_saved(tmp_path):
    assert kinds_of(runs.check_saved(tmp_path / "none", 4)) == {"lost save"}
    assert runs.check_saved(tmp_path / "none", 0) == []


@pytest.mark.slow
def test_a_resume_that_forgets_its_random_state_is_a_silent_difference(stage, case, monkeypatch):
    from clearhead.training import state

    stage.undisturbed("language-model")
    ended = processes.run(stage.train("language-model"), case, 100, prepare=kills.stop_at(10), may_write=[stage.cache])
    monkeypatch.setattr(state, "restore_rng", lambda *args: None)  # inherited by the child that resumes
    assert "silent difference" in kinds_of(runs.finish_and_compare(stage, "language-model", case, ended.saved))


def planted(line):
    """A child in which `clearhead` runs this code instead."""

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
def test_a_write_outside_is_found(line, case):
    (case / "inside.txt").touch()
    (case.parent / "there.txt").write_text("content")
    ended = processes.run([], case, 30, job=planted(line))
    assert kinds_of(runs.check_ended(ended, [0], "it")) == {"write outside"}


def test_writes_inside_are_none_outside(case):
    line = (
        "open('a', 'w').close(); os.mkdir('b'); os.rename('a', 'b/a'); os.symlink('b', 'c'); open('c/d', 'w').close()"
    )
    ended = processes.run([], case, 30, job=planted(line))
    assert runs.check_ended(ended, [0], "it") == []


@pytest.mark.parametrize("read", ["Path('runs/a').read_bytes()", "read_regular(Path('runs/a'))"])
def test_every_way_of_reading_a_file_can_be_made_to_fail(read, case):
    (case / "runs").mkdir()
    (case / "runs" / "a").touch()
    job = planted(f"from clearhead.files import read_regular; {read}")
    assert "call read" in processes.run([], case, 30, prepare=disk.fail_at(-1, ""), job=job).lines


@pytest.mark.parametrize("code", [5, 99])
def test_exit_5_and_a_crash_are_found(code, case):
    ended = processes.run([], case, 30, job=lambda: code)
    assert kinds_of(runs.check_ended(ended, [0, 1, 2], "it")) == {"exit 5"}


def test_a_traceback_is_found(case):
    ended = processes.run([], case, 30, job=lambda: 1 // 0)
    assert kinds_of(runs.check_ended(ended, [0, 99], "it")) == {"exit 5"}


def spin(seconds):
    """Uses so many seconds of CPU time."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


@pytest.mark.parametrize(
    ("job", "why"),
    [(lambda: time.sleep(60), "no progress for 0.3 s"), (lambda: spin(60), "more than 0.3 s of CPU time")],
    ids=["asleep", "busy"],
)
def test_a_hang_is_found(job, why, case):
    ended = processes.run([], case, 0.3, job=lambda: job() or 0)
    assert kinds_of(runs.check_ended(ended, [0], "it")) == {"hang"}
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
def test_a_slow_process_that_makes_progress_is_no_hang(job, case):
    """It takes 1.5 s or more; each pause is shorter than the limit."""
    ended = processes.run([], case, 1.0, job=lambda: job() or 0)
    assert runs.check_ended(ended, [0], "it") == []


@pytest.mark.parametrize(("is_waiting", "is_hang"), [(True, False), (False, True)])
def test_a_process_that_gets_no_processor_is_no_hang(is_waiting, is_hang, monkeypatch):
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


def test_a_child_ends_with_the_campaign(case):
    """The campaign is a child here, which is killed while it waits for its own."""

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
def test_a_non_finite_checkpoint_is_found(stage, case):
    from safetensors.torch import load_file, save_file

    run = stage.copy(stage.undisturbed("language-model"), case)
    assert damage.not_finite(run) == []
    path = max(run.glob("checkpoints/step-*")) / "optimizer.safetensors"
    tensors = load_file(path)
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel() > 1)
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, path)
    assert [line.split()[0] for line in damage.not_finite(run)] == [name]


@pytest.mark.slow
def test_a_save_without_fsync_is_lost_in_a_power_failure(stage, case):
    made = begun(power.PowerFailures(), stage)
    made.operations = [op for op in made.operations if op["do"] != "fsync"]
    found = set()
    for number in range(12):
        folder = case / str(number)
        folder.mkdir()
        power.survivors(made.operations, random.Random(number)).build(folder)
        found |= kinds_of(runs.check_saved(folder / "runs" / "run", runs.STEPS))
    assert "lost save" in found


def test_after_a_power_failure_a_file_has_what_was_synced(tmp_path):
    written = {"do": "write", "path": "a", "data": "b25l"}
    synced = [{"do": "create", "path": "a"}, written, {"do": "fsync", "path": "a"}, {"do": "fsync", "path": "."}]
    contents = set()
    for number in range(40):
        folder = tmp_path / str(number)
        power.survivors([*synced, written | {"data": "dHdv"}], random.Random(number)).build(folder)
        contents.add((folder / "a").read_bytes())
    assert all(content.startswith(b"one") for content in contents)
    assert {b"one", b"onetwo", b"one\0\0\0"} <= contents


def test_a_name_that_was_not_synced_may_be_lost(tmp_path):
    unsynced = [{"do": "create", "path": "a"}, {"do": "fsync", "path": "a"}]
    there = set()
    for number in range(40):
        folder = tmp_path / str(number)
        power.survivors(unsynced, random.Random(number)).build(folder)
        there.add((folder / "a").exists())
    assert there == {True, False}


@pytest.mark.slow
def test_a_flip_that_nothing_notices_is_found(stage, case, monkeypatch):
    """With a reader that does not check what it reads."""
    from clearhead.training import checkpoint

    made = begun(damage.Flips(), stage)
    best = json.loads((made.half / "best.json").read_text())["step"]
    path = f"checkpoints/{step_name(best)}/optimizer.safetensors"  # whose averaged weights are what predicts
    header = 8 + struct.unpack("<Q", (made.half / path).read_bytes()[:8])[0]
    monkeypatch.setattr(made, "flip_of", lambda kind, number: (path, 8 * (header + 4 * number + 3) + 6))
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
def test_an_answer_after_a_flip_is_judged(answer, kind, monkeypatch):
    shard = damage.Flips()
    shard.intact = {tuple(command): (0, "good", "") for command in damage.commands_for("config")}
    monkeypatch.setattr(damage, "asked", lambda command: answer)
    assert kinds_of(shard.silent("config", "bit 1")) == ({kind} if kind else set())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError("normalize"), "exit 5"),
        (RecursionError("deep"), "exit 5"),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "x"), "exit 5"),
        (ValueError(""), "no single line"),
        (MemoryError(), "memory"),
        (ValueError("a size must be positive, got -1"), None),
        (LookupError("no such run"), None),
        (OSError(5, "Input/output error"), None),
    ],
)
def test_what_comes_out_of_a_parser_is_judged(error, kind, tmp_path):
    def parse(path):
        raise error

    found = fuzz.read_one(parse, tmp_path)
    assert (found.kind if found else None) == kind


@pytest.mark.parametrize("parse", [lambda path: time.sleep(30), lambda path: spin(30)], ids=["asleep", "busy"])
def test_a_parser_that_hangs_is_found(parse, tmp_path):
    found = fuzz.read_one(parse, tmp_path, seconds=0.05)
    assert found is not None
    assert found.kind == "hang"


def test_a_parser_that_waits_for_a_processor_does_not_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(hangs, "queued_seconds", lambda: time.monotonic())  # ready to run all the time
    assert fuzz.read_one(lambda path: time.sleep(0.3), tmp_path, seconds=0.05) is None


class Hungry(fuzz.Fuzz):
    """A parser that takes 600 MB, or dies."""

    name, what, counts = "hungry", "input", {"memory": 1, "death": 1}

    def parsers(self):
        return {"memory": ("x", lambda path: bytearray(600 * 2**20)), "death": ("x", lambda path: os._exit(7))}

    def input(self, kind, rng):
        return b"x"


@pytest.mark.parametrize(("kind", "expected"), [("memory", "memory"), ("death", "process died")])
def test_a_parser_that_needs_too_much_memory_or_dies_is_found(kind, expected, case):
    shard = Hungry()
    shard.size = 1
    assert kinds_of(shard.case(kind, 0, random.Random(1), case)) == {expected}


@pytest.mark.parametrize(
    ("code", "err", "kind"),
    [
        (5, "clearhead: KeyError\n", "exit 5"),
        (1, "Traceback (most recent call last):\n", "exit 5"),
        (2, "one\ntwo\n", "no single line"),
        (2, "", "no single line"),
        (2, "clearhead: \x1b]0;t\x07 is unknown\n", "escape sequence"),
        (2, "clearhead: x is unknown\n", None),
        (0, "", None),
    ],
)
def test_a_command_line_is_judged(code, err, kind, monkeypatch):
    main = importlib.import_module("clearhead.cli.main")
    monkeypatch.setattr(main, "main", lambda words: (sys.stderr.write(err), code)[1])
    assert kinds_of(commands.judge(["shapes", "x"])) == ({kind} if kind else set())


def test_a_change_outside_through_a_link_is_found(tmp_path):
    (tmp_path / "victim.txt").write_text("precious")
    before = hostile.state_of(tmp_path)
    assert hostile.changes(before, hostile.state_of(tmp_path)) == []
    (tmp_path / "victim.txt").write_text("gone")
    (tmp_path / "new.txt").touch()
    assert hostile.changes(before, hostile.state_of(tmp_path)) == ["new.txt was made", "victim.txt was changed"]
    (tmp_path / "victim.txt").unlink()
    assert "victim.txt was deleted" in hostile.changes(before, hostile.state_of(tmp_path))


@pytest.mark.parametrize("kind", list(hostile.Links.counts))
@pytest.mark.parametrize("place", ["lock", "checkpoints"])
def test_a_link_is_planted_where_something_is_or_is_not(kind, place, tmp_path):
    outside, run = tmp_path / "outside", tmp_path / "run"
    (outside / "victims").mkdir(parents=True)
    (outside / "victim.txt").touch()
    (run / "checkpoints").mkdir(parents=True)
    hostile.plant(kind, run / place, outside)
    assert os.path.lexists(run / place)
    assert not (run / place).is_file() or (run / place).stat().st_ino == (outside / "victim.txt").stat().st_ino


def test_growing_memory_and_files_are_leaks():
    flat, rising = [10**8] * 50, [10**8 + 10**6 * i for i in range(50)]
    assert commands.grown(flat, [9] * 50, 16 * 2**20) == []
    assert kinds_of(commands.grown(rising, [9] * 50, 16 * 2**20)) == {"leak"}
    assert kinds_of(commands.grown(flat, list(range(50)), 16 * 2**20)) == {"leak"}


def test_two_owners_at_a_time_are_found():
    def owner(begin, end):
        return processes.Ended(0, [f"owns {begin}", f"owned {end}"])

    assert kills.two_owners([owner(1, 5), owner(5, 9)]) == []
    assert kinds_of(kills.two_owners([owner(1, 5), owner(4, 9)])) == {"two owners"}


def test_a_png_keeps_valid_checksums_with_another_size():
    data = media.with_size("png", media.pictures_of("png")[0], 5000, 7)
    assert struct.unpack(">II", data[16:24]) == (5000, 7)
    assert Image.open(io.BytesIO(data)).size == (5000, 7)


@pytest.mark.parametrize("kind", ["jpeg", "webp", "gif", "bmp"])
def test_images_can_declare_another_size(kind):
    sizes = {Image.open(io.BytesIO(media.with_size(kind, data, 5000, 7))).size for data in media.pictures_of(kind)}
    assert sizes == {(5000, 7)}


@pytest.mark.parametrize("seeds", [(1, 2), (1, 1)])
def test_another_seed_means_other_inputs(seeds, case):
    """Of a fuzzer, whose inputs are drawn one by one in a child."""
    drawn = []
    for seed in seeds:
        shard = Hungry()
        shard.input = lambda kind, rng: b"%r" % rng.random()
        shard.parsers = lambda: {"memory": ("x", lambda path: None)}
        assert shards.one_case(shard, "memory", 0, seed, case) == []
        drawn.append((case / "x").read_bytes())
    assert (drawn[0] == drawn[1]) == (seeds[0] == seeds[1])
