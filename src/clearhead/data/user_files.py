"""Safe reading of the user's files and of archives, and the limits on everything that is read from files and servers.

Only regular files are read, because opening a named pipe blocks and a device has no end. A file is opened without
blocking and checked through its descriptor, so that it cannot be replaced between the check and the read.

Files of tar and zip archives are read into memory, by name; nothing is extracted to disk. Archives are untrusted. An
archive that contains a link, a device, an absolute path or a `..` is rejected, and so are sparse members of a tar, a
few bytes of which can declare any size. The limits are enforced while an archive is read, without relying on the sizes
that it declares.

Readers of untrusted data check the limits before they allocate memory. With these limits, no reader needs more than
512 MB in addition to the data that it returns. This module does not import torch.
"""

import codecs
import gzip
import io
import os
import re
import stat
import struct
import tarfile
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from clearhead.files import MAX_UNPACKED, UnsafeFileError, max_unpacked_bytes, open_regular

MAX_IMAGE_BYTES = 10_000_000
"""bytes of an image file"""
MAX_IMAGE_PIXELS = 25_000_000
"""pixels of an image, as declared in its header. Decoding takes up to 16 bytes per pixel (WebP)"""
MAX_IMAGE_SIDE = 32_768
"""width and height of an image. Resizing an image of 1 x 25,000,000 pixels would first make it wider"""
MAX_DECODING_PIXELS = MAX_IMAGE_PIXELS
"""pixels that all threads decode at the same time"""
MAX_JPEG_SCANS = 100
"""scans of a progressive JPEG file; encoders write about 10. Each one is a pass over all pixels"""

MAX_FOLDER_ENTRIES = 300_000
"""files and folders in a folder of images, and in a folder that is searched for a data set"""
MAX_FOLDER_DEPTH = 32
"""nesting of folders. Symbolic links to folders are not followed below a class"""

MAX_TEXT_BYTES = 100_000_000
"""bytes of a training text: the size of enwik8"""
MAX_SYMBOLS = 65_536
"""distinct characters of a text"""
MAX_LIST_BYTES = 10_000_000
"""bytes of a dictionary or word list: about three times the CMU dictionary"""
MAX_LIST_LINES = 500_000
"""lines of a dictionary or word list"""

MAX_MEMBERS = 10_000
"""files and folders in an archive"""
MAX_MEMBER_BYTES = 64_000_000
"""uncompressed bytes of one file of a data set"""
MAX_DATASET_BYTES = 256_000_000
"""uncompressed bytes of all files of a data set. CIFAR-10 has 184 million"""
MAX_HEADER_BYTES = 1_000_000
"""bytes of one extended header of a tar archive, and of the central directory of a zip archive"""

MAX_DOWNLOAD_BYTES = 512_000_000
"""bytes of a download"""
DOWNLOAD_WAITS = (1, 2, 4, 8, 16)
"""seconds to wait before each retry of an interrupted download"""
MIN_SPEED = 1_000
"""average bytes per second that a download must reach if it takes longer than a minute"""

MAX_MATRIX_BYTES = 10_000_000
"""bytes of a file of matrices or of a mask"""
MAX_MATRIX_VALUES = 2**22
"""values of all arrays in a file, checked in the array headers before the arrays are read"""

MAX_IMAGE_SIZE = 2_048
"""image_size in a config"""
MAX_LENGTH = 65_536
"""length and set_size in a config"""
MAX_EXAMPLES = 10_000_000
"""limit, validation and window in a config. Shuffling this many takes about 400 MB"""

CONVERT = "convert it first"
LINE_END = re.compile(r"\r\n|\r|\n")
CHUNK_BYTES = 1 << 20
EXTENDED_HEADER_TYPES = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
"""types of tar headers that `tarfile` reads into memory"""
ZIP_END, ZIP64_END, ZIP_TAIL = b"PK\x05\x06", b"PK\x06\x07", 22 + 65_535
"""signatures of the zip records that locate the central directory, and the bytes at the end that can hold them"""
DISTRUST = "do not trust this archive"


class NotRegularError(ValueError):
    """The path is a pipe, a device or a socket instead of a regular file."""


