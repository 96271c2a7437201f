"""metrics.jsonl: what a run measured, one JSON object per line, appended as it happens. Torch is not imported.

A record has a `kind` (train, validation, test), a `step` and numbers. A line counts once its newline is written: a
process that is killed leaves at most one partial line at the end, which is ignored. A checkpoint stores the number of
records at that time and their digest (`RecordsDigest`), so that missing lines are noticed. The test result is logged
after the last checkpoint and carries its own digest (`seal`).

The file is read line by line and never through a link, so a file from a stranger costs little memory, however large.
"""

import errno
import hashlib
import os
import re
import sys
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

from clearhead.files import from_json, fsync_folder, opened_regular, read_at, to_json, write_all, write_atomic
from clearhead.validation import is_number

Record = dict[str, Any]
MAX_BYTES = 256 * 2**20
"""of the file: more than a million records; 100,000 of them take about 15 MB"""
MAX_LINES = 2**21
MAX_LINE_BYTES = 2**20
"""of one record, which usually has about 150"""
MAX_MEMORY = 256 * 2**20
"""bytes that `read` may fill with records: about half a million of them"""
FIELDS = {"kind", "step", "epoch", "loss", "accuracy", "exact_match", "lr", "seconds", "best_step", "tta"}
"""names of fields; all records share these strings"""
SEAL = re.compile(rb', "sha256": "([0-9a-f]{64})"\}\n\Z')
UNSEALED = ("train", "validation", "diverged")
"""kinds of records without a digest: a checkpoint covers them, or resuming drops them"""


@dataclass(frozen=True)
class RecordsDigest:
    """The number and digest of the records in metrics.jsonl when a checkpoint was saved."""

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
        raise ValueError(f"records must have a count and a sha256, got {value!r:.60}")

    def difference(self, lines: Iterable[bytes]) -> str:
        """How the beginning of these lines differs from the records that were counted; "" if it does not. More lines
        may follow: the test result is logged after the last checkpoint."""
        digest = Digest(islice(lines, self.count))
        if digest.count < self.count:
            return self.missing(digest.count)
        return "" if digest.value() == self else self.changed

    def missing(self, count: int) -> str:
        return f"{self.count - count:,} of {self.count:,} records are missing"

    @property
    def changed(self) -> str:
        return f"some of the first {self.count:,} records were changed"


class Digest:
    """Counts and hashes records as they are written, so that a save need not read them again."""

    def __init__(self, lines: Iterable[bytes] = ()):
        self.count, self.hash = 0, hashlib.sha256()
        for line in lines:
            self.add(line)

    def add(self, line: bytes) -> None:
        self.count += 1
        self.hash.update(line)

    def value(self) -> RecordsDigest:
        return RecordsDigest(self.count, self.hash.hexdigest())


def append(path: Path, record: Record) -> bytes:
    """Append a record and return its line. It survives a kill when this returns, and a power failure after
    `fsync_log`."""
    line = to_json(record)
    if record.get("kind") == "test":
        line = seal(line)
    with opened_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as file:
        size = os.fstat(file).st_size
        try:
            write_all(file, line)
        except BaseException:
            os.ftruncate(file, size)  # a full disk takes part of a line, and the next record must not continue it
            raise
    return line


def seal(line: bytes) -> bytes:
    """The record with the SHA-256 of its line as the last field."""
    return line.removesuffix(b"}\n") + f', "sha256": "{hashlib.sha256(line).hexdigest()}"}}\n'.encode()


def is_sealed(line: bytes) -> bool:
    """Whether a line ends with the digest of what precedes it."""
    found = SEAL.search(line)
    return found is not None and seal(line[: found.start()] + b"}\n") == line


def is_covered(line: bytes) -> bool:
    """Whether a record that no checkpoint has counted needs no digest, or matches its own."""
    return is_sealed(line) or (b'"sha256"' not in line and from_json(line).get("kind") in UNSEALED)


def iter_records(path: Path) -> Iterator[Record]:
    """All records in order, one at a time; none if there is no file."""
    return (parse(path, number, line) for number, line in enumerate(lines(path), 1))


def read(path: Path) -> list[Record]:
    """All records in order, [] if there is no file; ValueError if they do not fit into MAX_MEMORY."""
    found: list[Record] = []
    memory = 0
    for record in iter_records(path):
        memory += sys.getsizeof(record) + sum(map(sys.getsizeof, record.values()))
        memory += sum(sys.getsizeof(name) for name in record.keys() - FIELDS)
        if memory > MAX_MEMORY:
            raise ValueError(f"{path} has more records than fit into {MAX_MEMORY // 2**20} MB, after {len(found):,}")
        found.append(record)
    return found


def drop_after(path: Path, step: int) -> None:
    """Delete the records after a step, atomically; records without a step stay."""
    kept, n_dropped = bytearray(), 0
    for number, line in enumerate(lines(path), 1):
        if parse(path, number, line).get("step", step) <= step:
            kept += line
        else:
            n_dropped += 1
    if n_dropped:
        write_atomic(path, kept)


def truncate_partial(path: Path) -> int:
    """Cut off what a crash left at the end: a partial line, or lines that never reached the disk. Returns the number
    of complete lines among them: any kill may leave a partial line, but those are damage."""
    ends = array("q", [0])
    ends.extend(end for end, _ in scan(path))
    n_lines = n_valid = len(ends) - 1
    if not os.path.lexists(path):
        return 0
    with opened_regular(path, os.O_RDWR) as file:
        while n_valid and not is_record_at(file, ends[n_valid - 1], ends[n_valid]):
            n_valid -= 1
        if ends[n_valid] < os.fstat(file).st_size:
            os.ftruncate(file, ends[n_valid])
    return n_lines - n_valid


def is_record_at(file: int, start: int, end: int) -> bool:
    return end - start <= MAX_LINE_BYTES and is_record(read_at(file, end - start, start))


def fsync_log(path: Path) -> None:
    if os.path.lexists(path):
        with opened_regular(path, os.O_WRONLY) as file:
            os.fsync(file)
        fsync_folder(path.parent)


def scan(path: Path) -> Iterator[tuple[int, bytes]]:
    """The end offset and content of each complete line; b"" in place of one longer than MAX_LINE_BYTES. Nothing if
    there is no file."""
    with (
        suppress(FileNotFoundError),
        opened_regular(path, os.O_RDONLY) as file,
        open(file, "rb", closefd=False) as read,
    ):
        end, size = 0, os.fstat(file).st_size
        if size > MAX_BYTES:
            raise OSError(errno.EFBIG, f"expected at most {MAX_BYTES:,} bytes, got {size:,}", os.fspath(path))
        for number in count(1):
            line = piece = read.readline(MAX_LINE_BYTES)
            end += len(piece)
            while piece and not piece.endswith(b"\n"):
                line, piece = b"", read.readline(MAX_LINE_BYTES)
                end += len(piece)
            if not piece:
                return
            if number > MAX_LINES or end > MAX_BYTES:
                raise OSError(errno.EFBIG, f"expected at most {MAX_LINES:,} lines, got more", os.fspath(path))
            yield end, line


def lines(path: Path) -> Iterator[bytes]:
    """Complete lines with their newline."""
    for number, (_, line) in enumerate(scan(path), 1):
        if not line:
            raise ValueError(f"line {number} of {path} has more than {MAX_LINE_BYTES:,} bytes; remove it")
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
