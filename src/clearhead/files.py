"""Atomic, durable file writes (write a temporary file, fsync, rename), and safe reading of untrusted files.

Every failure is an OSError with the file's name; none leaves a partially written file under its final name.

`open_regular`, `read_regular`, `make_folder` and `check_tree` are for folders from untrusted sources. They do not
follow symbolic links (in the last component of a path), do not block on named pipes, and do not write to files with
several hard links, whose other names may be anywhere.
"""

import errno
import hashlib
import itertools
import json
import math
import os
import secrets
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NoReturn

TEMP_SUFFIX = ".part"
"""suffix of files that are still being written"""
CLOSE_ON_EXEC = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)  # Windows has only the second
NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # not on Windows
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | NONBLOCK  # neither on Windows
JUNCTION = 0xA0000003
"""st_reparse_tag of a junction: a link to a folder on Windows, which lstat reports as a folder"""
LOCK_OFFSET, LOCK_ATTEMPTS = 2**30, 10
"""on Windows: the byte that is locked, far behind the process id, because nobody can read a locked byte"""
MAX_DEPTH = 12
"""levels of folders that `walk` visits"""
MAX_JSON_BYTES = 16 * 2**20
"""limit for a JSON file; the largest is the state of a run that lists hundreds of thousands of skipped images"""
MAX_JSON_CONTAINERS = 2**17
"""limit for the objects and arrays in a JSON file"""
FILE_TYPES = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a regular file",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class UnsafeFileError(OSError):
    """A link or a special file where a regular file or a folder was expected."""

    def __init__(self, message: str, path: Path | str):
        super().__init__(errno.ELOOP, message, os.fspath(path))


def write_atomic(path: Path, data: bytes | bytearray) -> None:
    """Create or replace a file durably. A reader sees the old contents or the new ones, never a mixture."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMP_SUFFIX}")
    try:
        write_durable(temporary, data)
        replace_file(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            error.filename, error.filename2 = os.fspath(path), None  # instead of the temporary name
        raise
    fsync_folder(path.parent)


def replace_file(source: Path, target: Path) -> None:
    """os.replace. On Windows it fails while another process has the target open: it is tried for a second."""
    deadline = time.monotonic() + (1.0 if sys.platform == "win32" else 0.0)
    while True:
        try:
            return os.replace(source, target)
        except PermissionError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.02)


def write_durable(path: Path, data: bytes | bytearray) -> None:
    """Create a file and fsync its contents. Its name is durable only after `fsync_folder`."""
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
        write_all(file, data)
        os.fsync(file)


def fsync_folder(folder: Path) -> None:
    """Make the creation, renaming and deletion of files in a folder durable. Windows offers no such call."""
    if sys.platform == "win32":
        return
    with opened(folder, os.O_RDONLY) as file:
        try:
            os.fsync(file)
        except OSError as error:  # some network file systems cannot fsync folders
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise


def write_all(file: int, data: bytes | bytearray) -> None:
    """Write all bytes to a file descriptor: os.write may write fewer than it is given."""
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(file, remaining) :]


def read_at(file: int, n_bytes: int, offset: int) -> bytes:
    """Bytes from an offset: os.pread, which Windows lacks, but the file position moves."""
    os.lseek(file, offset, os.SEEK_SET)
    return os.read(file, n_bytes)


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A file descriptor. Errors inside this context get the file's name, which the system leaves out."""
    with closing_file(os.open(path, flags | CLOSE_ON_EXEC, 0o666), path) as file:
        yield file


@contextmanager
def opened_regular(path: Path, flags: int) -> Iterator[int]:
    """`opened`, but only for regular files: see `open_regular`."""
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
    """The descriptor of a regular file. IsADirectoryError for a folder, UnsafeFileError for anything else.

    Files with several hard links are not opened for writing. `follow` allows symbolic links, for paths that the user
    has named.
    """
    if follow:
        check_regular(path, os.stat(path), flags)  # before os.open, which may have side effects on a device
    elif not hasattr(os, "O_NOFOLLOW"):
        with suppress(FileNotFoundError):
            check_regular(path, os.lstat(path), flags)
    try:
        file = os.open(path, flags | CLOSE_ON_EXEC | (NONBLOCK if follow else NO_FOLLOW), 0o666)
    except OSError:  # the error for a link, a pipe or a socket depends on the system
        with suppress(FileNotFoundError):
            check_regular(path, os.lstat(path), flags)
        raise
    try:
        check_regular(path, os.fstat(file), flags)
    except BaseException:
        os.close(file)
        raise
    return file


