"""A disk that fails: file calls with an error, and a disk that is full."""

import errno
import os
import random
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.campaign.processes import Prepare, Tell, intercept, run
from benchmarks.campaign.runs import PATIENCE, Stage, check_ended, finish_and_compare
from benchmarks.campaign.shards import Failure, Shard
from benchmarks.soak import differences

MODEL = "language-model"
"""the quickest of the three; what is written does not depend on the model"""
ERRORS = ("ENOSPC", "EIO", "EACCES", "EROFS", "short write")


class FileCalls(Shard):
    """Training, and then resuming, in which one file call fails once; each call of both with each error."""

    name = "file-calls"
    what = "one file call fails"
    small = 4

    def begin(self, stage: Stage) -> None:
        super().begin(stage)
        stage.undisturbed(MODEL)
        self.names: dict[str, list[str]] = {}
        """of all file calls of each command"""
        for command in ("train", "resume"):
            folder = stage.new("counting")
            ended = run(self.argv(command, folder), folder, PATIENCE, prepare=fail_at(-1, ""), may_write=[stage.cache])
            self.names[command] = [line.split()[1] for line in ended.lines if line.startswith("call ")]
        self.counts = {error: len(self.places(error)) for error in ERRORS}

    def places(self, error: str) -> list[tuple[str, int]]:
        """The calls that can fail with this error, in a random order: the small form is not about the first ones."""
        found = [
            (command, at)
            for command, calls in self.names.items()
            for at, name in enumerate(calls)
            if error != "short write" or name == "write"
        ]
        random.Random(error).shuffle(found)
        return found

    def argv(self, command: str, folder: Path) -> list[str]:
        if command == "train":
            return self.stage.train(MODEL)
        stopped = self.stage.folder / "stopped"
        if not stopped.exists():
            stopped.mkdir()
            from benchmarks.campaign.kills import stop_at

            run(self.stage.train(MODEL), stopped, PATIENCE, prepare=stop_at(10), may_write=[self.stage.cache])
        self.stage.copy(stopped / "runs" / "run", folder)
        return ["resume", "runs/run"]

    def case(self, kind: str, number: int, rng: random.Random, folder: Path) -> list[Failure]:
        command, at = self.places(kind)[number]
        argv = self.argv(command, folder)
        ended = run(argv, folder, PATIENCE, prepare=fail_at(at, kind), may_write=[self.stage.cache])
        what = f"{command} with {kind} at call {at} ({self.names[command][at]})"
        found = check_ended(ended, [0] if kind == "short write" else [0, 1, 2], what)
        if ended.code and len(ended.err.strip().splitlines()) < 1:
            found.append(Failure("no single line", f"{what} ended with code {ended.code} and said nothing"))
        if ended.code == 0 and not found:  # it went on as if nothing had happened: then nothing may have
            found += [
                Failure("silent difference", f"{what}: {line}")
                for line in differences(folder / "runs" / "run", self.stage.undisturbed(MODEL))
                if not (command == "train" and not (folder / "runs" / "run").exists())
            ]
        return [Failure(f.kind, f"{what}: {f.what}") for f in
                found + finish_and_compare(self.stage, MODEL, folder, ended.saved)]  # fmt: skip


def fail_at(at: int, error: str) -> Prepare:
    """The call of this number fails with an error, or writes only a part of what it was given. `call NAME` each."""

    def prepare(tell: Tell) -> None:
        n = -1

        def hook(name: str, call: Any, args: Any, kwargs: Any) -> Any:
            nonlocal n
            n += 1
            if at < 0:
                tell(f"call {name}")
            if n != at:
                return call(*args, **kwargs)
            if error == "short write":
                return call(args[0], bytes(args[1])[: max(1, len(args[1]) // 2)])
            number = getattr(errno, error)
            raise OSError(number, os.strerror(number))

        intercept(Path.cwd() / "runs", hook)

    return prepare


class FullDisk(Shard):
    """A file system that has room for a part of the run, from nothing to almost all of it; then for all."""

    name = "full-disk"
    what = "the disk is full, at 50 levels"
    counts: ClassVar[Mapping[str, int]] = {"level": 50}
    small = 4

    def begin(self, stage: Stage) -> None:
        super().begin(stage)
        self.mounted: Path | None = None
        self.need = sum(path.stat().st_size + 4096 for path in stage.undisturbed(MODEL).rglob("*")) * 3 // 2
        trial = stage.new("trial")
        self.can_mount = mount(trial, 65536)
        if self.can_mount:
            unmount(trial)
        else:
            self.note = "no tmpfs could be mounted: ENOSPC was injected after a number of written bytes"

    def case(self, kind: str, number: int, rng: random.Random, folder: Path) -> list[Failure]:
        level = random.Random("levels").sample(range(50), 50)[number]
        size = max(4096, self.need * (level + 1) // 51 // 4096 * 4096)
        if not self.can_mount:
            ended = run(self.stage.train(MODEL), folder, PATIENCE, prepare=room_for(size), may_write=[self.stage.cache])
            return self.judge(ended, size, folder)
        (folder / "runs").mkdir()
        mount(folder / "runs", size)
        self.mounted = folder / "runs"
        try:
            ended = run(self.stage.train(MODEL), folder, PATIENCE, may_write=[self.stage.cache])
            subprocess.run(["mount", "-o", f"remount,size={16 * self.need}", str(folder / "runs")], check=True)
            return self.judge(ended, size, folder)
        finally:
            self.end()

    def judge(self, ended: Any, size: int, folder: Path) -> list[Failure]:
        found = check_ended(ended, [0, 1], f"train on {size} bytes")
        if ended.code == 1 and len(ended.err.strip().splitlines()) < 1:
            found.append(Failure("no single line", f"train on {size} bytes said {ended.err!r:.200}"))
        return found + finish_and_compare(self.stage, MODEL, folder, ended.saved)

    def end(self) -> None:
        if getattr(self, "mounted", None):
            unmount(self.mounted)
            self.mounted = None


def mount(folder: Path, size: int) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    return bool(shutil.which("mount")) and subprocess.run(command, capture_output=True).returncode == 0


def unmount(folder: Path | None) -> None:
    subprocess.run(["umount", str(folder)], check=True)


def room_for(size: int) -> Prepare:
    """The named fallback where no tmpfs can be mounted: ENOSPC once so many bytes have been written."""

    def prepare(tell: Tell) -> None:
        left = size

        def hook(name: str, call: Any, args: Any, kwargs: Any) -> Any:
            nonlocal left
            if name != "write":
                return call(*args, **kwargs)
            if left <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done = call(args[0], bytes(args[1])[:left])
            left -= done
            return done

        intercept(Path.cwd() / "runs", hook)

    return prepare
