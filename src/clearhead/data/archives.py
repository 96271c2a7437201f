"""The files inside an archive, read into memory by name. Nothing is ever extracted to disk.

An archive is somebody else's: one with a link, a device, an absolute path, a `..` or far too much in it is refused.
How much is too much is in limits.py, and is checked while an archive is read: what it says of its own sizes is not
believed. Sparse members of a tar, which are a few bytes and any size, are refused.
"""

import gzip
import io
import stat
import struct
import tarfile
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from clearhead.data.user_files import MAX_DATASET_BYTES, MAX_HEADER_BYTES, MAX_MEMBER_BYTES, MAX_MEMBERS, open_user_file
from clearhead.files import MAX_UNPACKED, most_unpacked

EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
"""kinds of tar headers that `tarfile` reads into memory"""
ZIP_END, ZIP64_END, ZIP_TAIL = b"PK\x05\x06", b"PK\x06\x07", 22 + 65_535
"""where a zip's directory is, stands in a record at its end, before a comment; beyond 4 GB in another one"""


DISTRUST = "do not trust this archive"


class ArchiveError(ValueError):
    """An archive that is refused, by a rule of ours."""


def read_archive(path: Path, wanted: Collection[str], most: int = MAX_UNPACKED) -> dict[str, bytes]:
    """Those files of a .tar, .tar.gz, .tgz or .zip whose own name, without folders, is wanted."""
    found: dict[str, bytes] = {}
    try:
        with open_user_file(path) as file:
            reader = zip_members if zipfile.is_zipfile(file) else tar_members
            file.seek(0)
            most = most_unpacked(path.stat().st_size, most)
            for name, data in reader(file, path.name, wanted, most):
                if name in found:
                    raise ArchiveError(f"an archive must have each file once, got {name} twice in {path.name}")
                found[name] = data
                check_total(found, path.name)
    except (ArchiveError, MemoryError):
        raise
    except Exception as error:  # damaged files make the readers of the standard library raise nearly anything
        reason = "nested headers" if isinstance(error, RecursionError) else error
        raise ValueError(
            f"{path.name} must be a whole .tar, .tar.gz or .zip archive, got a damaged one ({reason}); get it again"
        ) from None
    return found


def check_total(found: dict[str, bytes], name: str) -> None:
    """Of files that were read for a data set."""
    if (size := sum(map(len, found.values()))) > MAX_DATASET_BYTES:
        raise ArchiveError(f"the files of a data set may have {MAX_DATASET_BYTES} bytes, got {size} in {name}")


class PlainMember(tarfile.TarInfo):
    """A member of a tar whose headers are small and which is not sparse. These three methods are those by which
    `tarfile` would read a long header, or a list of holes, into memory."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in EXTENDED and self.size > MAX_HEADER_BYTES:
            raise ArchiveError(f"a header of a tar may have {MAX_HEADER_BYTES} bytes, got {self.size}; {DISTRUST}")
        return super()._proc_member(archive)  # type: ignore[misc]

    def _proc_sparse(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        raise ArchiveError(f"an archive must have ordinary files only, got a sparse file {self.name!r}; {DISTRUST}")

    def _proc_gnusparse_10(self, *args: object) -> None:
        raise ArchiveError(f"an archive must have ordinary files only, got a sparse file {self.name!r}; {DISTRUST}")


def tar_members(file: BinaryIO, label: str, wanted: Collection[str], most: int) -> Iterator[tuple[str, bytes]]:
    with unzipped(file) as plain:
        bounded = Bounded(plain, most, label)
        with tarfile.open(fileobj=bounded, mode="r|", tarinfo=PlainMember) as archive:  # nothing is read twice
            for count, member in enumerate(archive):
                is_ordinary = (member.isreg() or member.isdir()) and not member.issparse()
                check_member(member.name, is_ordinary, count, label)
                name = PurePosixPath(member.name).name
                if member.isreg() and name in wanted:
                    check_length(name, member.size, label)
                    bounded.check(member.size)
                    content = archive.extractfile(member)
                    assert content is not None
                    yield name, content.read()


def zip_members(file: BinaryIO, label: str, wanted: Collection[str], most: int) -> Iterator[tuple[str, bytes]]:
    check_directory(file, label)
    with zipfile.ZipFile(file) as archive:
        left = most
        for count, member in enumerate(archive.infolist()):
            mode = stat.S_IFMT(member.external_attr >> 16)
            check_member(member.filename, mode in (0, stat.S_IFREG, stat.S_IFDIR), count, label)
            name = PurePosixPath(member.filename).name
            if member.is_dir() or name not in wanted:
                continue
            left -= member.file_size
            if left < 0:
                raise ArchiveError(too_much(label, most))
            check_length(name, member.file_size, label)
            if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ArchiveError(f"a zip must be without password or rare compression, got {label}; unpack it first")
            with archive.open(member) as content:
                yield name, content.read(member.file_size + 1)  # unpacks no more than that, and checks its sum


def check_directory(file: BinaryIO, label: str) -> None:
    """`zipfile` reads the whole directory into memory, an object for each member, before it can be asked anything."""
    start = max(0, file.seek(0, io.SEEK_END) - ZIP_TAIL)
    file.seek(start)
    tail = file.read()
    file.seek(0)
    at = tail.find(ZIP_END)
    while at >= 0:
        size = struct.unpack("<I", tail[at + 12 : at + 16])[0] if len(tail) >= at + 16 else 0
        if size > MAX_HEADER_BYTES:
            raise ArchiveError(f"the directory of a zip may have {MAX_HEADER_BYTES} bytes, got {size} in {label}")
        at = tail.find(ZIP_END, at + 1)
    if ZIP64_END in tail:
        raise ArchiveError(f"a zip must be without the extensions for more than 4 GB, got {label}; unpack it first")


def check_member(name: str, is_ordinary: bool, count: int, archive: str) -> None:
    if count >= MAX_MEMBERS:
        raise ArchiveError(f"an archive may have {MAX_MEMBERS} members, got more in {archive}; {DISTRUST}")
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if not parts or name.startswith(("/", "\\")) or ".." in parts or name[1:2] == ":":
        raise ArchiveError(
            f"an archive's files must have names that stay inside it, got {name!r} in {archive}; {DISTRUST}"
        )
    if not is_ordinary:
        raise ArchiveError(
            f"an archive must have ordinary files only, got a link or device {name!r} in {archive}; {DISTRUST}"
        )


def check_length(name: str, size: int, archive: str) -> None:
    if size > MAX_MEMBER_BYTES:
        raise ArchiveError(f"a file of a data set may have {MAX_MEMBER_BYTES} bytes, got {size} in {name} of {archive}")


def unzipped(file: BinaryIO) -> BinaryIO:
    """The stream behind gzip, or the file itself."""
    start = file.read(2)
    file.seek(0)
    return gzip.GzipFile(fileobj=file) if start == b"\x1f\x8b" else file  # type: ignore[return-value]


def too_much(archive: str, most: int) -> str:
    return f"an archive may unpack to {most} bytes, got more in {archive}; {DISTRUST}"


class Bounded(io.RawIOBase):
    """A stream that refuses to give more than `most` bytes, however well they were compressed."""

    def __init__(self, stream: BinaryIO, most: int, name: str):
        self.stream, self.most, self.archive, self.given = stream, most, name, 0

    def read(self, size: int = -1) -> bytes:
        data = self.stream.read(size)  # tarfile asks for a few kilobytes at a time
        self.given += len(data)
        self.check(0)
        return data

    def check(self, more: int) -> None:
        if self.given + more > self.most:
            raise ArchiveError(too_much(self.archive, self.most))
