"""What a run measured, in metrics.jsonl: one JSON object in a line for each record, appended as it happens.

A record has a `kind` (train, validation, test), the `step`, and numbers. A line counts when its newline is written: a
process that is killed leaves at most one that does not, at the end, and it is no record.
"""

import difflib
import os
from pathlib import Path
from typing import Any

from clearhead.data.config import is_number
from clearhead.files import from_json, fsync_folder, opened, to_json, write_all, write_atomic

CONFIG, METRICS = "config.json", "metrics.jsonl"
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


def of_run(folder: Path) -> list[Record]:
    """The records of a run's folder, for those who only read; LookupError if it is none."""
    if not (folder / CONFIG).is_file():
        raise no_run(folder)
    return read(folder / METRICS)


def no_run(folder: Path) -> LookupError:
    there = [config.parent.name for config in folder.parent.glob(f"*/{CONFIG}") if config.is_file()]
    near = difflib.get_close_matches(folder.name, there, n=1)
    hint = f"did you mean {folder.with_name(near[0])}?" if near else "`clearhead train RECIPE --name NAME` makes one"
    return LookupError(f"a run is a folder with a {CONFIG}, got {folder}; {hint}")


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
