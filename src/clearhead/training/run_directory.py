"""The run directory: everything about one training run, with one owner at a time. Torch is not imported.

    runs/mine/config.json       the resolved configuration
    runs/mine/metrics.jsonl     what was measured
    runs/mine/checkpoints/      checkpoints to resume from
    runs/mine/best.json         the step of the best checkpoint
    runs/mine/snapshots/        attention snapshots, with --snapshots
    runs/mine/figures/          figures
    runs/mine/lock              held by the process that trains; the system releases it when that process ends

Anyone may read; only the owner, inside `with run.lock():`, writes. A run may come from a stranger: a symbolic link or a
special file in it is refused before anything is read, and a file with a second hard link before anything is written.
The path of the run itself may be a link.
"""

import errno
import os
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from clearhead.files import (
    MAX_JSON_BYTES,
    UnsafeFileError,
    acquire_lock,
    check_tree,
    flock,
    from_json,
    fsync_folder,
    make_folder,
    open_regular,
    opened_regular,
    read_regular,
    remove_temporary_files,
    to_json,
    write_atomic,
    write_durable,
)
from clearhead.messages import closest_name, printable
from clearhead.training import checkpoint, metrics_log
from clearhead.training.checkpoint import (
    CHECKPOINTS,
    Checkpoint,
    DamagedCheckpointError,
    NoIntactCheckpointError,
    checkpoint_path,
    is_step,
    saved_steps,
)
from clearhead.training.config import RunConfig
from clearhead.training.metrics_log import Digest, Record

RUNS = Path("runs")
"""where runs are created, and found by their name"""
CONFIG, METRICS, LOCK, BEST = "config.json", "metrics.jsonl", "lock", "best.json"
SNAPSHOTS, FIGURES = "snapshots", "figures"
KEEP = 3
"""latest checkpoints to keep unless the config says otherwise"""
ABANDONED = 3600.0
"""seconds after which no process is still creating a run or drawing a figure"""
Report = Callable[[str], None]


def report_on_stderr(message: str) -> None:
    print(printable(message), file=sys.stderr)