def user_path(path: str | Path) -> Path:
    """The path with ~ and ~NAME expanded."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"there is no home directory for {str(path)!r}; use an absolute path") from None


def open_user_file(path: str | Path, max_bytes: int | None = None) -> io.BufferedReader:
    """Opens a regular file of at most `max_bytes` bytes. A folder or a missing file raises an OSError."""
    try:
        descriptor = open_regular(user_path(path), os.O_RDONLY, follow=True)
    except UnsafeFileError:
        raise NotRegularError(
            f"{path} must be a regular file because it is read more than once, got a pipe or a device; "
            "save it as a file first"
        ) from None
    try:
        size = os.fstat(descriptor).st_size
        if max_bytes is not None and size > max_bytes:
            raise ValueError(f"{path} has {size:,} bytes, the limit is {max_bytes:,}")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_user_file(path: str | Path, max_bytes: int) -> bytes:
    """All bytes of a regular file. Raises a ValueError if there are more than `max_bytes` or the file grows."""
    with open_user_file(path, max_bytes) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(size + 1)
    if len(data) > size:
        raise ValueError(f"{path} has changed while it was read: it had {size:,} bytes and has more now")
    return data


def check_user_file(path: str | Path, max_bytes: int = MAX_TEXT_BYTES) -> Path:
    """The expanded path, if it is a regular file of at most `max_bytes` bytes."""
    open_user_file(path, max_bytes).close()
    return user_path(path)


def read_text_chunks(path: str | Path, max_bytes: int, hint: str = CONVERT) -> list[str]:
    """The chunks of a UTF-8 text, without its byte order mark.

    Zero bytes are rejected: text contains none, but UTF-16 does. Python stores each chunk with 1, 2 or 4 bytes per
    character, so a single rare character does not enlarge the whole text.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    chunks = []
    try:
        for data in read_chunks(path, max_bytes):
            chunks.append(decoder.decode(data, final=not data))
            if "\0" in chunks[-1]:
                raise ValueError(f"{path} must be text in UTF-8, got other bytes (a zero byte); {hint}")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8, got other bytes ({error.reason}); {hint}") from None
    return chunks


def read_chunks(path: str | Path, max_bytes: int) -> Iterator[bytes]:
    """The chunks of a regular file, then an empty one. Raises a ValueError if there are more than `max_bytes` bytes."""
    length = 0
    with open_user_file(path, max_bytes) as file:
        while data := file.read(CHUNK_BYTES):
            length += len(data)
            if length > max_bytes:
                raise ValueError(f"{path} has more than {max_bytes:,} bytes")
            yield data
    yield b""


def read_lines(path: str | Path) -> list[str]:
    """The lines of a text of at most MAX_LIST_BYTES and MAX_LIST_LINES, with any line endings."""
    text = "".join(read_text_chunks(path, MAX_LIST_BYTES))
    if text.count("\n") + text.count("\r") - text.count("\r\n") >= MAX_LIST_LINES:
        raise ValueError(f"{path} has more than {MAX_LIST_LINES:,} lines")
    return LINE_END.split(text)


def scandir_recursive(folder: Path) -> Iterator[os.DirEntry[str]]:
    """All entries of a folder and its subfolders, in file system order. Symbolic links to folders are not followed.

    Raises a ValueError if there are more than MAX_FOLDER_ENTRIES or they are nested deeper than MAX_FOLDER_DEPTH.
    """
    pending, count = [(os.fspath(folder), 1)], 0
    while pending:
        path, depth = pending.pop()
        with os.scandir(path) as entries:
            for entry in entries:
                count += 1
                if count > MAX_FOLDER_ENTRIES:
                    raise ValueError(f"{folder} has more than {MAX_FOLDER_ENTRIES:,} files and folders")
                if entry.is_dir(follow_symlinks=False):
                    if depth >= MAX_FOLDER_DEPTH:
                        raise ValueError(f"{folder} has folders that are nested more than {MAX_FOLDER_DEPTH} deep")
                    pending.append((entry.path, depth + 1))
                yield entry


class ArchiveError(ValueError):
    """An archive that violates one of the limits or safety rules."""


def read_archive(path: Path, wanted: Collection[str], max_bytes: int = MAX_UNPACKED) -> dict[str, bytes]:
    """The files of a .tar, .tar.gz, .tgz or .zip archive whose base name is in `wanted`, by base name."""
    members: dict[str, bytes] = {}
    try:
        with open_user_file(path) as file:
            read_members = zip_members if zipfile.is_zipfile(file) else tar_members
            file.seek(0)
            max_bytes = max_unpacked_bytes(path.stat().st_size, max_bytes)
            for name, data in read_members(file, path.name, wanted, max_bytes):
                if name in members:
                    raise ArchiveError(f"file names in an archive must be unique, got {name} twice in {path.name}")
                members[name] = data
                check_total(members, path.name)
    except (ArchiveError, MemoryError):
        raise
    except Exception as error:  # the standard library raises almost any exception on damaged files
        reason = "nested headers" if isinstance(error, RecursionError) else error
        raise ValueError(
            f"{path.name} is not a valid .tar, .tar.gz or .zip archive ({reason}); download it again"
        ) from None
    return members


def check_total(members: dict[str, bytes], name: str) -> None:
    """Checks the total size of the files that were read for a data set."""
    if (size := sum(map(len, members.values()))) > MAX_DATASET_BYTES:
        raise ArchiveError(f"the files of a data set may have at most {MAX_DATASET_BYTES} bytes, got {size} in {name}")


