"""The judgement of mutated inputs in benchmarks/campaign: parsers, images and command lines."""

import importlib
import io
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
    fuzz,
    hangs,
    media,
    shards,
)


def kinds_of(failures):
    return {failure.kind for failure in failures}


def spin(seconds):
    """Uses this many seconds of CPU time."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


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
def test_exception_of_a_parser_is_judged(error, kind, tmp_path):
    def parse(path):
        raise error

    found = fuzz.read_one(parse, tmp_path)
    assert (found.kind if found else None) == kind


@pytest.mark.parametrize("parse", [lambda path: time.sleep(30), lambda path: spin(30)], ids=["asleep", "busy"])
def test_hanging_parser_is_detected(parse, tmp_path):
    found = fuzz.read_one(parse, tmp_path, seconds=0.05)
    assert found is not None
    assert found.kind == "hang"


def test_parser_waiting_for_a_cpu_is_not_a_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(hangs, "queued_seconds", lambda: time.monotonic())  # ready to run all the time
    assert fuzz.read_one(lambda path: time.sleep(0.3), tmp_path, seconds=0.05) is None


class Hungry(fuzz.Fuzz):
    """A parser that allocates 600 MB or kills its process."""

    name, what, counts = "hungry", "input", {"memory": 1, "death": 1}

    def parsers(self):
        return {"memory": ("x", lambda path: bytearray(600 * 2**20)), "death": ("x", lambda path: os._exit(7))}

    def input(self, kind, rng):
        return b"x"


@pytest.mark.parametrize(("kind", "expected"), [("memory", "memory"), ("death", "process died")])
def test_parser_that_exceeds_memory_or_dies_is_detected(kind, expected, case):
    shard = Hungry()
    shard.size = 1
    assert kinds_of(shard.case(kind, 0, random.Random(1), case)) == {expected}
    assert kind != "memory" or 590 < shard.peak_mb < 800


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
def test_result_of_a_command_line_is_judged(code, err, kind, monkeypatch):
    main = importlib.import_module("clearhead.cli.main")
    monkeypatch.setattr(main, "main", lambda words: (sys.stderr.write(err), code)[1])
    assert kinds_of(commands.check_command(["shapes", "x"])) == ({kind} if kind else set())


def test_png_with_a_forged_size_keeps_valid_checksums():
    data = media.with_size("png", media.pictures_of("png")[0], 5000, 7)
    assert struct.unpack(">II", data[16:24]) == (5000, 7)
    assert Image.open(io.BytesIO(data)).size == (5000, 7)


@pytest.mark.parametrize("kind", ["jpeg", "webp", "gif", "bmp"])
def test_images_can_declare_a_forged_size(kind):
    sizes = {Image.open(io.BytesIO(media.with_size(kind, data, 5000, 7))).size for data in media.pictures_of(kind)}
    assert sizes == {(5000, 7)}


@pytest.mark.parametrize("seeds", [(1, 2), (1, 1)])
def test_inputs_depend_only_on_the_seed(seeds, case):
    """The fuzzer draws its inputs one by one in a child process."""
    drawn = []
    for seed in seeds:
        shard = Hungry()
        shard.input = lambda kind, rng: b"%r" % rng.random()
        shard.parsers = lambda: {"memory": ("x", lambda path: None)}
        assert shards.run_case(shard, "memory", 0, seed, case) == []
        drawn.append((case / "x").read_bytes())
    assert (drawn[0] == drawn[1]) == (seeds[0] == seeds[1])
