"""Decode image files to tensors. Training and prediction use the same two functions, `read_image` and `resize`.

The size that a file declares is checked against the limits before anything is decoded, because 34 bytes of WebP can
declare 268 million pixels. All threads together decode at most MAX_DECODING_PIXELS. Memory use in bytes per pixel:

    decoding            4 for PNG, BMP and GIF, up to 12 for progressive JPEG, 16 for WebP
    EXIF orientation    8 (applied before the conversion to RGB)
    conversion to RGB   8 in any mode, because it is done strip by strip
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

from clearhead.data import Fit
from clearhead.data.user_files import (
    MAX_DECODING_PIXELS,
    MAX_IMAGE_BYTES,
    MAX_IMAGE_PIXELS,
    MAX_IMAGE_SIDE,
    MAX_JPEG_SCANS,
    NotRegularError,
    read_user_file,
)

T = TypeVar("T")
FORMATS = {"PNG": (".png",), "JPEG": (".jpg", ".jpeg"), "WEBP": (".webp",), "GIF": (".gif",), "BMP": (".bmp",)}
SUFFIXES = tuple(suffix for suffixes in FORMATS.values() for suffix in suffixes)
BORDER_FRACTION = 8
"""the background color is estimated from a border as wide as the shorter side divided by this"""
STRIP_PIXELS = 1 << 18
"""pixels that are converted to RGB at a time"""
TRANSPOSE_BY_ORIENTATION = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""the operation that makes an image upright, by its EXIF orientation"""
ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""the seven passes of an interlaced PNG: first column, first row, column step, row step"""


class InvalidImageError(ValueError):
    """An image file that cannot be decoded. `reason` does not contain the file name."""

    def __init__(self, name: str, reason: str):
        super().__init__(f"cannot read the image {name}: {reason}")
        self.reason = reason


class Budget:
    """Limits the pixels that all threads decode at the same time. A thread waits until its pixels are available."""

    def __init__(self, total: int):
        self.total, self.free, self.changed = total, total, threading.Condition()

    @contextmanager
    def reserve(self, pixels: int) -> Iterator[None]:
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


BUDGET = Budget(MAX_DECODING_PIXELS)


def read_image(path: Path) -> Image.Image:
    """The image in a file, upright and in RGB. For an animation, this is the first frame."""
    return with_image(path, lambda image: image)


def with_image(path: Path, use: Callable[[Image.Image], T]) -> T:
    """Calls `use` with the image of `read_image`. Its pixels are reserved in the budget until `use` returns."""
    data, reason = read_image_file(path), ""
    width, height = open_unloaded(data, str(path)).size
    with BUDGET.reserve(width * height):
        try:
            return use(to_rgb(open_image(data, str(path))))
        except InvalidImageError as error:  # it keeps the decoder alive, so a new error is raised below
            reason = error.reason
        finally:
            if width * height > STRIP_PIXELS:
                release_free_memory()
    raise InvalidImageError(str(path), reason)


def release_free_memory() -> None:
    """Returns glibc's free memory to the system. Otherwise each thread's arena stays at its peak size."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def read_image_file(path: Path) -> bytes:
    try:
        return read_user_file(path, MAX_IMAGE_BYTES)
    except NotRegularError:
        raise InvalidImageError(str(path), "it is a pipe or a device and not a file") from None
    except ValueError:
        raise InvalidImageError(str(path), f"the file has more than {MAX_IMAGE_BYTES:,} bytes") from None


def open_image(data: bytes, name: str, formats: tuple[str, ...] = tuple(FORMATS)) -> Image.Image:
    """The decoded image, upright. Raises InvalidImageError if it is damaged, too large or of another format."""
    image = open_unloaded(data, name, formats)
    with decoder_errors(name, formats):
        image.load()
        decoded = image._new(image.im)
        orientation = read_orientation(image)
        if image.format == "PNG" and not has_all_rows(data, decoded):
            raise InvalidImageError(name, "the file is damaged (it ends before its last row)")
        del image  # WebP's decoder holds two canvases and a copy of the image
        if orientation in TRANSPOSE_BY_ORIENTATION:
            return decoded.transpose(TRANSPOSE_BY_ORIENTATION[orientation])
        return decoded


