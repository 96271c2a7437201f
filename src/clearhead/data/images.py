"""A picture file becomes a tensor. Training and prediction use the same two functions: `read_picture` and `resize`.

The size that a file declares is compared with the limits before anything is decoded: 34 bytes of WebP can declare 268
million pixels. All threads together decode at most PIXELS_AT_ONCE. What a picture takes, in bytes per pixel:

    decoding            4 for PNG, BMP and GIF, up to 12 for progressive JPEG, 16 for WebP
    conversion to RGB   8, whatever the mode: it is done strip by strip
    turning it upright  8 (before the conversion)
"""

import ctypes
import io
import struct
import sys
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError
from torch import Tensor

from clearhead.data.datasets import Fit
from clearhead.data.user_files import (
    MAX_JPEG_SCANS,
    MAX_PICTURE_BYTES,
    MAX_PICTURE_PIXELS,
    MAX_PICTURE_SIDE,
    PIXELS_AT_ONCE,
    NotRegularError,
    read_user_file,
)

T = TypeVar("T")
FORMATS = {"PNG": (".png",), "JPEG": (".jpg", ".jpeg"), "WEBP": (".webp",), "GIF": (".gif",), "BMP": (".bmp",)}
SUFFIXES = tuple(suffix for suffixes in FORMATS.values() for suffix in suffixes)
FRAME = 8
"""an eighth of the shorter side, along the border, is what a picture's background is taken from"""
STRIP = 1 << 18
"""pixels that are converted to RGB at a time"""
TURNED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""what makes a picture upright, by the orientation that its camera noted"""
ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""the seven passes of an interlaced PNG: first column, first row, and the steps to the next ones"""


class InvalidImageError(ValueError):
    """A file that cannot be decoded to a picture. `reason` says why, without the file's name."""

    def __init__(self, name: str, reason: str):
        super().__init__(f"cannot read the image {name}: {reason}")
        self.reason = reason


class Budget:
    """Pixels that may be decoded at the same time, over all threads: who wants more waits for the others."""

    def __init__(self, total: int):
        self.total, self.free, self.changed = total, total, threading.Condition()

    @contextmanager
    def taken(self, pixels: int) -> Iterator[None]:
        pixels = min(pixels, self.total)
        with self.changed:
            self.changed.wait_for(lambda: self.free >= pixels)
            self.free -= pixels
        try:
            yield
        finally:
            with self.changed:
                self.free += pixels
                self.changed.notify_all()


BUDGET = Budget(PIXELS_AT_ONCE)


def read_image(path: Path) -> Image.Image:
    """The picture in a file, upright, in RGB; of several frames the first."""
    return with_image(path, lambda picture: picture)


def with_image(path: Path, use: Callable[[Image.Image], T]) -> T:
    """`use` of what `read_picture` returns. Its pixels are taken from the budget until all copies of it are gone."""
    data, reason = read_image_file(path), ""
    width, height = opened(data, str(path)).size
    with BUDGET.taken(width * height):
        try:
            return use(in_rgb(open_image(data, str(path))))
        except InvalidImageError as error:  # which keeps the decoder alive; so another one is raised in its place
            reason = error.reason
        finally:
            if width * height > STRIP:
                give_memory_back()
    raise InvalidImageError(str(path), reason)


