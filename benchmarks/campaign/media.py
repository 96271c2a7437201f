"""Images and archives: damaged, hostile, or much larger than their files."""

import contextlib
import gzip
import io
import random
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from benchmarks.campaign.fuzz import Fuzz, Parse, mutated
from benchmarks.campaign.runs import Workspace
from PIL import Image


class Images(Fuzz):
    """Damaged images, and images whose header declares a wrong size."""

    name = "images"
    what = "mutated image file"
    small = 500
    counts: ClassVar[Mapping[str, int]] = dict.fromkeys(("png", "jpeg", "webp", "gif", "bmp"), 10_000)

    def begin(self, workspace: Workspace) -> None:
        super().begin(workspace)
        self.originals = {kind: pictures_of(kind) for kind in self.counts}

    def parsers(self) -> dict[str, tuple[str, Parse]]:
        from clearhead.data.images import read_image, resize

        def read(path: Path) -> None:
            resize(read_image(path), 16, "pad")

        return {kind: (f"picture.{kind}", read) for kind in self.counts}

    def input(self, kind: str, rng: random.Random) -> bytes:
        data = rng.choice(self.originals[kind])
        if rng.random() < 0.2:
            return with_size(kind, data, rng.choice(SIDES), rng.choice(SIDES))
        changed = mutated(data, rng)
        return png_with_sums(changed) if kind == "png" and rng.random() < 0.5 else changed


SIDES = (0, 1, 7, 5000, 5001, 7000, 7071, 10_000, 16_383, 40_000, 65_535, 2**31 - 1, 2**32 - 1)


def pictures_of(kind: str) -> list[bytes]:
    noise = random.Random(kind)
    found = []
    for mode in ("RGB", "L", "P", "RGBA"):
        image = Image.frombytes("RGB", (12, 9), noise.randbytes(12 * 9 * 3)).convert(mode)
        if kind == "jpeg" and mode in ("P", "RGBA"):
            continue
        for options in ({}, {"lossless": True}) if kind == "webp" else ({},):
            buffer = io.BytesIO()
            image.save(buffer, kind.upper(), **options)
            found.append(buffer.getvalue())
    return found


def with_size(kind: str, data: bytes, width: int, height: int) -> bytes:
    """The same file with another declared size."""
    changed = bytearray(data)
    if kind == "png":
        changed[16:24] = struct.pack(">II", width & 0x7FFFFFFF, height & 0x7FFFFFFF)
        return png_with_sums(bytes(changed))
    small = width & 0xFFFF, height & 0xFFFF
    if kind == "gif":
        changed[6:10] = struct.pack("<HH", *small)
        at = gif_frame(data)
        changed[at + 5 : at + 9] = struct.pack("<HH", *small)
    elif kind == "bmp":
        changed[18:26] = struct.pack("<II", width, height)
    elif kind == "jpeg" and (at := max(changed.find(b"\xff\xc0"), changed.find(b"\xff\xc2"))) > 0:
        changed[at + 5 : at + 9] = struct.pack(">HH", small[1], small[0])
    elif kind == "webp" and changed[12:16] == b"VP8 ":
        changed[26:30] = struct.pack("<HH", width & 0x3FFF, height & 0x3FFF)
    elif kind == "webp" and changed[12:16] == b"VP8L":
        bits = struct.unpack("<I", changed[21:25])[0] & ~0xFFFFFFF
        changed[21:25] = struct.pack("<I", bits | (width - 1 & 0x3FFF) | (height - 1 & 0x3FFF) << 14)
    elif kind == "webp":
        changed[24:30] = (width - 1 & 0xFFFFFF).to_bytes(3, "little") + (height - 1 & 0xFFFFFF).to_bytes(3, "little")
    return bytes(changed)


def gif_frame(data: bytes) -> int:
    """The offset of the first frame, after the color table and the extensions."""
    at = 13 + (3 * 2 ** ((data[10] & 7) + 1) if data[10] & 0x80 else 0)
    while data[at] == 0x21:
        at += 2
        while data[at]:
            at += data[at] + 1
        at += 1
    return at


def png_with_sums(data: bytes) -> bytes:
    """The same file with valid checksums, so that decoders read further."""
    changed, at = bytearray(data), 8
    while at + 12 <= len(changed):
        size = struct.unpack(">I", changed[at : at + 4])[0]
        end = at + 8 + size
        if end + 4 > len(changed):
            break
        changed[end : end + 4] = struct.pack(">I", zlib.crc32(changed[at + 4 : end]))
        at = end + 4
    return bytes(changed)


NAMES = (
    "a.bin",
    "b/a.bin",
    "../a.bin",
    "/a.bin",
    "C:\\a.bin",
    "a.bin\x00x",
    "\udcff.bin",
    "x" * 300,
    ".",
    "",
    "b\\..\\a.bin",
)
WANTED = ("a.bin", "b.bin")


class Archives(Fuzz):
    """Archives with hostile members (links, devices, paths that lead outside, bombs), and damaged archives."""

    name = "archives"
    what = "hostile or damaged archive"
    small = 200
    batch = 100
    counts: ClassVar[Mapping[str, int]] = {"tar": 3_000, "tar.gz": 3_500, "zip": 3_500}

    def parsers(self) -> dict[str, tuple[str, Parse]]:
        from clearhead.data.user_files import read_archive

        return {kind: (f"archive.{kind}", lambda path: read_archive(path, WANTED)) for kind in self.counts}

    def input(self, kind: str, rng: random.Random) -> bytes:
        made = zip_of(rng) if kind == "zip" else tar_of(rng)
        data = gzip.compress(made, mtime=0, compresslevel=9) if kind == "tar.gz" else made
        return mutated(data, rng) if rng.random() < 0.6 else data


def content_of(rng: random.Random) -> bytes:
    """A few bytes; in one of fifty cases megabytes of zeros, which compress well."""
    return bytes(rng.choice((2, 40)) * 2**20) if rng.random() < 0.02 else rng.randbytes(rng.randint(0, 200))


def tar_of(rng: random.Random) -> bytes:
    buffer = io.BytesIO()
    form = rng.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT))
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for _ in range(rng.randint(1, 4)):
            member = tarfile.TarInfo(rng.choice((*WANTED, *NAMES)))
            content = content_of(rng)
            member.size = len(content)
            if rng.random() < 0.3:
                member.type = rng.choice((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE))
                member.linkname, member.size = rng.choice(("/etc/passwd", "../x", "a.bin")), 0
                content = b""
            with contextlib.suppress(ValueError, UnicodeError):
                archive.addfile(member, io.BytesIO(content))
    data = bytearray(buffer.getvalue())
    if rng.random() < 0.2:  # a header that declares a wrong size
        data[124:136] = b"%011o\0" % rng.choice((0, 10**6, 10**9, 8**11 - 1))
        data[148:156] = b"        "
        data[148:156] = b"%06o\0 " % sum(data[:512])
    return bytes(data)


def zip_of(rng: random.Random) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for _ in range(rng.randint(1, 4)):
            member = zipfile.ZipInfo(rng.choice((*WANTED, *NAMES)).replace("\udcff", "ÿ") or "x")
            member.compress_type = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))
            member.external_attr = rng.choice((0, 0o100644, 0o120777, 0o020666, 0o040755)) << 16
            with contextlib.suppress(ValueError, UnicodeError), ignored_warnings():
                archive.writestr(member, content_of(rng))
    return buffer.getvalue()


@contextlib.contextmanager
def ignored_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about duplicate names
        yield
