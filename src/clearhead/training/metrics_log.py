"""What a run measured, in metrics.jsonl: one JSON object in a line for each record, appended as it happens.

A record has a `kind` (train, validation, test), the `step`, and numbers. A line counts when its newline is written: a
process that is killed leaves at most one that does not, at the end, and it is no record. A checkpoint says how many
records there were when it was saved, and their digest (`Written`), so that a hole in the file is noticed. The result of
the test is recorded after the last checkpoint; it carries a digest of its own (`seal`).

The file is read line by line: a file from a stranger costs little memory, however large it is.
Nothing here follows a link: not even a reader does, unless its user named the link.
"""

import errno
import hashlib
import os
import re
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

from clearhead.files import check_tree, from_json, fsync_folder, opened_regular, to_json, write_all, write_atomic
from clearhead.messages import nearest
from clearhead.validation import is_number

CONFIG, METRICS, LOCK = "config.json", "metrics.jsonl", "lock"
RUNS = Path("runs")
"""where runs are made, and found by their bare name"""
Record = dict[str, Any]
LARGEST = 256 * 2**20
"""bytes of metrics.jsonl: more than a million records; 100,000 of them have about 15 MB"""
MOST_LINES = 2**21
LONGEST_LINE = 2**20
"""bytes of one record, which has about 150"""
MOST_MEMORY = 256 * 2**20
"""bytes of memory that `read` may fill with records: about half a million of them"""
FIELDS = {"kind", "step", "epoch", "loss", "accuracy", "exact_match", "lr", "seconds", "best_step", "tta"}
"""names in records; all records share these strings"""
SEAL = re.compile(rb', "sha256": "([0-9a-f]{64})"\}\n\Z')
UNSEALED = ("train", "validation", "diverged")
"""kinds of records that carry no digest: a checkpoint covers them, or they are dropped when the run is resumed"""


@dataclass(frozen=True)
class RecordsDigest:
    """What metrics.jsonl held when a checkpoint was saved."""

    count: int
    sha256: str
    """of all lines"""

    def to_json(self) -> dict[str, Any]:
        return {"count": self.count, "sha256": self.sha256}

    @classmethod
    def from_json(cls, value: Any) -> "RecordsDigest":
        match value:
            case {"count": int(count), "sha256": str(digest)} if count >= 0 and not isinstance(count, bool):
                return cls(count, digest)
        raise ValueError(f"records must be counted, got {value!r:.60}")

    def difference(self, lines: Iterable[bytes]) -> str:
        """What is wrong with lines that should begin with these records; "" where they do. There may be more: the
        result of the test is recorded after the last checkpoint."""
        digest = Digest(islice(lines, self.count))
        if digest.count < self.count:
            return self.missing(digest.count)
        return "" if digest.written() == self else self.changed

    def missing(self, count: int) -> str:
        return f"{self.count - count:,} of {self.count:,} records are missing"

    @property
    def changed(self) -> str:
        return f"some of the first {self.count:,} records were changed"


class Digest:
    """Counts and hashes records while they are written, so that a save need not read them again."""

    def __init__(self, lines: Iterable[bytes] = ()):
        self.count, self.hash = 0, hashlib.sha256()
        for line in lines:
            self.add(line)

    def add(self, line: bytes) -> None:
        self.count += 1
        self.hash.update(line)

    def written(self) -> RecordsDigest:
        return RecordsDigest(self.count, self.hash.hexdigest())


def append(path: Path, record: Record) -> bytes:
    """One more record at the end, as its line; safe from a kill when it returns, and from a power failure after
    `make_durable`."""
    line = to_json(record)
    if record.get("kind") == "test":
        line = seal(line)
    with opened_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as file:
        size = os.fstat(file).st_size
        try:
            write_all(file, line)
        except BaseException:
            os.ftruncate(file, size)  # a full disk takes a part of the line; the next record must not follow on it
            raise
    return line


def seal(line: bytes) -> bytes:
    """The record with the sha256 of its line as its last field."""
    return line.removesuffix(b"}\n") + f', "sha256": "{hashlib.sha256(line).hexdigest()}"}}\n'.encode()


def is_sealed(line: bytes) -> bool:
    """Whether a line ends with the digest of what precedes it."""
    found = SEAL.search(line)
    return found is not None and seal(line[: found.start()] + b"}\n") == line


def is_covered(line: bytes) -> bool:
    """Whether a record that no checkpoint has counted is one that needs no digest, or agrees with its own."""
    return is_sealed(line) or (b'"sha256"' not in line and from_json(line).get("kind") in UNSEALED)


