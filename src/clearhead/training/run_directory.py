"""The run directory: everything about one training run, with one owner at a time.

    runs/mine/config.json       what is trained, resolved
    runs/mine/metrics.jsonl     what was measured
    runs/mine/checkpoints/      where to go on from
    runs/mine/best.json         which of them is the best
    runs/mine/snapshots/            attention while it is learnt, if so asked
    runs/mine/figures/          pictures
    runs/mine/lock              held by the process that trains; the system lets go of it when that process ends

Anyone may read; only the owner, inside `with run.lock():`, writes. A run may come from a stranger: a symbolic link or a
special file in it is refused before anything is read, a second hard link of a file before anything is written, and
nothing is ever read or written through one. The path of the run itself may be a link.
"""

import errno
import importlib.util
import os
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from clearhead.files import (
    UnsafeFileError,
    check_tree,
    from_json,
    fsync_folder,
    make_folder,
    open_regular,
    read_regular,
    remove_parts,
    to_json,
    write_all,
    write_atomic,
    write_durable,
)
from clearhead.messages import printable
from clearhead.training import checkpoint, metrics_log
from clearhead.training.checkpoint import Checkpoint, DamagedCheckpointError, NoIntactCheckpointError
from clearhead.training.layout import BEST, CHECKPOINTS, FIGURES, LARGEST_JSON, SNAPSHOTS, best_in, is_step
from clearhead.training.metrics_log import CONFIG, LOCK, METRICS, Digest, Record

KEEP = 3
"""newest checkpoints that stay unless the config says otherwise"""
ABANDONED = 3600.0
"""seconds after which nobody is still creating a run or drawing a figure"""
Report = Callable[[str], None]


def report_on_stderr(message: str) -> None:
    print(printable(message), file=sys.stderr)