def open_unloaded(data: bytes, name: str, formats: tuple[str, ...] = tuple(FORMATS)) -> ImageFile.ImageFile:
    """Opens the image and checks its size without decoding it."""
    with decoder_errors(name, formats):
        check_size(name, *read_canvas_size(data))
        if data[:2] == b"\xff\xd8" and data.count(b"\xff\xda") > MAX_JPEG_SCANS:
            raise InvalidImageError(name, f"it has more than {MAX_JPEG_SCANS} scans")
        image = Image.open(io.BytesIO(data), formats=formats)
        check_size(name, *image.size)
    return image


@contextmanager
def decoder_errors(name: str, formats: tuple[str, ...] = tuple(FORMATS)) -> Iterator[None]:
    """Turns every error of a decoder into an InvalidImageError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ignores tolerable damage; sizes are checked separately
            yield
    except InvalidImageError:
        raise
    except Image.DecompressionBombError:  # Pillow checks its own, higher limit first
        raise InvalidImageError(name, f"it has more than {MAX_IMAGE_PIXELS:,} pixels") from None
    except UnidentifiedImageError:  # its message contains only the address of the buffer
        raise InvalidImageError(name, f"the file is not {join_names(formats)}") from None
    except MemoryError:  # not an error of the file
        raise
    except Exception as error:  # decoders raise almost any exception on damaged files
        raise InvalidImageError(name, f"the file is damaged ({error})") from None


def check_size(name: str, width: int, height: int) -> None:
    if width * height > MAX_IMAGE_PIXELS:
        raise InvalidImageError(name, f"it has more than {MAX_IMAGE_PIXELS:,} pixels ({width} x {height})")
    if max(width, height) > MAX_IMAGE_SIDE:
        raise InvalidImageError(
            name, f"its width or height is more than {MAX_IMAGE_SIDE:,} pixels ({width} x {height})"
        )


def read_canvas_size(data: bytes) -> tuple[int, int]:
    """Width and height that a WebP or a GIF file declares; (0, 0) for other formats and for damaged files.

    Opening either format allocates a canvas: WebP for its animation, GIF for the disposal of its first frame.
    """
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        if data[12:16] == b"VP8X":
            return 1 + little_endian(data[24:27]), 1 + little_endian(data[27:30])
        if data[12:16] == b"VP8L":
            return 1 + (little_endian(data[21:25]) & 0x3FFF), 1 + (little_endian(data[21:25]) >> 14 & 0x3FFF)
        return little_endian(data[26:28]) & 0x3FFF, little_endian(data[28:30]) & 0x3FFF
    if data[:6] in (b"GIF87a", b"GIF89a") and len(data) >= 13:
        return gif_canvas(data)
    return 0, 0


def little_endian(data: bytes) -> int:
    return int.from_bytes(data, "little")


def gif_canvas(data: bytes) -> tuple[int, int]:
    """The size of the logical screen, extended to include the first frame, as decoders do."""
    width, height = struct.unpack("<HH", data[6:10])
    offset = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
    while data[offset : offset + 1] == b"!":  # an extension: a type byte, then blocks with a length prefix
        offset += 2
        while offset < len(data) and data[offset]:
            offset += 1 + data[offset]
        offset += 1
    if data[offset : offset + 1] == b"," and len(data) >= offset + 9:
        left, top, columns, rows = struct.unpack("<4H", data[offset + 1 : offset + 9])
        return max(width, left + columns), max(height, top + rows)
    return width, height


def has_all_rows(data: bytes, image: Image.Image) -> bool:
    """Whether a PNG file is complete. Pillow accepts truncated data and leaves the missing rows at zero.

    The data is decompressed and counted only if the last row is zero or the image is interlaced.
    """
    if not data[28] and any(image.crop((0, image.height - 1, *image.size)).tobytes()):
        return True
    width, height, bit_depth, color_type = struct.unpack(">IIBB", data[16:26])
    bits_per_pixel = bit_depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[color_type]
    passes = ADAM7 if data[28] else ((0, 0, 1, 1),)
    expected = 0
    for left, top, column_step, row_step in passes:
        columns, rows = -(-(width - left) // column_step), -(-(height - top) // row_step)
        expected += rows * (1 + -(-columns * bits_per_pixel // 8)) if columns > 0 and rows > 0 else 0
    return decompressed_length(data, expected) >= expected


def decompressed_length(data: bytes, limit: int) -> int:
    """The decompressed length of a PNG's IDAT chunks. Stops once `limit` bytes are reached."""
    decompressor, length, offset = zlib.decompressobj(), 0, 8
    while offset + 8 <= len(data) and length < limit:
        size, chunk_type = struct.unpack(">I4s", data[offset : offset + 8])
        remaining = data[offset + 8 : offset + 8 + size] if chunk_type == b"IDAT" else b""
        while remaining and length < limit and not decompressor.eof:
            length += len(decompressor.decompress(remaining, STRIP_PIXELS))
            remaining = decompressor.unconsumed_tail
        offset += 12 + size
    return length