class RunDirectory:
    """`create` a new one or `open` an existing one. Log before you save: no checkpoint may be ahead of the records."""

    def __init__(self, path: Path, config: dict[str, Any], report: Report):
        self.path = path
        self.config = config
        self.report = report
        self.is_owned = False
        self.keep = keep_in(config)
        """latest checkpoints to keep besides the best; 0 if unknown"""
        self.digest = Digest()
        """of the records, while this process owns the run"""
        self.restored: Checkpoint | None = None
        """the latest checkpoint without its tensors, once it was loaded"""
        self.reported_best = ""
        """a damaged best.json is reported once"""

    @classmethod
    def create(cls, path: str | Path, config: dict[str, Any], report: Report = report_on_stderr) -> "RunDirectory":
        """Create the folder and its config atomically."""
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
            if sys.platform == "win32" and path.is_dir():  # there, a rename does not replace an empty folder
                os.rmdir(path)
            os.rename(new, path)
            fsync_folder(path.parent)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another process was faster
                check_new(path)
            raise OSError(error.errno, f"the run was not created: {error.strerror or error}", str(path)) from error
        finally:
            shutil.rmtree(new, ignore_errors=True)
        return cls(path, from_json(content), report)

    @classmethod
    def open(cls, path: str | Path, report: Report = report_on_stderr) -> "RunDirectory":
        """The run at this path, or of this name in runs/."""
        path = find_run(path)
        try:
            config = from_json(read_regular(path / CONFIG, MAX_JSON_BYTES))
        except ValueError as error:
            raise ValueError(f"{path / CONFIG} must be valid JSON: {error}") from None
        if not isinstance(config, dict):
            raise ValueError(f"{path / CONFIG} must be a JSON object, got {config!r:.60}")
        return cls(path, config, report)

    @contextmanager
    def lock(self) -> Iterator["RunDirectory"]:
        """Make this process the owner, and clean up after a killed one; OSError if another process owns the run."""
        check_tree(self.path, for_writing=True)
        file = open_regular(self.path / LOCK, os.O_RDWR | os.O_CREAT)
        try:
            acquire_lock(file, self.path)
            self.is_owned = True
            make_folder(self.path / CHECKPOINTS)  # fails now, not at the first save
            self.tidy()
            if n_damaged := metrics_log.truncate_partial(self.path / METRICS):
                lines = "line was" if n_damaged == 1 else "lines were"
                self.report(f"{self.path / METRICS}: {n_damaged:,} damaged {lines} removed from its end")
            self.digest = Digest(metrics_log.lines(self.path / METRICS))
            yield self
        finally:
            if self.is_owned:
                flock(file, "unlock")
            self.is_owned = False
            os.close(file)

    def tidy(self) -> None:
        """Remove the leftovers of killed processes."""
        checkpoint.clean(self.path)
        for folder in (self.path, self.path / SNAPSHOTS):
            remove_temporary_files(folder)
        for folder in (self.path / FIGURES, self.path / FIGURES / "look"):  # any process may be drawing there
            remove_temporary_files(folder, older_than=ABANDONED)
        remove_abandoned(self.path.parent)

    def change_config(self, config: dict[str, Any]) -> None:
        """Replace config.json; each checkpoint keeps the config that it was saved with."""
        assert self.is_owned, "only the owner writes: use `with run.lock():`"
        content = to_json(config, indent=2)
        write_atomic(self.path / CONFIG, content)
        self.config = from_json(content)

    def log(self, record: Record) -> None:
        """Append one record; ValueError if a number in it is not finite."""
        assert self.is_owned, "only the owner writes: use `with run.lock():`"
        self.digest.add(metrics_log.append(self.path / METRICS, record))

    def records(self) -> list[Record]:
        return metrics_log.read(self.path / METRICS)

    def iter_records(self) -> Iterator[Record]:
        """One at a time, because they may not fit into memory."""
        return metrics_log.iter_records(self.path / METRICS)

    def was_tested(self) -> bool:
        return any(record.get("kind") == "test" for record in self.iter_records())

    def drop_after(self, step: int) -> None:
        """Delete the records after a step, before the run continues from there. If the remaining ones differ from those
        that the checkpoint was saved with, that is reported."""
        assert self.is_owned, "only the owner writes: use `with run.lock():`"
        metrics_log.drop_after(self.path / METRICS, step)
        self.digest = Digest(metrics_log.lines(self.path / METRICS))
        found = self.restored
        known = found.records if found and found.step == step else None
        if known and (problem := known.difference(metrics_log.lines(self.path / METRICS))):
            self.report(f"{self.path / METRICS} has changed since the checkpoint of step {step} was saved: {problem}")

    def save(self, captured: Checkpoint, keep: int = KEEP) -> Path:
        """Save a checkpoint, then delete all but the latest `keep` and the best."""
        assert self.is_owned, "only the owner writes: use `with run.lock():`"
        metrics_log.fsync_log(self.path / METRICS)
        path = checkpoint.save(self.path, replace(captured, records=self.digest.value()))
        self.keep = max(keep, 1)
        self.delete_old(captured.step)
        return path

    def delete_old(self, step: int) -> None:
        """Delete all checkpoints but the latest ones, the best one and that of this step; none if it is unknown how
        many to keep or which one is the best."""
        if not self.keep:
            return
        try:
            best = self.read_best()
        except (OSError, ValueError):
            return
        steps = saved_steps(self.path)
        for old in set(steps) - set(steps[-self.keep :]) - {step, best}:
            try:
                checkpoint.remove(checkpoint_path(self.path, old))
            except OSError as error:  # the new one is saved
                self.report(f"the old checkpoint of step {old} was not deleted: {error.strerror or error}")

    def mark_best(self, step: int) -> None:
        """Record that the checkpoint of this step is the best one, which is kept."""
        assert self.is_owned, "only the owner writes: use `with run.lock():`"
        if step not in saved_steps(self.path):
            raise LookupError(f"the best step must have a checkpoint, got step {step} in {self.path}; save it first")
        if step != self.best_step():
            write_atomic(self.path / BEST, to_json({"step": step}))
            self.delete_old(step)  # the previous best

    def read_best(self) -> int | None:
        """The step in best.json, None if there is no file; ValueError or OSError if it is damaged or unreadable."""
        try:
            return parse_best(read_regular(self.path / BEST, MAX_JSON_BYTES))
        except FileNotFoundError:
            return None

    def best_step(self) -> int | None:
        """The step that is marked as the best. A damaged best.json is reported once and ignored."""
        try:
            return self.read_best()
        except UnsafeFileError:
            raise
        except (OSError, ValueError) as error:
            reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            if reason != self.reported_best:
                self.report(f"{self.path / BEST} cannot be used: {reason}; the latest checkpoint is used as the best")
            self.reported_best = reason
            return None

    def best_checkpoint(self) -> Checkpoint | None:
        """The best checkpoint; the latest if none is marked, or if the marked one cannot be used, which is reported."""
        step = self.best_step()
        if step is not None:
            try:
                found = checkpoint.load_finite(checkpoint_path(self.path, step))
                if found.step != step:
                    raise DamagedCheckpointError(f"it holds step {found.step}")
                return found
            except DamagedCheckpointError as error:
                if self.best_step() != step:  # the owner has marked another one in the meantime
                    return self.best_checkpoint()
                self.report(f"the best checkpoint, of step {step}, cannot be used: {error}; the latest is used")
        return self.latest_checkpoint()

    def latest_checkpoint(self) -> Checkpoint | None:
        """The latest usable checkpoint, None before the first. If this process owns the run, damaged ones are set aside
        and old ones that a killed owner did not delete are deleted."""
        found = checkpoint.latest(self.path, self.report, set_aside=self.is_owned)
        if found is None and (self.best_step() is not None or self.was_tested()):
            message = "its checkpoints are missing; restore them from a copy, or train a new run"
            raise NoIntactCheckpointError(errno.ENOENT, message, str(self.path))
        if found:
            self.restored = replace(found, model={}, optimizer={})
            if self.is_owned:
                self.delete_old(found.step)
        return found


