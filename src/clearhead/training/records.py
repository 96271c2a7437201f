"""What a run measured, in metrics.jsonl: one JSON object in a line for each record, appended as it happens.

A record has a `kind` (train, validation, test), the `step`, and numbers. A line counts when its newline is written: a
process that is killed leaves at most one that does not, at the end, and it is no record.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clearhead.data.config import is_number
from clearhead.files import from_json, fsync_folder, opened, to_json, write_all, write_atomic
from clearhead.messages import nearest

CONFIG, METRICS, LOCK = "config.json", "metrics.jsonl", "lock"
RUNS = Path("runs")
"""where runs are made, and found by their bare name"""
Record = dict[str, Any]


def append(path: Path, record: Record) -> None:
    """One more record at the end; safe from a kill when it returns, and from a power failure after `make_durable`."""
    line = to_json(record)
    with opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as file:
        size = os.fstat(file).st_size
        try:
            write_all(file, line)
        except BaseException:
            os.ftruncate(file, size)  # a full disk takes a part of the line; the next record must not follow on it
            raise


def read(path: Path) -> list[Record]:
    """All records in order, [] without a file."""
    return [parse(path, number, line) for number, line in enumerate(lines(path), 1)]


def find_run(run: str | Path, *, has: Sequence[str] = (CONFIG,)) -> Path:
    """The folder of a run, given by its path or by its bare name in runs/; it has one of these files.

    LookupError if there is none, with the run whose name is most like it.
    """
    path = Path(run)
    for folder in candidates(path):
        if any((folder / name).is_file() for name in has):
            return folder
    raise no_run(path)


def find_records(run: str | Path) -> Path:
    """The metrics.jsonl of a run, or of a folder with nothing else in it, or the path of such a file itself."""
    path = Path(run)
    return path if path.is_file() else find_run(path, has=(CONFIG, METRICS)) / METRICS


def candidates(path: Path) -> list[Path]:
    return [path, RUNS / path] if len(path.parts) == 1 and path.name else [path]


def is_locked(folder: Path) -> bool:
    """Whether a process trains this run now. Nothing is written, and a process that holds the lock notices nothing."""
    try:
        import fcntl

        with opened(folder / LOCK, os.O_RDONLY) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # let go of when the file is closed
    except BlockingIOError:
        return True
    except (ImportError, OSError):  # never trained, or a system without such locks
        return False
    return False


def no_run(path: Path) -> LookupError:
    homes = [folder.parent for folder in candidates(path)]
    there = {config.parent.name: config.parent for home in homes for config in sorted(home.glob(f"*/{CONFIG}"))}
    near = nearest(path.name, there)
    hint = f"did you mean {there[near]}?" if near else "`clearhead train RECIPE --name NAME` makes one"
    return LookupError(f"a run is a folder with a {CONFIG}, got {path}; {hint}")


def drop_after(path: Path, step: int) -> None:
    """Forgets what came after a step, all of it or nothing; records without a step stay."""
    before = lines(path)
    kept = [line for number, line in enumerate(before, 1) if parse(path, number, line).get("step", step) <= step]
    if len(kept) < len(before):
        write_atomic(path, b"".join(kept))


def drop_torn(path: Path) -> None:
    """Cuts off what a crash left at the end: half a line, or lines that never reached the disk."""
    if not path.exists():
        return
    whole = lines(path)
    while whole and not is_record(whole[-1]):
        whole.pop()
    size = sum(map(len, whole))
    if size < path.stat().st_size:
        with opened(path, os.O_WRONLY) as file:
            os.ftruncate(file, size)


def make_durable(path: Path) -> None:
    if path.exists():
        with opened(path, os.O_WRONLY) as file:
            os.fsync(file)
        fsync_folder(path.parent)


def lines(path: Path) -> list[bytes]:
    """Lines with their newline, without the torn one at the end."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    return [line + b"\n" for line in content.split(b"\n")[:-1]]


def parse(path: Path, number: int, line: bytes) -> Record:
    if not is_record(line):
        raise ValueError(f"every line of {path} must be a JSON object, got line {number}: {line[:60]!r}; remove it")
    record: Record = from_json(line)
    wrong = [name for name in ("step", "epoch", "loss", "accuracy") if not is_number(record.get(name, 0))]
    if wrong:
        raise ValueError(f"{wrong[0]} must be a number in {path}, got line {number}: {line[:60]!r}; remove it")
    return record


def is_record(line: bytes) -> bool:
    try:
        return isinstance(from_json(line), dict)
    except ValueError:
        return False