def join_names(formats: tuple[str, ...]) -> str:
    return " or ".join(filter(None, [", ".join(formats[:-1]), formats[-1]]))


def read_orientation(image: Image.Image) -> object:
    try:
        return image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # damaged EXIF data does not make the image invalid
        return None


def to_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB, with transparency on white. Converted strip by strip to avoid large copies."""
    rgb = Image.new("RGB", image.size)
    rows = max(1, STRIP_PIXELS // max(1, image.width))
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        rgb.paste(strip_to_rgb(strip), (0, top))
    return rgb


def strip_to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grayscale
        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")


def resize(image: Image.Image, size: int, fit: Fit, channels: int = 3) -> Tensor:
    """uint8 (channels,size,size) with 3 channels (RGB) or 1 (grayscale).

    `fit` decides how the image becomes a square: "pad" pads it, "crop" crops the largest centered square, and "stretch"
    stretches it. For a square image, all three give the same result.
    """
    image = image if image.mode == "RGB" else image.convert("RGB")
    if fit == "pad":
        square = pad_to_square(image, size)
    elif fit == "crop":
        square = ImageOps.fit(image, (size, size), method=Image.Resampling.BICUBIC)
    else:
        square = image.resize((size, size), Image.Resampling.BICUBIC)
    pixels = np.array(square.convert({1: "L", 3: "RGB"}[channels]))
    return torch.from_numpy(pixels.reshape(size, size, channels).transpose(2, 0, 1).copy())


def pad_to_square(image: Image.Image, size: int) -> Image.Image:
    """The image scaled so that its longer side has `size` pixels, centered on its background color."""
    scale = size / max(image.size)
    width, height = (max(1, round(side * scale)) for side in image.size)
    scaled = image.resize((width, height), Image.Resampling.BICUBIC)
    square = Image.new("RGB", (size, size), background_color(scaled))
    square.paste(scaled, ((size - width) // 2, (size - height) // 2))
    return square


def background_color(image: Image.Image) -> tuple[int, ...]:
    """The median color of the image's border, which is used for padding.

    A fixed color suits only one kind of image: black bars next to a drawing on white paper, or white bars next to a
    photograph, are the strongest edges in the image, and they encode its aspect ratio instead of its content. The
    median continues a uniform background exactly (white paper stays white, a black scan stays black), even where
    strokes touch the border, and next to a photograph it is a neutral tone of the same scene.
    """
    pixels = np.asarray(image)
    border = max(1, min(image.size) // BORDER_FRACTION)
    is_inner = np.zeros(pixels.shape[:2], bool)
    is_inner[border:-border, border:-border] = True
    return tuple(int(value) for value in np.median(pixels[~is_inner], axis=0))