def iter_records(path: Path) -> Iterator[Record]:
    """All records in order, one at a time; none without a file."""
    return (parse(path, number, line) for number, line in enumerate(lines(path), 1))


def read(path: Path) -> list[Record]:
    """All records in order, [] without a file; ValueError if they do not fit into MOST_MEMORY."""
    found: list[Record] = []
    memory = 0
    for record in iter_records(path):
        memory += sys.getsizeof(record) + sum(map(sys.getsizeof, record.values()))
        memory += sum(sys.getsizeof(name) for name in record.keys() - FIELDS)
        if memory > MOST_MEMORY:
            raise ValueError(f"{path} has more records than fit into {MOST_MEMORY // 2**20} MB, after {len(found):,}")
        found.append(record)
    return found


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


def drop_after(path: Path, step: int) -> None:
    """Forgets what came after a step, all of it or nothing; records without a step stay."""
    kept, n_dropped = bytearray(), 0
    for number, line in enumerate(lines(path), 1):
        if parse(path, number, line).get("step", step) <= step:
            kept += line
        else:
            n_dropped += 1
    if n_dropped:
        write_atomic(path, kept)


def truncate_partial(path: Path) -> int:
    """Cuts off what a crash left at the end: half a line, or lines that never reached the disk. How many of them had
    an end: half a line is what every kill may leave, but those are damage."""
    ends = array("q", [0])
    ends.extend(end for end, _ in scan(path))
    n_lines = n_whole = len(ends) - 1
    if not os.path.lexists(path):
        return 0
    with opened_regular(path, os.O_RDWR) as file:
        while n_whole and not is_record_at(file, ends[n_whole - 1], ends[n_whole]):
            n_whole -= 1
        if ends[n_whole] < os.fstat(file).st_size:
            os.ftruncate(file, ends[n_whole])
    return n_lines - n_whole


def is_record_at(file: int, start: int, end: int) -> bool:
    return end - start <= LONGEST_LINE and is_record(os.pread(file, end - start, start))


def fsync_log(path: Path) -> None:
    if os.path.lexists(path):
        with opened_regular(path, os.O_WRONLY) as file:
            os.fsync(file)
        fsync_folder(path.parent)


def scan(path: Path) -> Iterator[tuple[int, bytes]]:
    """Each line with its newline, after the offset of its end; b"" in place of one that is longer than LONGEST_LINE.
    Without the torn line at the end of the file; nothing without a file."""
    with (
        suppress(FileNotFoundError),
        opened_regular(path, os.O_RDONLY) as file,
        open(file, "rb", closefd=False) as read,
    ):
        end, size = 0, os.fstat(file).st_size
        if size > LARGEST:
            raise OSError(errno.EFBIG, f"expected at most {LARGEST:,} bytes, got {size:,}", os.fspath(path))
        for number in count(1):
            line = piece = read.readline(LONGEST_LINE)
            end += len(piece)
            while piece and not piece.endswith(b"\n"):
                line, piece = b"", read.readline(LONGEST_LINE)
                end += len(piece)
            if not piece:
                return
            if number > MOST_LINES or end > LARGEST:
                raise OSError(errno.EFBIG, f"expected at most {MOST_LINES:,} lines, got more", os.fspath(path))
            yield end, line


def lines(path: Path) -> Iterator[bytes]:
    """Lines with their newline, without the torn one at the end."""
    for number, (_, line) in enumerate(scan(path), 1):
        if not line:
            raise ValueError(f"line {number} of {path} has more than {LONGEST_LINE:,} bytes; remove it")
        yield line


def parse(path: Path, number: int, line: bytes) -> Record:
    try:
        value: Any = from_json(line)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"every line of {path} must be a JSON object, got line {number}: {line[:60]!r}; remove it")
    record: Record = {sys.intern(name): field for name, field in value.items() if name != "sha256"}
    numbers = {name: record.get(name, 0) for name in ("step", "epoch", "loss", "accuracy")}
    wrong = [name for name, number in numbers.items() if not is_number(number) or abs(number) > sys.float_info.max]
    if wrong:
        raise ValueError(f"{wrong[0]} must be a number in {path}, got line {number}: {line[:60]!r}; remove it")
    if wrong := [name for name in ("kind", "tta") if not isinstance(record.get(name, ""), str)]:
        raise ValueError(f"{wrong[0]} must be a string in {path}, got line {number}: {line[:60]!r}; remove it")
    if wrong := [name for name, value in record.items() if isinstance(value, dict | list)]:
        raise ValueError(f"{wrong[0]!r:.60} must be a number or a string in {path}, got line {number}; remove it")
    return record


def is_record(line: bytes) -> bool:
    try:
        return isinstance(from_json(line), dict)
    except ValueError:
        return False
