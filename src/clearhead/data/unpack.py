"""The files inside an archive, read into memory by name. Nothing is ever extracted to disk.

An archive is somebody else's: one with a link, a device, an absolute path, a `..` or far too much in it is refused.
"""

import gzip
import io
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

MOST = 1_000_000_000
"""bytes that an archive may unpack to"""
MOST_MEMBERS = 100_000
DAMAGED = (tarfile.TarError, zipfile.BadZipFile, zlib.error, OSError, EOFError, NotImplementedError, struct.error)
"""what the readers of the standard library say to damaged files"""


def read_archive(path: Path, wanted: Collection[str], most: int = MOST) -> dict[str, bytes]:
    """Those files of a .tar, .tar.gz, .tgz or .zip whose own name, without folders, is wanted."""
    found: dict[str, bytes] = {}
    reader = zip_members if zipfile.is_zipfile(path) else tar_members
    try:
        for name, data in reader(path, wanted, most):
            if name in found:
                raise ValueError(f"an archive must have each file once, got {name} twice in {path.name}")
            found[name] = data
    except DAMAGED as error:
        raise ValueError(
            f"{path.name} must be a whole .tar, .tar.gz or .zip archive, got a damaged one ({error}); get it again"
        ) from None
    return found


def tar_members(path: Path, wanted: Collection[str], most: int) -> Iterator[tuple[str, bytes]]:
    with open(path, "rb") as file, unzipped(file) as plain:
        bounded = Bounded(plain, most, path.name)
        with tarfile.open(fileobj=bounded, mode="r|") as archive:  # forwards only: nothing is read twice
            for count, member in enumerate(archive):
                check_member(member.name, member.isreg() or member.isdir(), count, path.name)
                name = PurePosixPath(member.name).name
                if member.isreg() and name in wanted:
                    bounded.check(member.size)
                    content = archive.extractfile(member)
                    assert content is not None
                    yield name, content.read()


def zip_members(path: Path, wanted: Collection[str], most: int) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        left = most
        for count, member in enumerate(archive.infolist()):
            mode = stat.S_IFMT(member.external_attr >> 16)
            check_member(member.filename, mode in (0, stat.S_IFREG, stat.S_IFDIR), count, path.name)
            name = PurePosixPath(member.filename).name
            if member.is_dir() or name not in wanted:
                continue
            left -= member.file_size
            if left < 0:
                raise ValueError(too_much(path.name, most))
            if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(
                    f"a zip must be without password or rare compression, got {path.name}; unpack it first"
                )
            with archive.open(member) as content:
                yield name, content.read(member.file_size + 1)  # unpacks no more than that, and checks its sum


def check_member(name: str, is_ordinary: bool, count: int, archive: str) -> None:
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if not parts or name.startswith(("/", "\\")) or ".." in parts or name[1:2] == ":":
        raise ValueError(
            f"an archive's files must have names that stay inside it, got {name!r} in {archive}; "
            "do not trust this archive"
        )
    if not is_ordinary:
        raise ValueError(
            f"an archive must have ordinary files only, got a link or device {name!r} in {archive}; "
            "do not trust this archive"
        )
    if count >= MOST_MEMBERS:
        raise ValueError(
            f"an archive may have {MOST_MEMBERS} members, got more in {archive}; do not trust this archive"
        )


def unzipped(file: BinaryIO) -> BinaryIO:
    """The stream behind gzip, or the file itself."""
    start = file.read(2)
    file.seek(0)
    return gzip.GzipFile(fileobj=file) if start == b"\x1f\x8b" else file  # type: ignore[return-value]


def too_much(archive: str, most: int) -> str:
    return f"an archive may unpack to {most} bytes, got more in {archive}; do not trust this archive"


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
            raise ValueError(too_much(self.archive, self.most))