def check_regular(path: Path, status: os.stat_result, flags: int) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "expected a regular file, got a folder", os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        raise UnsafeFileError(f"expected a regular file, got {file_type(status)}", path)
    if flags & (os.O_WRONLY | os.O_RDWR) and status.st_nlink > 1:
        raise UnsafeFileError(f"refusing to write to a file with {status.st_nlink} hard links", path)


def is_plain(status: os.stat_result) -> bool:
    """Whether it is a folder or a regular file, and not a link, a junction or a special file."""
    return file_type(status) in ("a folder", "a regular file")


def file_type(status: os.stat_result) -> str:
    if getattr(status, "st_reparse_tag", 0) == JUNCTION:
        return "a junction"
    return FILE_TYPES.get(stat.S_IFMT(status.st_mode), "a special file")


def read_regular(path: Path, max_bytes: int | None = None) -> bytes:
    """The contents of a regular file. OSError if it is a link or a special file, or has more than `max_bytes`."""
    with opened_regular(path, os.O_RDONLY) as file:
        size = os.fstat(file).st_size
        if max_bytes is not None and size > max_bytes:
            raise OSError(errno.EFBIG, f"expected at most {max_bytes:,} bytes, got {size:,}", os.fspath(path))
        with open(file, "rb", closefd=False) as content:
            return content.read()


def make_folder(path: Path) -> None:
    """Create a folder unless it exists. UnsafeFileError for a link to a folder."""
    try:
        os.mkdir(path)
    except FileExistsError:
        check_folder(path)
        if not path.is_dir():
            raise


def check_folder(path: Path) -> None:
    """UnsafeFileError for a symbolic link or a special file; a folder, a regular file or a missing path passes."""
    with suppress(FileNotFoundError):
        status = os.lstat(path)
        if not is_plain(status):
            raise UnsafeFileError(f"expected a folder, got {file_type(status)}", path)


def walk(folder: Path, depth: int = MAX_DEPTH) -> Iterator[tuple[Path, os.stat_result]]:
    """All paths below a folder, sorted, with their lstat. Paths that are deleted in the meantime are skipped."""
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        try:
            status = os.lstat(folder / name)
        except FileNotFoundError:
            continue
        yield folder / name, status
        if stat.S_ISDIR(status.st_mode):
            if depth == 1:
                raise UnsafeFileError("folders are nested too deeply", folder / name)
            yield from walk(folder / name, depth - 1)


def unsafe_type(status: os.stat_result, *, for_writing: bool) -> str:
    """What makes a file unsafe in an untrusted folder; "" for folders and regular files.

    Several hard links are unsafe only for writing: reading such a file reveals no more than reading a copy.
    """
    if not is_plain(status):
        return file_type(status)
    if for_writing and stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        return f"a file with {status.st_nlink} hard links"
    return ""


def check_tree(folder: Path, *, for_writing: bool) -> None:
    """UnsafeFileError for links and special files below a folder. The folder itself may be a link."""
    for path, status in walk(folder):
        if problem := unsafe_type(status, for_writing=for_writing):
            raise UnsafeFileError(f"{problem} is not allowed in a run directory", path)


def remove_temporary_files(folder: Path, older_than: float = 0.0) -> None:
    """Delete unfinished files of killed processes.

    The caller must own the folder, or pass an age in seconds after which no process can still be writing them.
    """
    for temporary in folder.glob(f".*{TEMP_SUFFIX}"):
        with suppress(FileNotFoundError):
            status = os.lstat(temporary)
            if stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime >= older_than:
                os.unlink(temporary)


def acquire_lock(file: int, path: Path) -> None:
    """Lock an open file without waiting, and write the process id into it, for the error message of others."""
    try:
        lock_exclusively(file)
    except ImportError:
        message = "training requires file locks (flock), which this system lacks; use Linux, macOS or Windows"
        raise OSError(errno.ENOSYS, message, str(path)) from None
    except BlockingIOError as error:
        number = read_at(file, 20, 0).decode(errors="replace").strip()
        owner = f"process {number}" if number.isdecimal() else "another process"
        message = f"locked by {owner}; wait until it ends, or stop it"
        raise OSError(error.errno, message, str(path)) from None
    os.ftruncate(file, 0)
    write_all(file, f"{os.getpid()}\n".encode())