def give_memory_back() -> None:
    """What glibc has free goes back to the system. Otherwise each thread keeps as much as it has ever used."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def read_image_file(path: Path) -> bytes:
    try:
        return read_user_file(path, MAX_PICTURE_BYTES)
    except NotRegularError:
        raise InvalidImageError(str(path), "it is a pipe or a device and not a file") from None
    except ValueError:
        raise InvalidImageError(str(path), f"the file has more than {MAX_PICTURE_BYTES:,} bytes") from None


def open_image(data: bytes, name: str, formats: tuple[str, ...] = tuple(FORMATS)) -> Image.Image:
    """A picture, decoded as a whole, upright; whatever is damaged, too large or of another format is refused."""
    image = opened(data, name, formats)
    with decoder_errors(name, formats):
        image.load()
        plain = image._new(image.im)
        orientation = orientation_of(image)
        if image.format == "PNG" and not has_all_rows(data, plain):
            raise InvalidImageError(name, "the file is damaged (it ends before its last row)")
        del image  # WebP's decoder holds on to two canvases and a copy of the picture
        return plain.transpose(TURNED[orientation]) if orientation in TURNED else plain


def opened(data: bytes, name: str, formats: tuple[str, ...] = tuple(FORMATS)) -> ImageFile.ImageFile:
    """The image file with its size checked, not decoded yet."""
    with decoder_errors(name, formats):
        check_size(name, *canvas_of(data))
        if data[:2] == b"\xff\xd8" and data.count(b"\xff\xda") > MAX_JPEG_SCANS:
            raise InvalidImageError(name, f"it has more than {MAX_JPEG_SCANS} scans")
        image = Image.open(io.BytesIO(data), formats=formats)
        check_size(name, *image.size)
    return image


@contextmanager
def decoder_errors(name: str, formats: tuple[str, ...] = tuple(FORMATS)) -> Iterator[None]:
    """Every error of a decoder is an InvalidPictureError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damage that can be read over, and of sizes that are checked here
            yield
    except InvalidImageError:
        raise
    except Image.DecompressionBombError:  # far beyond our limit, and so seen first by Pillow
        raise InvalidImageError(name, f"it has more than {MAX_PICTURE_PIXELS:,} pixels") from None
    except UnidentifiedImageError:  # its message has only an address in memory to tell
        raise InvalidImageError(name, f"the file is not {one_of(formats)}") from None
    except MemoryError:  # no fault of the file
        raise
    except Exception as error:  # damaged files make decoders raise nearly anything
        raise InvalidImageError(name, f"the file is damaged ({error})") from None


def check_size(name: str, width: int, height: int) -> None:
    if width * height > MAX_PICTURE_PIXELS:
        raise InvalidImageError(name, f"it has more than {MAX_PICTURE_PIXELS:,} pixels ({width} x {height})")
    if max(width, height) > MAX_PICTURE_SIDE:
        raise InvalidImageError(
            name, f"its width or height is more than {MAX_PICTURE_SIDE:,} pixels ({width} x {height})"
        )


def canvas_of(data: bytes) -> tuple[int, int]:
    """Width and height that a WebP or a GIF file declares; (0, 0) of other formats and of damaged files.

    These two allocate a canvas when they are opened: WebP for its animation, GIF for a first frame that is disposed of.
    """
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        if data[12:16] == b"VP8X":
            return 1 + little(data[24:27]), 1 + little(data[27:30])
        if data[12:16] == b"VP8L":
            return 1 + (little(data[21:25]) & 0x3FFF), 1 + (little(data[21:25]) >> 14 & 0x3FFF)
        return little(data[26:28]) & 0x3FFF, little(data[28:30]) & 0x3FFF
    if data[:6] in (b"GIF87a", b"GIF89a") and len(data) >= 13:
        return gif_canvas(data)
    return 0, 0


def little(data: bytes) -> int:
    return int.from_bytes(data, "little")


def gif_canvas(data: bytes) -> tuple[int, int]:
    """The logical screen, enlarged to where the first frame ends, as decoders do it."""
    width, height = struct.unpack("<HH", data[6:10])
    at = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
    while data[at : at + 1] == b"!":  # extensions: a byte for the kind, then blocks that begin with their length
        at += 2
        while at < len(data) and data[at]:
            at += 1 + data[at]
        at += 1
    if data[at : at + 1] == b"," and len(data) >= at + 9:
        left, top, columns, rows = struct.unpack("<4H", data[at + 1 : at + 9])
        return max(width, left + columns), max(height, top + rows)
    return width, height


