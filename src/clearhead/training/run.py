"""The run directory: everything about one training run, with one owner at a time.

    runs/mine/config.json       what is trained, resolved
    runs/mine/metrics.jsonl     what was measured
    runs/mine/checkpoints/      where to go on from
    runs/mine/best.json         which of them is the best
    runs/mine/probe/            attention while it is learnt, if so asked
    runs/mine/figures/          pictures
    runs/mine/lock              held by the process that trains; the system lets go of it when that process ends

Anyone may read; only the owner, inside `with run.lock():`, writes.
"""

import errno
import importlib.util
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from clearhead.files import (
    from_json,
    fsync_folder,
    remove_parts,
    to_json,
    write_all,
    write_atomic,
    write_durable,
)
from clearhead.training import checkpoint, records
from clearhead.training.checkpoint import DamagedCheckpointError, NoWholeCheckpointError, Snapshot
from clearhead.training.records import CONFIG, LOCK, METRICS, Record

BEST, PROBE = "best.json", "probe"
Report = Callable[[str], None]


def report_on_stderr(message: str) -> None:
    print(message, file=sys.stderr)


class RunDirectory:
    """`create` a new one or `open` one that is there; log first, then save, so that no checkpoint knows more steps than
    the records."""

    def __init__(self, path: Path, config: dict[str, Any], report: Report):
        self.path = path
        self.config = config
        self.report = report
        self.is_owned = False

    @classmethod
    def create(cls, path: str | Path, config: dict[str, Any], report: Report = report_on_stderr) -> "RunDirectory":
        """A new folder, there with its config or not at all."""
        path, content = Path(path), to_json(config, indent=2)
        new = path.with_name(f".{path.name}.new-{secrets.token_hex(4)}")
        check_new(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new.mkdir()
            (new / "checkpoints").mkdir()
            write_durable(new / CONFIG, content)
            fsync_folder(new)
            os.rename(new, path)
            fsync_folder(path.parent)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another process was faster
                check_new(path)
            raise OSError(error.errno, f"the run is not created: {error.strerror or error}", str(path)) from error
        finally:
            shutil.rmtree(new, ignore_errors=True)
        return cls(path, from_json(content), report)

    @classmethod
    def open(cls, path: str | Path, report: Report = report_on_stderr) -> "RunDirectory":
        """The run at this path, or the one of this name in runs/."""
        path = records.find_run(path)
        try:
            config = from_json((path / CONFIG).read_bytes())
        except ValueError as error:
            raise ValueError(f"{path / CONFIG} must be JSON, got an error: {error}; correct it there") from None
        if not isinstance(config, dict):
            raise ValueError(f"{path / CONFIG} must hold the names of settings, got {config!r:.60}; correct it there")
        return cls(path, config, report)

    @contextmanager
    def lock(self) -> Iterator["RunDirectory"]:
        """Makes this process the owner, and tidies up what a killed owner left; OSError if another process is."""
        file = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            take(file, self.path)
            self.is_owned = True
            (self.path / "checkpoints").mkdir(exist_ok=True)  # what cannot be saved to is known before the first step
            checkpoint.clean(self.path)
            for folder in (self.path, self.path / PROBE):  # not figures, which anyone may be drawing
                remove_parts(folder)
            records.drop_torn(self.path / METRICS)
            yield self
        finally:
            self.is_owned = False
            os.close(file)

    def change_config(self, config: dict[str, Any]) -> None:
        """Replaces config.json; each checkpoint keeps the config that it was saved with."""
        assert self.is_owned, "only the owner writes: use `with run.lock():`"
        content = to_json(config, indent=2)
        write_atomic(self.path / CONFIG, content)
        self.config = from_json(content)

    def log(self, record: Record) -> None:
        """Appends one record; ValueError if a number in it is not finite."""
        assert self.is_owned, "only the owner writes: use `with run.lock():`"
        records.append(self.path / METRICS, record)

    def records(self) -> list[Record]:
        return records.read(self.path / METRICS)

    def drop_after(self, step: int) -> None:
        """Forgets the records past a step, before the run goes on from there."""
        assert self.is_owned, "only the owner writes: use `with run.lock():`"
        records.drop_after(self.path / METRICS, step)

    def save(self, snapshot: Snapshot, keep: int = 3) -> Path:
        """Saves a checkpoint, then deletes all but the last `keep` and the best."""
        assert self.is_owned, "only the owner writes: use `with run.lock():`"
        records.make_durable(self.path / METRICS)
        place = checkpoint.save(self.path, snapshot)
        steps = checkpoint.steps(self.path)
        for step in set(steps) - set(steps[-max(keep, 1) :]) - {snapshot.step, self.best_step()}:
            try:
                checkpoint.remove(self.path / "checkpoints" / checkpoint.name_of(step))
            except OSError as error:  # what had to be saved is saved
                self.report(f"the old checkpoint of step {step} is not deleted: {error.strerror or error}")
        return place

    def mark_best(self, step: int) -> None:
        """From now on the checkpoint of this step is the best, and is kept."""
        assert self.is_owned, "only the owner writes: use `with run.lock():`"
        if step not in checkpoint.steps(self.path):
            raise LookupError(f"the best step must have a checkpoint, got step {step} in {self.path}; save it first")
        if step != self.best_step():
            write_atomic(self.path / BEST, to_json({"step": step}))

    def best_step(self) -> int | None:
        with suppress(FileNotFoundError, ValueError, LookupError, TypeError):
            return int(from_json((self.path / BEST).read_bytes())["step"])
        return None

    def best(self) -> Snapshot | None:
        """The best checkpoint; the newest if none was marked, or if it is damaged, which is reported."""
        step = self.best_step()
        if step is not None:
            try:
                return checkpoint.load(self.path / "checkpoints" / checkpoint.name_of(step))
            except DamagedCheckpointError as error:
                if self.best_step() != step:  # the owner found a better one while we read
                    return self.best()
                self.report(f"the best checkpoint, of step {step}, cannot be used: {error}; the newest is taken")
        return self.newest()

    def newest(self) -> Snapshot | None:
        """The newest whole checkpoint, None before the first. The owner renames damaged ones aside."""
        found = checkpoint.newest(self.path, self.report, set_aside=self.is_owned)
        if found is None and (self.best_step() is not None or any(r.get("kind") == "test" for r in self.records())):
            message = "its checkpoints are gone; put a copy back, or train anew under another name"
            raise NoWholeCheckpointError(errno.ENOENT, message, str(self.path))
        return found


def check_new(path: Path) -> None:
    """Refuses a folder that is there with something in it: a run is never overwritten."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        way_on = f"go on with it by `clearhead resume {path}`, or " if (path / CONFIG).is_file() else ""
        raise ValueError(f"a new run needs a new folder, got {path}, which exists; {way_on}choose another name")


def take(file: int, path: Path) -> None:
    """The lock on an open file, at once or not at all; the owner's number in it is for the message only."""
    if importlib.util.find_spec("fcntl") is None:
        message = "a run is locked with flock, which Linux and macOS have; use one of them"
        raise OSError(errno.ENOSYS, message, str(path))
    try:
        lock_exclusively(file)
    except BlockingIOError as error:
        owner = os.read(file, 20).decode(errors="replace").strip() or "another"
        message = f"a run has one owner at a time, and process {owner} owns this one; wait until it ends, or stop it"
        raise OSError(error.errno, message, str(path)) from None
    os.ftruncate(file, 0)
    write_all(file, f"{os.getpid()}\n".encode())


def lock_exclusively(file: int) -> None:
    """The exclusive lock; BlockingIOError if another process has it. A shared lock is waited for: `records.is_locked`
    holds it for an instant when somebody looks at a run."""
    import fcntl

    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # fails exactly where there is an exclusive owner
            fcntl.flock(file, fcntl.LOCK_UN)
            time.sleep(0.02)
