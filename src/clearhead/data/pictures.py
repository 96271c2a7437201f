"""A picture file becomes a tensor. Training and prediction use the same two functions: `read_picture` and `resize`."""

import io
import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

FORMATS = {"PNG": (".png",), "JPEG": (".jpg", ".jpeg"), "WEBP": (".webp",), "GIF": (".gif",), "BMP": (".bmp",)}
SUFFIXES = tuple(suffix for suffixes in FORMATS.values() for suffix in suffixes)
MOST_PIXELS = 50_000_000
MOST_BYTES = 200_000_000


def read_picture(path: Path) -> Image.Image:
    """The picture in a file, upright, in RGB; of several frames the first."""
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)  # no more, however long: /dev/zero has no end, and says that it is empty
    if len(data) > MOST_BYTES:
        raise ValueError(f"a picture may have {MOST_BYTES} bytes, got more in {path}; make it smaller")
    return in_rgb(open_picture(data, str(path)))


def open_picture(data: bytes, name: str, formats: tuple[str, ...] = tuple(FORMATS)) -> Image.Image:
    """A picture, decoded as a whole; whatever is damaged, too large or of another format is refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damage that can be read over, and of sizes that are checked here
            image = Image.open(io.BytesIO(data), formats=formats)
            if image.width * image.height <= MOST_PIXELS:
                image.load()
    except Image.DecompressionBombError as error:  # far beyond ours, and so seen first by Pillow
        raise ValueError(
            f"a picture may have {MOST_PIXELS} pixels, got more in {name} ({error}); make it smaller"
        ) from None
    except UnidentifiedImageError:  # its message has only an address in memory to tell
        raise ValueError(
            f"{name} must be a whole picture ({', '.join(formats)}), got something else; repair or remove it"
        ) from None
    except Exception as error:  # damaged files make decoders raise nearly anything
        raise ValueError(
            f"{name} must be a whole picture ({', '.join(formats)}), got a damaged one ({error}); repair or remove it"
        ) from None
    if image.width * image.height > MOST_PIXELS:
        raise ValueError(
            f"a picture may have {MOST_PIXELS} pixels, got {image.width} x {image.height} in {name}; make it smaller"
        )
    return image


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


def resize(image: Image.Image, size: int, channels: int = 3) -> Tensor:
    """uint8 (channels,size,size): the largest square in the middle, shrunk or enlarged; 3 channels, or 1 for grey."""
    square = ImageOps.fit(image.convert("RGB"), (size, size), method=Image.Resampling.BICUBIC)
    pixels = np.array(square.convert({1: "L", 3: "RGB"}[channels]))
    return torch.from_numpy(pixels.reshape(size, size, channels).transpose(2, 0, 1).copy())