def parse_best(content: bytes) -> int:
    """The step that a best.json names; ValueError if it is damaged."""
    value = from_json(content)
    step: Any = value.get("step") if isinstance(value, dict) else None
    if not is_step(step):
        raise ValueError(f'expected {{"step": N}}, got {content[:60]!r}')
    return step


def has_run(folder: Path) -> bool:
    return (folder / CONFIG).exists()


def open_or_create(folder: Path, config: RunConfig, *, resume: bool, numbered: bool, report: Report) -> RunDirectory:
    """A new run directory, or with `resume` the existing one if it has the same config. With `numbered`, -2, -3 and so
    on is appended to the name of a folder that exists."""
    if resume and has_run(folder):
        run = RunDirectory.open(folder, report)
        changes = config.changes_since(RunConfig.from_dict(run.config))
        if others := [f"{name}={now} (was {before})" for name, (before, now) in changes.items()]:
            raise ValueError(
                f"a run continues with the settings that it started with, got {', '.join(others)} for {folder}; choose "
                f"another name, or continue it as it is: clearhead resume {folder}{lengthen_command(config, changes)}"
            )
        return run
    path, n = folder, 1
    while numbered and path.exists():
        n += 1
        path = folder.with_name(f"{folder.name}-{n}")
    return RunDirectory.create(path, config.to_dict(), report)


def lengthen_command(config: RunConfig, changes: Mapping[str, Any]) -> str:
    """Options of `clearhead resume` that lengthen a run, if nothing but its length differs."""
    if not set(changes) <= {"training.steps", "training.epochs"}:
        return ""
    unit = "epochs" if config.training.epochs else "steps"
    return f" --{unit} {getattr(config.training, unit)}"


def find_run(run: str | Path, *, has: Sequence[str] = (CONFIG,), checked: bool = True) -> Path:
    """The folder of a run, given by its path or its name in runs/, that contains one of the files in `has`.

    LookupError if there is none, with the most similar name. If `checked`, UnsafeFileError if it contains a link or a
    special file. Every command that takes a run calls this.
    """
    path = Path(run)
    for folder in candidates(path):
        if any(os.path.lexists(folder / name) for name in has):
            if checked:
                check_tree(folder, for_writing=False)
            return folder
    raise no_run(path)


def find_records(run: str | Path) -> Path:
    """The metrics.jsonl of a run, of a folder that contains nothing else, or the path of such a file, which may be a
    link."""
    path = Path(run)
    if path.is_file():
        return path.resolve() if path.is_symlink() else path
    return find_run(path, has=(CONFIG, METRICS)) / METRICS


def candidates(path: Path) -> list[Path]:
    return [path, RUNS / path] if len(path.parts) == 1 and path.name else [path]


def is_locked(folder: Path) -> bool:
    """Whether a process is training this run. Neither the run nor that process is affected."""
    try:
        with opened_regular(folder / LOCK, os.O_RDONLY) as file:
            flock(file, "shared")
            flock(file, "unlock")
    except BlockingIOError:
        return True
    except (ImportError, OSError):  # never trained, or a system without file locks
        return False
    return False


def no_run(path: Path) -> LookupError:
    homes = [folder.parent for folder in candidates(path)]
    runs = {config.parent.name: config.parent for home in homes for config in sorted(home.glob(f"*/{CONFIG}"))}
    near = closest_name(path.name, runs)
    hint = f"did you mean {runs[near]}?" if near else "`clearhead train RECIPE --name NAME` creates one"
    return LookupError(f"a run is a folder with a {CONFIG}, got {path}; {hint}")


def keep_in(config: dict[str, Any]) -> int:
    """The number of checkpoints that a config keeps; 0 if it does not say."""
    training = config.get("training")
    keep = training.get("keep_checkpoints") if isinstance(training, dict) else None
    return keep if isinstance(keep, int) and is_step(keep) else 0


def remove_abandoned(home: Path) -> None:
    """Delete what a killed `create` left: an old hidden folder that contains at most a config and an empty folder."""
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
    """ValueError if the folder exists and is not empty: a run is never overwritten."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        way_on = f"continue it with `clearhead resume {path}`, or " if (path / CONFIG).is_file() else ""
        raise ValueError(f"a new run needs a new folder, got {path}, which exists; {way_on}choose another name")