def has_all_rows(data: bytes, image: Image.Image) -> bool:
    """Pillow accepts a PNG whose compressed data ends early, and leaves the rows that are missing at zero.

    Only where the last row is zero, or the rows do not come in order, does the data have to be counted.
    """
    if not data[28] and any(image.crop((0, image.height - 1, *image.size)).tobytes()):
        return True
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    bits = depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[kind]
    passes = ADAM7 if data[28] else ((0, 0, 1, 1),)
    expected = 0
    for left, top, right, down in passes:
        columns, rows = -(-(width - left) // right), -(-(height - top) // down)
        expected += rows * (1 + -(-columns * bits // 8)) if columns > 0 and rows > 0 else 0
    return unpacked_length(data, expected) >= expected


def unpacked_length(data: bytes, enough: int) -> int:
    """How many bytes the IDAT chunks of a PNG unpack to; counted up to `enough`."""
    unpack, length, at = zlib.decompressobj(), 0, 8
    while at + 8 <= len(data) and length < enough:
        size, name = struct.unpack(">I4s", data[at : at + 8])
        rest = data[at + 8 : at + 8 + size] if name == b"IDAT" else b""
        while rest and length < enough and not unpack.eof:
            length += len(unpack.decompress(rest, STRIP))
            rest = unpack.unconsumed_tail
        at += 12 + size
    return length


def one_of(formats: tuple[str, ...]) -> str:
    return " or ".join(filter(None, [", ".join(formats[:-1]), formats[-1]]))


def orientation_of(image: Image.Image) -> object:
    try:
        return image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # the note about its direction is damaged; the picture is not
        return None


def in_rgb(image: Image.Image) -> Image.Image:
    """On white where it is transparent; strip by strip, for copies of all of it would be large."""
    found = Image.new("RGB", image.size)
    rows = max(1, STRIP // max(1, image.width))
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        found.paste(strip_in_rgb(strip), (0, top))
    return found


def strip_in_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits of grey
        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")


def resize(image: Image.Image, size: int, fit: Fit, channels: int = 3) -> Tensor:
    """uint8 (channels,size,size), with 3 channels, or 1 for grey. `fit` decides how a picture becomes a square: pad it,
    crop the largest square in its middle, or stretch it. All three give the same result for a square image."""
    image = image if image.mode == "RGB" else image.convert("RGB")
    if fit == "pad":
        square = padded(image, size)
    elif fit == "crop":
        square = ImageOps.fit(image, (size, size), method=Image.Resampling.BICUBIC)
    else:
        square = image.resize((size, size), Image.Resampling.BICUBIC)
    pixels = np.array(square.convert({1: "L", 3: "RGB"}[channels]))
    return torch.from_numpy(pixels.reshape(size, size, channels).transpose(2, 0, 1).copy())


def padded(image: Image.Image, size: int) -> Image.Image:
    """The whole picture in the middle of a square, its longer side `size` pixels long."""
    scale = size / max(image.size)
    width, height = (max(1, round(side * scale)) for side in image.size)
    inner = image.resize((width, height), Image.Resampling.BICUBIC)
    square = Image.new("RGB", (size, size), background_of(inner))
    square.paste(inner, ((size - width) // 2, (size - height) // 2))
    return square


def background_of(image: Image.Image) -> tuple[int, ...]:
    """The median colour of the picture's outer frame, with which it is padded.

    A fixed colour suits one kind of picture only: black bars beside a drawing on white, or white bars beside a
    photograph, are the strongest edges in the image, and they tell its aspect ratio instead of what it shows. The
    frame's median continues a uniform background exactly (white paper stays white, a black scan black), also where
    strokes touch the border, and beside a photograph it is a neutral tone of its own surroundings.
    """
    pixels = np.asarray(image)
    depth = max(1, min(image.size) // FRAME)
    is_inner = np.zeros(pixels.shape[:2], bool)
    is_inner[depth:-depth, depth:-depth] = True
    return tuple(int(value) for value in np.median(pixels[~is_inner], axis=0))
