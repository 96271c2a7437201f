"""Atomic, durable file writes (write a temporary file, fsync, rename), and safe access to files from strangers.

Every failure is an OSError with the file's name in it; none leaves a file that is half written under its own name.

`opened_regular`, `read_regular` and `make_folder` are for folders that somebody else may have filled: they do not
follow a symbolic link in the last component of a path, never wait for a named pipe, and do not write to a file that has
a second hard link, because its other name may be anywhere. `check_tree` applies the same rule to a whole folder.
"""

import errno
import hashlib
import importlib.util
import json
import math
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

PART = ".part"
"""how the name of a file ends that is not finished"""
CLOSE_ON_EXEC = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)  # Windows has only the second
NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # for the writer of a pipe
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | NO_WAIT  # Windows has neither
MAX_DEPTH = 12
"""levels of folders that `check_tree` descends to"""
MAX_JSON_BYTES = 16 * 2**20
"""of a config, a state or a manifest. The largest is the state of a run that skipped hundreds of thousands of invalid
images and lists them"""
MAX_JSON_CONTAINERS = 2**17
"""objects and arrays in a JSON file"""
MAX_HEADER_BYTES = 16 * 2**20
"""of the header of a safetensors file"""
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
"""by the names that safetensors has for them"""
KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a regular file",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class UnsafeFileError(OSError):
    """A link or a special file where a regular file or a folder is expected."""

    def __init__(self, message: str, path: Path | str):
        super().__init__(errno.ELOOP, message, os.fspath(path))


def write_atomic(path: Path, data: bytes | bytearray) -> None:
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


def write_durable(path: Path, data: bytes | bytearray) -> None:
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


def write_all(file: int, data: bytes | bytearray) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A file descriptor; errors of what is done with it carry the file's name, which the system leaves out."""
    with closing_file(os.open(path, flags | CLOSE_ON_EXEC, 0o666), path) as file:
        yield file


@contextmanager
def opened_regular(path: Path, flags: int) -> Iterator[int]:
    """`opened`, for a regular file in a folder that somebody else may have filled."""
    with closing_file(open_regular(path, flags), path) as file:
        yield file


@contextmanager
def closing_file(file: int, path: Path) -> Iterator[int]:
    try:
        yield file
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise
    finally:
        os.close(file)


def open_regular(path: Path, flags: int, *, follow: bool = False) -> int:
    """The descriptor of a regular file; IsADirectoryError for a folder; UnsafeFileError for anything else,
    or to write where there is a hard link."""
    if follow:  # the user named the link, not a stranger
        check_kind(path, os.stat(path), flags)  # first of all: opening a device may already have an effect
    try:
        file = os.open(path, flags | CLOSE_ON_EXEC | (NO_WAIT if follow else NO_FOLLOW), 0o666)
    except OSError:  # what a link, a pipe or a socket gives depends on the system
        with suppress(FileNotFoundError):
            check_kind(path, os.lstat(path), flags)
        raise
    try:
        check_kind(path, os.fstat(file), flags)
    except BaseException:
        os.close(file)
        raise
    return file


def check_kind(path: Path, found: os.stat_result, flags: int) -> None:
    if stat.S_ISDIR(found.st_mode):  # leads nowhere else: not unsafe, but no file either
        raise IsADirectoryError(errno.EISDIR, "expected a regular file, got a folder", os.fspath(path))
    if not stat.S_ISREG(found.st_mode):
        raise UnsafeFileError(f"expected a regular file, got {kind_of(found)}", path)
    if flags & (os.O_WRONLY | os.O_RDWR) and found.st_nlink > 1:
        raise UnsafeFileError(f"a file with {found.st_nlink} hard links is not written to", path)


def kind_of(found: os.stat_result) -> str:
    return KINDS.get(stat.S_IFMT(found.st_mode), "a special file")


def read_regular(path: Path, most: int | None = None) -> bytes:
    """The bytes of a regular file; OSError if it is a link or a special file, or has more than `most` bytes."""
    with opened_regular(path, os.O_RDONLY) as file:
        size = os.fstat(file).st_size
        if most is not None and size > most:
            raise OSError(errno.EFBIG, f"expected at most {most:,} bytes, got {size:,}", os.fspath(path))
        with open(file, "rb", closefd=False) as content:
            return content.read()


def make_folder(path: Path) -> None:
    """A folder, new or there already; a link to one is refused."""
    try:
        os.mkdir(path)
    except FileExistsError:
        check_folder(path)
        if not path.is_dir():
            raise


def check_folder(path: Path) -> None:
    """Refuses a symbolic link or a special file; a folder, a regular file or nothing at all may stay."""
    with suppress(FileNotFoundError):
        found = os.lstat(path)
        if not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
            raise UnsafeFileError(f"expected a folder, got {kind_of(found)}", path)


def tree(folder: Path, depth: int = MAX_DEPTH) -> Iterator[tuple[Path, os.stat_result]]:
    """Everything below a folder, by lstat, in order. What another process deletes meanwhile is left out."""
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        try:
            found = os.lstat(folder / name)
        except FileNotFoundError:
            continue
        yield folder / name, found
        if stat.S_ISDIR(found.st_mode):
            if depth == 1:
                raise UnsafeFileError("folders must not be nested this deep", folder / name)
            yield from tree(folder / name, depth - 1)


