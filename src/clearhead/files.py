"""Files that are whole or not there: written beside their place, made durable, then renamed into it.

Every failure is an OSError with the file's name in it; none leaves a file that is half written under its own name.
"""

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

PART = ".part"
"""how the name of a file ends that is not finished"""


def write_atomic(path: Path, data: bytes) -> None:
    """Puts a durable file in the place of what was there; a reader sees the old one or the new one, never a part."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART}")
    try:
        write_durable(part, data)
        os.replace(part, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(part)
        if isinstance(error, OSError):
            error.filename, error.filename2 = os.fspath(path), None  # nobody knows the other name
        raise
    fsync_folder(path.parent)


def write_durable(path: Path, data: bytes) -> None:
    """A new file whose bytes are on the disk, not only on their way; its name is durable after `fsync_folder`."""
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
        write_all(file, data)
        os.fsync(file)


def fsync_folder(folder: Path) -> None:
    """Makes the names in a folder durable: files that were made, renamed or deleted."""
    with opened(folder, os.O_RDONLY) as file:
        try:
            os.fsync(file)
        except OSError as error:  # some network file systems have no such call for folders
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise


def write_all(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A file descriptor; errors of what is done with it carry the file's name, which the system leaves out."""
    file = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield file
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise
    finally:
        os.close(file)


def remove_parts(folder: Path) -> None:
    """Unfinished files of a process that was killed; only for the one who owns the folder."""
    for part in folder.glob(f".*{PART}"):
        part.unlink(missing_ok=True)


def sha256(content: bytes | Path) -> str:
    """The digest of bytes, or of a file that is read piece by piece."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def to_json(value: Any, indent: int | None = None) -> bytes:
    """JSON in UTF-8 with a newline at the end. Floats come back bit for bit; NaN and infinity are refused."""
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a value must be one that JSON has, got an error: {error}; NaN and tensors are none"
        ) from None


def from_json(data: bytes) -> Any:
    """What `to_json` wrote; anything else is a ValueError."""
    try:
        return json.loads(data.decode(), parse_constant=refuse_constant)
    except RecursionError:
        raise ValueError("JSON must not be nested this deep") from None


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")
