"""File calls that fail, and full disks."""

import errno
import os
import random
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.campaign.processes import Prepare, Report, intercept, run
from benchmarks.campaign.runs import HANG_SECONDS, Workspace, check_exit, resume_and_compare
from benchmarks.campaign.shards import Failure, Shard
from benchmarks.soak import differences

MODEL = "language-model"
"""the fastest of the three; which file calls are made does not depend on the model"""
ERRORS = ("ENOSPC", "EIO", "EACCES", "EROFS", "short write")


class FileCalls(Shard):
    """Each file call of a training and of a resume fails once with each error."""

    name = "file-calls"
    what = "one file call fails"
    small = 4

    def begin(self, workspace: Workspace) -> None:
        super().begin(workspace)
        workspace.reference_run(MODEL)
        self.names: dict[str, list[str]] = {}
        """the file calls of each command"""
        for command in ("train", "resume"):
            folder = workspace.new("counting")
            ended = run(
                self.argv(command, folder), folder, HANG_SECONDS, prepare=fail_at(-1, ""), may_write=[workspace.cache]
            )
            self.names[command] = [line.split()[1] for line in ended.lines if line.startswith("call ")]
        self.counts = {error: len(self.failing_calls(error)) for error in ERRORS}

    def failing_calls(self, error: str) -> list[tuple[str, int]]:
        """The calls that can fail with this error, shuffled, so that --small does not only test the first ones."""
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
            return self.workspace.train(MODEL)
        stopped = self.workspace.folder / "stopped"
        if not stopped.exists():
            stopped.mkdir()
            from benchmarks.campaign.kills import stop_at

            run(
                self.workspace.train(MODEL),
                stopped,
                HANG_SECONDS,
                prepare=stop_at(10),
                may_write=[self.workspace.cache],
            )
        self.workspace.copy(stopped / "runs" / "run", folder)
        return ["resume", "runs/run"]

    def case(self, kind: str, number: int, rng: random.Random, folder: Path) -> list[Failure]:
        command, at = self.failing_calls(kind)[number]
        argv = self.argv(command, folder)
        ended = run(argv, folder, HANG_SECONDS, prepare=fail_at(at, kind), may_write=[self.workspace.cache])
        what = f"{command} with {kind} at call {at} ({self.names[command][at]})"
        found = check_exit(ended, [0] if kind == "short write" else [0, 1, 2], what)
        if ended.code and len(ended.err.strip().splitlines()) < 1:
            found.append(Failure("no single line", f"{what} ended with code {ended.code} without a message"))
        if ended.code == 0 and not found:  # the error had no effect: then nothing may differ
            found += [
                Failure("silent difference", f"{what}: {line}")
                for line in differences(folder / "runs" / "run", self.workspace.reference_run(MODEL))
                if not (command == "train" and not (folder / "runs" / "run").exists())
            ]
        return [Failure(f.kind, f"{what}: {f.what}") for f in
                found + resume_and_compare(self.workspace, MODEL, folder, ended.saved)]  # fmt: skip


def fail_at(at: int, error: str) -> Prepare:
    """The call with this number fails with an error, or writes only a part of its data. With a negative number, report
    `call NAME` for each call."""

    def prepare(report: Report) -> None:
        n = -1

        def hook(name: str, call: Any, args: Any, kwargs: Any) -> Any:
            nonlocal n
            n += 1
            if at < 0:
                report(f"call {name}")
            if n != at:
                return call(*args, **kwargs)
            if error == "short write":
                return call(args[0], bytes(args[1])[: max(1, len(args[1]) // 2)])
            number = getattr(errno, error)
            raise OSError(number, os.strerror(number))

        intercept(Path.cwd() / "runs", hook)

    return prepare


class FullDisk(Shard):
    """A file system with room for a part of the run only, from nothing to almost all of it; then with enough room."""

    name = "full-disk"
    what = "the disk is full, at 50 levels"
    counts: ClassVar[Mapping[str, int]] = {"level": 50}
    small = 4

    def begin(self, workspace: Workspace) -> None:
        super().begin(workspace)
        self.mounted: Path | None = None
        self.need = sum(path.stat().st_size + 4096 for path in workspace.reference_run(MODEL).rglob("*")) * 3 // 2
        trial = workspace.new("trial")
        self.can_mount = mount(trial, 65536)
        if self.can_mount:
            unmount(trial)
        else:
            self.note = "no tmpfs could be mounted: ENOSPC was injected after a number of written bytes"

    def case(self, kind: str, number: int, rng: random.Random, folder: Path) -> list[Failure]:
        level = random.Random("levels").sample(range(50), 50)[number]
        size = max(4096, self.need * (level + 1) // 51 // 4096 * 4096)
        if not self.can_mount:
            ended = run(
                self.workspace.train(MODEL),
                folder,
                HANG_SECONDS,
                prepare=room_for(size),
                may_write=[self.workspace.cache],
            )
            return self.check_command(ended, size, folder)
        (folder / "runs").mkdir()
        mount(folder / "runs", size)
        self.mounted = folder / "runs"
        try:
            ended = run(self.workspace.train(MODEL), folder, HANG_SECONDS, may_write=[self.workspace.cache])
            subprocess.run(["mount", "-o", f"remount,size={16 * self.need}", str(folder / "runs")], check=True)
            return self.check_command(ended, size, folder)
        finally:
            self.end()

    def check_command(self, ended: Any, size: int, folder: Path) -> list[Failure]:
        found = check_exit(ended, [0, 1], f"train on {size} bytes")
        if ended.code == 1 and len(ended.err.strip().splitlines()) < 1:
            found.append(Failure("no single line", f"train on {size} bytes said {ended.err!r:.200}"))
        return found + resume_and_compare(self.workspace, MODEL, folder, ended.saved)

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
    """The fallback where no tmpfs can be mounted: ENOSPC after so many bytes have been written."""

    def prepare(report: Report) -> None:
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
