"""A picture file becomes a tensor. Training and prediction use the same two functions: `read_picture` and `resize`."""

import io
import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from clearhead.data.config import Fit

FORMATS = {"PNG": (".png",), "JPEG": (".jpg", ".jpeg"), "WEBP": (".webp",), "GIF": (".gif",), "BMP": (".bmp",)}
SUFFIXES = tuple(suffix for suffixes in FORMATS.values() for suffix in suffixes)
MOST_PIXELS = 50_000_000
MOST_BYTES = 200_000_000
FRAME = 8
"""an eighth of the shorter side, along the border, is what a picture's background is taken from"""


class InvalidPictureError(ValueError):
    """A file that cannot be decoded to a picture. `reason` says why, without the file's name."""

    def __init__(self, name: str, reason: str):
        super().__init__(f"cannot read the image {name}: {reason}")
        self.reason = reason


def read_picture(path: Path) -> Image.Image:
    """The picture in a file, upright, in RGB; of several frames the first."""
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)  # no more, however long: /dev/zero has no end, and says that it is empty
    if len(data) > MOST_BYTES:
        raise InvalidPictureError(str(path), f"the file has more than {MOST_BYTES:,} bytes")
    return in_rgb(open_picture(data, str(path)))


def open_picture(data: bytes, name: str, formats: tuple[str, ...] = tuple(FORMATS)) -> Image.Image:
    """A picture, decoded as a whole; whatever is damaged, too large or of another format is refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damage that can be read over, and of sizes that are checked here
            image = Image.open(io.BytesIO(data), formats=formats)
            if image.width * image.height <= MOST_PIXELS:
                image.load()
    except Image.DecompressionBombError:  # far beyond our limit, and so seen first by Pillow
        raise InvalidPictureError(name, f"it has more than {MOST_PIXELS:,} pixels") from None
    except UnidentifiedImageError:  # its message has only an address in memory to tell
        raise InvalidPictureError(name, f"the file is not {one_of(formats)}") from None
    except MemoryError:  # no fault of the file
        raise
    except Exception as error:  # damaged files make decoders raise nearly anything
        raise InvalidPictureError(name, f"the file is damaged ({error})") from None
    if image.width * image.height > MOST_PIXELS:
        size = f"{image.width} x {image.height}"
        raise InvalidPictureError(name, f"it has more than {MOST_PIXELS:,} pixels ({size})")
    return image


def one_of(formats: tuple[str, ...]) -> str:
    return " or ".join(filter(None, [", ".join(formats[:-1]), formats[-1]]))


def in_rgb(image: Image.Image) -> Image.Image:
    """Turned as its camera says, on white where it is transparent."""
    upright = turned(image)
    if upright.mode.startswith("I"):  # 16 bits of grey
        upright = Image.fromarray((np.asarray(upright).clip(0, 65535) // 257).astype(np.uint8))
    if upright.has_transparency_data:
        white = Image.new("RGBA", upright.size, "white")
        upright = Image.alpha_composite(white, upright.convert("RGBA"))
    return upright.convert("RGB")


def turned(image: Image.Image) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ImageOps.exif_transpose(image)
    except Exception:  # the note about its direction is damaged; the picture is not
        return image


def resize(image: Image.Image, size: int, fit: Fit, channels: int = 3) -> Tensor:
    """uint8 (channels,size,size), with 3 channels, or 1 for grey. `fit` decides how a picture becomes a square: pad it,
    crop the largest square in its middle, or stretch it. All three give the same result for a square image."""
    image = image.convert("RGB")
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