def lock_exclusively(file: int) -> None:
    """BlockingIOError if another process holds the exclusive lock. Shared locks, which readers hold only briefly, are
    waited for."""
    for attempt in itertools.count(1):
        try:
            flock(file, "exclusive")
            return
        except BlockingIOError:
            if sys.platform != "win32":
                flock(file, "shared")  # fails only if the other lock is exclusive
                flock(file, "unlock")
            elif attempt == LOCK_ATTEMPTS:  # there, a reader's lock is exclusive too
                raise
            time.sleep(0.02)


def flock(file: int, operation: Literal["exclusive", "shared", "unlock"]) -> None:
    """Lock an open file, without waiting, or unlock it. BlockingIOError if another process, or another descriptor of
    this one, holds the lock. The system unlocks the files of a process that ends."""
    if sys.platform != "win32":
        import fcntl

        operations = {"exclusive": fcntl.LOCK_EX, "shared": fcntl.LOCK_SH, "unlock": fcntl.LOCK_UN}
        return fcntl.flock(file, operations[operation] | fcntl.LOCK_NB)
    import msvcrt

    os.lseek(file, LOCK_OFFSET, os.SEEK_SET)  # msvcrt.locking locks bytes from the file position on
    try:
        return msvcrt.locking(file, msvcrt.LK_UNLCK if operation == "unlock" else msvcrt.LK_NBLCK, 1)
    except PermissionError as error:
        raise BlockingIOError(error.errno, "locked by another process") from None
    finally:
        os.lseek(file, 0, os.SEEK_SET)


MAX_SPARSENESS = 8
"""bytes of tensors per byte that is stored on disk. File systems that compress turn zeros into holes, but of the
tensors of a checkpoint at least the weights are not zeros"""


def check_stored(paths: Iterable[Path]) -> None:
    """ValueError if these files are mostly holes: such a file of any size takes no room on disk and costs its sender
    nothing, but reading it takes as much memory as reading a full one."""
    sizes = {path: os.lstat(path).st_size for path in paths}
    size, stored = sum(sizes.values()), sum(map(stored_bytes, sizes))
    if size > MAX_SPARSENESS * stored:
        raise ValueError(f"of {size:,} bytes only {stored:,} are stored on disk; the rest are holes in the file")


def stored_bytes(path: Path) -> int:
    """The size of a file without its holes; with them where the file system does not report them."""
    with opened_regular(path, os.O_RDONLY) as file:
        size, stored, end = os.fstat(file).st_size, 0, 0
        if not hasattr(os, "SEEK_DATA"):  # Windows
            return size
        try:
            while end < size:
                start = os.lseek(file, end, os.SEEK_DATA)
                end = os.lseek(file, start, os.SEEK_HOLE)
                stored += end - start
        except OSError as error:
            return stored if error.errno == errno.ENXIO else size  # ENXIO: the rest of the file is a hole
    return stored


def sha256(content: bytes | Path) -> str:
    """The SHA-256 digest of bytes, or of a file, which is read in chunks."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def to_json(value: Any, indent: int | None = None) -> bytes:
    """JSON in UTF-8 with a trailing newline. Floats round-trip exactly; ValueError for NaN and infinity."""
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"cannot be represented in JSON: {error}") from None


def from_json(data: bytes) -> Any:
    """Parse JSON; ValueError if it is invalid.

    Untrusted JSON takes at most about 16 bytes of memory per byte: the number of objects and arrays, which take far
    more when they are empty, is limited first.
    """
    if data.count(b"{") + data.count(b"[") > MAX_JSON_CONTAINERS:
        raise ValueError(f"JSON must have at most {MAX_JSON_CONTAINERS:,} objects and arrays")
    try:
        return DECODER.decode(data.decode())
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


def parse_finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"numbers must be finite, got {text:.30}")
    return number


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


DECODER = json.JSONDecoder(parse_constant=refuse_constant, parse_float=parse_finite)


MAX_UNPACKED = 512_000_000
"""limit for the unpacked bytes of an archive, including members that are skipped"""
MAX_RATIO = 100
"""limit for the compression ratio of an archive or a gzip file that unpacks to more than UNPACKED_FLOOR bytes"""
UNPACKED_FLOOR = 10_000_000
"""bytes that any archive may unpack to, because small files of zeros exceed MAX_RATIO"""


def max_unpacked_bytes(packed: int, limit: int = MAX_UNPACKED) -> int:
    """The number of bytes that `packed` bytes may unpack to: MAX_RATIO times as many, or the floor, up to `limit`."""
    return min(limit, max(UNPACKED_FLOOR, MAX_RATIO * packed))
