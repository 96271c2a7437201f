"""Read files from tar and zip archives into memory, by name. Nothing is extracted to disk.

Archives are untrusted. An archive that contains a link, a device, an absolute path or a `..` is rejected, and so are
sparse members of a tar, a few bytes of which can declare any size. The limits of `user_files` are enforced while an
archive is read, without relying on the sizes that it declares.
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
from clearhead.files import MAX_UNPACKED, max_unpacked_bytes

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