class RunDirectory:
    """`create` a new one or `open` one that is there; log first, then save, so that no checkpoint knows more steps than
    the records."""

    def __init__(self, path: Path, config: dict[str, Any], report: Report):
        self.path = path
        self.config = config
        self.report = report
        self.is_owned = False
        self.keep = keep_in(config)
        """newest checkpoints that stay, beside the best; 0 before anybody has said"""
        self.digest = Digest()
        """of the records, while this process is the owner"""
        self.restored: Checkpoint | None = None
        """the newest checkpoint, without its tensors, once it was asked for"""
        self.reported_best = ""
        """a damaged best.json is reported once"""

    @classmethod
    def create(cls, path: str | Path, config: dict[str, Any], report: Report = report_on_stderr) -> "RunDirectory":
        """A new folder, there with its config or not at all."""
        path, content = Path(path), to_json(config, indent=2)
        new = path.with_name(f".{path.name}.new-{secrets.token_hex(4)}")
        check_new(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(path.parent)
            os.mkdir(new)
            os.mkdir(new / CHECKPOINTS)
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
        path = metrics_log.find_run(path)
        try:
            config = from_json(read_regular(path / CONFIG, LARGEST_JSON))
        except ValueError as error:
            raise ValueError(f"{path / CONFIG} must be JSON, got an error: {error}; correct it there") from None
        if not isinstance(config, dict):
            raise ValueError(f"{path / CONFIG} must hold the names of settings, got {config!r:.60}; correct it there")
        return cls(path, config, report)

    @contextmanager
    def lock(self) -> Iterator["RunDirectory"]:
        """Makes this process the owner, and tidies up what a killed owner left; OSError if another process is."""
        check_tree(self.path, to_write=True)
        file = open_regular(self.path / LOCK, os.O_RDWR | os.O_CREAT)
        try:
            take(file, self.path)
            self.is_owned = True
            make_folder(self.path / CHECKPOINTS)  # what cannot be saved to is known before the first step
            self.tidy()
            if n_damaged := metrics_log.truncate_partial(self.path / METRICS):
                lines_are = "line is" if n_damaged == 1 else "lines are"
                self.report(f"{self.path / METRICS}: {n_damaged:,} damaged {lines_are} removed from its end")
            self.digest = Digest(metrics_log.lines(self.path / METRICS))
            yield self
        finally:
            self.is_owned = False
            os.close(file)

    def tidy(self) -> None:
        """Removes what processes that were killed have left."""
        checkpoint.clean(self.path)
        for folder in (self.path, self.path / SNAPSHOTS):
            remove_parts(folder)
        for folder in (self.path / FIGURES, self.path / FIGURES / "look"):  # anyone may be drawing there
            remove_parts(folder, older_than=ABANDONED)
        remove_abandoned(self.path.parent)

    def change_config(self, config: dict[str, Any]) -> None:
        """Replaces config.json; each checkpoint keeps the config that it was saved with."""
        assert self.is_owned, "only the owner writes: use `with run.lock():`"
        content = to_json(config, indent=2)
        write_atomic(self.path / CONFIG, content)
        self.config = from_json(content)

    def log(self, record: Record) -> None:
        """Appends one record; ValueError if a number in it is not finite."""
        assert self.is_owned, "only the owner writes: use `with run.lock():`"
        self.digest.add(metrics_log.append(self.path / METRICS, record))

    def records(self) -> list[Record]:
        return metrics_log.read(self.path / METRICS)

    def iter_records(self) -> Iterator[Record]:
        """One at a time: there may be more than fit into memory."""
        return metrics_log.iter_records(self.path / METRICS)

    def was_tested(self) -> bool:
        return any(record.get("kind") == "test" for record in self.iter_records())

    def drop_after(self, step: int) -> None:
        """Forgets the records past a step, before the run goes on from there. Those up to it must be the ones that the
        checkpoint was saved after; if not, that is reported."""
        assert self.is_owned, "only the owner writes: use `with run.lock():`"
        metrics_log.drop_after(self.path / METRICS, step)
        self.digest = Digest(metrics_log.lines(self.path / METRICS))
        found = self.restored
        known = found.records if found and found.step == step else None
        if known and (problem := known.difference(metrics_log.lines(self.path / METRICS))):
            self.report(f"{self.path / METRICS} has changed since the checkpoint of step {step} was saved: {problem}")

    def save(self, snapshot: Checkpoint, keep: int = KEEP) -> Path:
        """Saves a checkpoint, then deletes all but the last `keep` and the best."""
        assert self.is_owned, "only the owner writes: use `with run.lock():`"
        metrics_log.fsync_log(self.path / METRICS)
        place = checkpoint.save(self.path, replace(snapshot, records=self.digest.written()))
        self.keep = max(keep, 1)
        self.delete_old(snapshot.step)
        return place

    def delete_old(self, step: int) -> None:
        """Deletes all checkpoints but the last ones, the best and that of this step; none while it is not known how
        many stay, or which is the best."""
        if not self.keep:
            return
        try:
            best = self.read_best()
        except (OSError, ValueError):
            return
        steps = checkpoint.steps(self.path)
        for old in set(steps) - set(steps[-self.keep :]) - {step, best}:
            try:
                checkpoint.remove(checkpoint.checkpoint_path(self.path, old))
            except OSError as error:  # what had to be saved is saved
                self.report(f"the old checkpoint of step {old} is not deleted: {error.strerror or error}")

    def mark_best(self, step: int) -> None:
        """From now on the checkpoint of this step is the best, and is kept."""
        assert self.is_owned, "only the owner writes: use `with run.lock():`"
        if step not in checkpoint.steps(self.path):
            raise LookupError(f"the best step must have a checkpoint, got step {step} in {self.path}; save it first")
        if step != self.best_step():
            write_atomic(self.path / BEST, to_json({"step": step}))
            self.delete_old(step)  # the one that was the best before

    def read_best(self) -> int | None:
        """The step in best.json, None without the file; ValueError or OSError if it is damaged or cannot be read."""
        try:
            return best_in(read_regular(self.path / BEST, LARGEST_JSON))
        except FileNotFoundError:
            return None

    def best_step(self) -> int | None:
        """The step that is marked as the best. A best.json that is damaged is reported, once, and marks none."""
        try:
            return self.read_best()
        except UnsafeFileError:
            raise
        except (OSError, ValueError) as error:
            why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            if why != self.reported_best:
                self.report(f"{self.path / BEST} cannot be used: {why}; the newest checkpoint is taken for the best")
            self.reported_best = why
            return None

    def best_checkpoint(self) -> Checkpoint | None:
        """The best checkpoint; the newest if none was marked, or if it cannot be used, which is reported."""
        step = self.best_step()
        if step is not None:
            try:
                found = checkpoint.load_finite(checkpoint.checkpoint_path(self.path, step))
                if found.step != step:
                    raise DamagedCheckpointError(f"it holds step {found.step}")
                return found
            except DamagedCheckpointError as error:
                if self.best_step() != step:  # the owner found a better one while we read
                    return self.best_checkpoint()
                self.report(f"the best checkpoint, of step {step}, cannot be used: {error}; the newest is taken")
        return self.latest_checkpoint()

    def latest_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint that can be used, None before the first. The owner renames others aside, and deletes
        those that a killed owner had no time to delete."""
        found = checkpoint.newest(self.path, self.report, set_aside=self.is_owned)
        if found is None and (self.best_step() is not None or self.was_tested()):
            message = "its checkpoints are gone; put a copy back, or train anew under another name"
            raise NoIntactCheckpointError(errno.ENOENT, message, str(self.path))
        if found:
            self.restored = replace(found, model={}, optimizer={})
            if self.is_owned:
                self.delete_old(found.step)
        return found


def keep_in(config: dict[str, Any]) -> int:
    """How many checkpoints a config keeps; 0 if it does not say."""
    training = config.get("training")
    keep = training.get("keep_checkpoints") if isinstance(training, dict) else None
    return keep if isinstance(keep, int) and is_step(keep) else 0


def remove_abandoned(home: Path) -> None:
    """Deletes what a killed `create` left beside the runs, once it is so old that nobody is creating it: a folder with
    a config and an empty folder in it, or less. One that holds anything else is not ours."""
    with suppress(OSError):
        for name in os.listdir(home):
            if not re.fullmatch(r"\..+\.new-[0-9a-f]{8}", name):
                continue
            folder, found = home / name, os.lstat(home / name)
            if not stat.S_ISDIR(found.st_mode) or time.time() - found.st_mtime < ABANDONED:
                continue
            with suppress(OSError):
                if set(os.listdir(folder)) <= {CONFIG, CHECKPOINTS}:
                    with suppress(FileNotFoundError):
                        os.rmdir(folder / CHECKPOINTS)
                    with suppress(FileNotFoundError):
                        os.unlink(folder / CONFIG)
                    os.rmdir(folder)


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
        number = os.read(file, 20).decode(errors="replace").strip()
        owner = f"process {number}" if number.isdecimal() else "another process"
        message = f"a run has one owner at a time, and {owner} owns this one; wait until it ends, or stop it"
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
