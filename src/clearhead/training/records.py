"""What a run measured, in metrics.jsonl: one JSON object in a line for each record, appended as it happens.

A record has a `kind` (train, validation, test), the `step`, and numbers. A line counts when its newline is written: a
process that is killed leaves at most one that does not, at the end, and it is no record. A checkpoint says how many
records there were when it was saved, and their digest (`Written`), so that a hole in the file is noticed.

Nothing here follows a link: not even a reader does, unless its user named the link.
"""

import hashlib
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clearhead.data.config import is_number
from clearhead.files import (
    check_tree,
    from_json,
    fsync_folder,
    opened_regular,
    read_regular,
    to_json,
    write_all,
    write_atomic,
)
from clearhead.messages import nearest

CONFIG, METRICS, LOCK = "config.json", "metrics.jsonl", "lock"
RUNS = Path("runs")
"""where runs are made, and found by their bare name"""
Record = dict[str, Any]
LARGEST = 2**30
"""bytes of metrics.jsonl: some ten million records"""


@dataclass(frozen=True)
class Written:
    """What metrics.jsonl held when a checkpoint was saved."""

    count: int
    sha256: str
    """of all lines"""

    def to_json(self) -> dict[str, Any]:
        return {"count": self.count, "sha256": self.sha256}

    @classmethod
    def from_json(cls, value: Any) -> "Written":
        match value:
            case {"count": int(count), "sha256": str(digest)} if count >= 0 and not isinstance(count, bool):
                return cls(count, digest)
        raise ValueError(f"records must be counted, got {value!r:.60}")

    def difference(self, lines: Sequence[bytes]) -> str:
        """What is wrong with lines that should begin with these records; "" where they do. There may be more: the
        result of the test is recorded after the last checkpoint."""
        if len(lines) < self.count:
            return f"{self.count - len(lines):,} of {self.count:,} records are missing"
        digest = Digest(lines[: self.count])
        return "" if digest.written() == self else f"some of the first {self.count:,} records were changed"


class Digest:
    """Counts and hashes records while they are written, so that a save need not read them again."""

    def __init__(self, lines: Iterable[bytes] = ()):
        self.count, self.hash = 0, hashlib.sha256()
        for line in lines:
            self.add(line)

    def add(self, line: bytes) -> None:
        self.count += 1
        self.hash.update(line)

    def written(self) -> Written:
        return Written(self.count, self.hash.hexdigest())


def append(path: Path, record: Record) -> bytes:
    """One more record at the end, as its line; safe from a kill when it returns, and from a power failure after
    `make_durable`."""
    line = to_json(record)
    with opened_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as file:
        size = os.fstat(file).st_size
        try:
            write_all(file, line)
        except BaseException:
            os.ftruncate(file, size)  # a full disk takes a part of the line; the next record must not follow on it
            raise
    return line


def read(path: Path) -> list[Record]:
    """All records in order, [] without a file."""
    return [parse(path, number, line) for number, line in enumerate(lines(path), 1)]


def find_run(run: str | Path, *, has: Sequence[str] = (CONFIG,), checked: bool = True) -> Path:
    """The folder of a run, given by its path or by its bare name in runs/; it has one of these files.

    LookupError if there is none, with the run whose name is most like it. UnsafeFileError if there is a link or a
    special file anywhere in it, unless it is not to be `checked`: every command that takes a run finds it here.
    """
    path = Path(run)
    for folder in candidates(path):
        if any(os.path.lexists(folder / name) for name in has):
            if checked:
                check_tree(folder, to_write=False)
            return folder
    raise no_run(path)


def find_records(run: str | Path) -> Path:
    """The metrics.jsonl of a run, or of a folder with nothing else in it, or the path of such a file itself, which may
    be a link."""
    path = Path(run)
    if path.is_file():
        return path.resolve() if path.is_symlink() else path
    return find_run(path, has=(CONFIG, METRICS)) / METRICS


def candidates(path: Path) -> list[Path]:
    return [path, RUNS / path] if len(path.parts) == 1 and path.name else [path]


def is_locked(folder: Path) -> bool:
    """Whether a process trains this run now. Nothing is written, and a process that holds the lock notices nothing."""
    try:
        import fcntl

        with opened_regular(folder / LOCK, os.O_RDONLY) as file:
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


def drop_after(path: Path, step: int) -> list[bytes]:
    """Forgets what came after a step, all of it or nothing; records without a step stay. The lines that are left."""
    before = lines(path)
    kept = [line for number, line in enumerate(before, 1) if parse(path, number, line).get("step", step) <= step]
    if len(kept) < len(before):
        write_atomic(path, b"".join(kept))
    return kept


def drop_torn(path: Path) -> tuple[list[bytes], int]:
    """Cuts off what a crash left at the end: half a line, or lines that never reached the disk. The lines that are
    left, and how many others had an end: half a line is what every kill may leave, but those are damage."""
    whole = lines(path)
    n_lines = len(whole)
    while whole and not is_record(whole[-1]):
        whole.pop()
    size = sum(map(len, whole))
    if path.exists() and size < path.stat().st_size:
        with opened_regular(path, os.O_WRONLY) as file:
            os.ftruncate(file, size)
    return whole, n_lines - len(whole)


def make_durable(path: Path) -> None:
    if os.path.lexists(path):
        with opened_regular(path, os.O_WRONLY) as file:
            os.fsync(file)
        fsync_folder(path.parent)


def lines(path: Path) -> list[bytes]:
    """Lines with their newline, without the torn one at the end."""
    try:
        content = read_regular(path, LARGEST)
    except FileNotFoundError:
        return []
    return [line + b"\n" for line in content.split(b"\n")[:-1]]


def parse(path: Path, number: int, line: bytes) -> Record:
    if not is_record(line):
        raise ValueError(f"every line of {path} must be a JSON object, got line {number}: {line[:60]!r}; remove it")
    record: Record = from_json(line)
    numbers = {name: record.get(name, 0) for name in ("step", "epoch", "loss", "accuracy")}
    wrong = [name for name, number in numbers.items() if not is_number(number) or abs(number) > sys.float_info.max]
    if wrong:
        raise ValueError(f"{wrong[0]} must be a number in {path}, got line {number}: {line[:60]!r}; remove it")
    if wrong := [name for name in ("kind", "views") if not isinstance(record.get(name, ""), str)]:
        raise ValueError(f"{wrong[0]} must be a string in {path}, got line {number}: {line[:60]!r}; remove it")
    return record


def is_record(line: bytes) -> bool:
    try:
        return isinstance(from_json(line), dict)
    except ValueError:
        return False