class SafeTarInfo(tarfile.TarInfo):
    """A tar member that is not sparse and has small headers.

    In the base class, these three methods read long headers and lists of holes into memory.
    """

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in EXTENDED_HEADER_TYPES and self.size > MAX_HEADER_BYTES:
            raise ArchiveError(f"a tar header may have at most {MAX_HEADER_BYTES} bytes, got {self.size}; {DISTRUST}")
        return super()._proc_member(archive)  # type: ignore[misc]

    def _proc_sparse(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        raise ArchiveError(f"an archive must contain only regular files, got a sparse file {self.name!r}; {DISTRUST}")

    def _proc_gnusparse_10(self, *args: object) -> None:
        raise ArchiveError(f"an archive must contain only regular files, got a sparse file {self.name!r}; {DISTRUST}")


def tar_members(file: BinaryIO, label: str, wanted: Collection[str], max_bytes: int) -> Iterator[tuple[str, bytes]]:
    with decompressed(file) as stream:
        bounded = BoundedReader(stream, max_bytes, label)
        with tarfile.open(fileobj=bounded, mode="r|", tarinfo=SafeTarInfo) as archive:  # a stream, read only once
            for count, member in enumerate(archive):
                is_regular = (member.isreg() or member.isdir()) and not member.issparse()
                check_member(member.name, is_regular, count, label)
                name = PurePosixPath(member.name).name
                if member.isreg() and name in wanted:
                    check_length(name, member.size, label)
                    bounded.check(member.size)
                    content = archive.extractfile(member)
                    assert content is not None
                    yield name, content.read()


def zip_members(file: BinaryIO, label: str, wanted: Collection[str], max_bytes: int) -> Iterator[tuple[str, bytes]]:
    check_directory(file, label)
    with zipfile.ZipFile(file) as archive:
        remaining = max_bytes
        for count, member in enumerate(archive.infolist()):
            mode = stat.S_IFMT(member.external_attr >> 16)
            check_member(member.filename, mode in (0, stat.S_IFREG, stat.S_IFDIR), count, label)
            name = PurePosixPath(member.filename).name
            if member.is_dir() or name not in wanted:
                continue
            remaining -= member.file_size
            if remaining < 0:
                raise ArchiveError(size_message(label, max_bytes))
            check_length(name, member.file_size, label)
            if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ArchiveError(f"{label} uses encryption or an unsupported compression method; unpack it first")
            with archive.open(member) as content:
                yield name, content.read(member.file_size + 1)  # decompresses at most that much and verifies the CRC


def check_directory(file: BinaryIO, label: str) -> None:
    """Checks the size of the central directory, which `zipfile` reads into memory as soon as it opens the file."""
    start = max(0, file.seek(0, io.SEEK_END) - ZIP_TAIL)
    file.seek(start)
    tail = file.read()
    file.seek(0)
    at = tail.find(ZIP_END)
    while at >= 0:
        size = struct.unpack("<I", tail[at + 12 : at + 16])[0] if len(tail) >= at + 16 else 0
        if size > MAX_HEADER_BYTES:
            raise ArchiveError(f"a zip directory may have at most {MAX_HEADER_BYTES} bytes, got {size} in {label}")
        at = tail.find(ZIP_END, at + 1)
    if ZIP64_END in tail:
        raise ArchiveError(f"zip64 archives are not supported, got {label}; unpack it first")


def check_member(name: str, is_regular: bool, count: int, archive: str) -> None:
    if count >= MAX_MEMBERS:
        raise ArchiveError(f"an archive may have at most {MAX_MEMBERS} members, got more in {archive}; {DISTRUST}")
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if not parts or name.startswith(("/", "\\")) or ".." in parts or name[1:2] == ":":
        raise ArchiveError(
            f"paths in an archive must be relative and without .., got {name!r} in {archive}; {DISTRUST}"
        )
    if not is_regular:
        raise ArchiveError(
            f"an archive must contain only regular files, got a link or device {name!r} in {archive}; {DISTRUST}"
        )


def check_length(name: str, size: int, archive: str) -> None:
    if size > MAX_MEMBER_BYTES:
        raise ArchiveError(
            f"a file of a data set may have at most {MAX_MEMBER_BYTES} bytes, got {size} in {name} of {archive}"
        )


def decompressed(file: BinaryIO) -> BinaryIO:
    """The decompressed stream of a gzip file; otherwise the file itself."""
    magic = file.read(2)
    file.seek(0)
    return gzip.GzipFile(fileobj=file) if magic == b"\x1f\x8b" else file  # type: ignore[return-value]


def size_message(archive: str, max_bytes: int) -> str:
    return f"an archive may unpack to at most {max_bytes} bytes, got more in {archive}; {DISTRUST}"


class BoundedReader(io.RawIOBase):
    """A stream that raises an ArchiveError after `max_bytes` bytes, which protects against decompression bombs."""

    def __init__(self, stream: BinaryIO, max_bytes: int, name: str):
        self.stream, self.max_bytes, self.archive, self.n_read = stream, max_bytes, name, 0

    def read(self, size: int = -1) -> bytes:
        data = self.stream.read(size)  # tarfile reads a few kilobytes at a time
        self.n_read += len(data)
        self.check(0)
        return data

    def check(self, num_bytes: int) -> None:
        """Raise an error if `num_bytes` further bytes exceed the limit."""
        if self.n_read + num_bytes > self.max_bytes:
            raise ArchiveError(size_message(self.archive, self.max_bytes))