def problem_of(found: os.stat_result, *, to_write: bool) -> str:
    """Why this must not be in a folder from a stranger; "" for folders and regular files. A second hard link matters
    only `to_write`: it shows nothing to a reader that a copy would not show."""
    if not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        return kind_of(found)
    if to_write and stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
        return f"a file with {found.st_nlink} hard links"
    return ""


def check_tree(folder: Path, *, to_write: bool) -> None:
    """Refuses what leads out of a folder or is no file; the folder itself may be a link, since its user named it."""
    for path, found in tree(folder):
        if problem := problem_of(found, to_write=to_write):
            raise UnsafeFileError(f"{problem} is not allowed in a run directory", path)


def remove_parts(folder: Path, older_than: float = 0.0) -> None:
    """Unfinished files of a process that was killed; only for the one who owns the folder, or with an age in seconds
    after which nobody can still be writing them."""
    for part in folder.glob(f".*{PART}"):
        with suppress(FileNotFoundError):
            found = os.lstat(part)
            if stat.S_ISREG(found.st_mode) and time.time() - found.st_mtime >= older_than:
                os.unlink(part)


def acquire_lock(file: int, path: Path) -> None:
    """Lock an open file without waiting. The process id in it is for the error message only."""
    if importlib.util.find_spec("fcntl") is None:
        message = "this system does not have flock, which training needs; use Linux or macOS"
        raise OSError(errno.ENOSYS, message, str(path))
    try:
        lock_exclusively(file)
    except BlockingIOError as error:
        number = os.read(file, 20).decode(errors="replace").strip()
        owner = f"process {number}" if number.isdecimal() else "another process"
        message = f"locked by {owner}; wait until it ends, or stop it"
        raise OSError(error.errno, message, str(path)) from None
    os.ftruncate(file, 0)
    write_all(file, f"{os.getpid()}\n".encode())


def lock_exclusively(file: int) -> None:
    """BlockingIOError if another process holds the exclusive lock. A shared lock, held for an instant by a reader,
    is waited for."""
    import fcntl

    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # fails if and only if there is an exclusive owner
            fcntl.flock(file, fcntl.LOCK_UN)
            time.sleep(0.02)


def safetensors_header(path: Path) -> dict[str, tuple[str, list[int]]]:
    """The type and shape of each tensor, from the header alone; ValueError unless these tensors fill the file exactly.

    A file begins with the length of its header (8 bytes), then the header: JSON with the type, shape and offsets of
    each tensor.
    """
    with opened_regular(path, os.O_RDONLY) as file:
        size = os.fstat(file).st_size
        length = int.from_bytes(os.read(file, 8), "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"the header of {path.name} must have at most {MAX_HEADER_BYTES:,} bytes, got {length:,}")
        header = from_json(os.pread(file, length, 8))
    if not isinstance(header, dict):
        raise ValueError(f"the header of {path.name} must be a JSON object")
    tensors: dict[str, tuple[str, list[int]]] = {}
    expected = 8 + length
    for name, entry in header.items():
        match entry:
            case _ if name == "__metadata__":
                continue
            case {"dtype": str(dtype), "shape": list(shape)} if dtype in DTYPE_BYTES and is_shape(shape):
                tensors[name] = dtype, shape
                expected += DTYPE_BYTES[dtype] * math.prod(shape)
            case _:
                raise ValueError(f"{name!r:.60} in {path.name} must have a type and a shape, got {entry!r:.60}")
    if expected != size:
        raise ValueError(f"{path.name} has {size:,} bytes, but its header declares {expected:,}")
    return tensors


def is_shape(shape: list[Any]) -> bool:
    return all(type(n) is int and n >= 0 for n in shape) and math.prod(shape) < 2**48


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
    """What `to_json` wrote; anything else is a ValueError. A stranger's JSON takes at most about 16 bytes of memory for
    each of its bytes: empty objects and arrays, which take far more, are counted first."""
    if data.count(b"{") + data.count(b"[") > MAX_JSON_CONTAINERS:
        raise ValueError(f"JSON must not have more than {MAX_JSON_CONTAINERS:,} objects and arrays")
    try:
        return DECODER.decode(data.decode())
    except RecursionError:
        raise ValueError("JSON must not be nested this deep") from None


def finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"a number must be finite, got {text:.30}")
    return number


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


DECODER = json.JSONDecoder(parse_constant=refuse_constant, parse_float=finite)


MAX_UNPACKED = 512_000_000
"""bytes that an archive unpacks to, the members that are skipped included"""
MAX_RATIO = 100
"""unpacked bytes per packed byte, of an archive or a gzip file, once it unpacks to more than UNPACKED_FLOOR"""
UNPACKED_FLOOR = 10_000_000
"""bytes that any archive may unpack to: small files of zeros compress by more than MAX_RATIO"""


def most_unpacked(packed: int, most: int = MAX_UNPACKED) -> int:
    """Bytes that `packed` bytes may unpack to: at most `most`, and at most MAX_RATIO as many beyond the floor."""
    return min(most, max(UNPACKED_FLOOR, MAX_RATIO * packed))
