"""The idx format of MNIST: 0, 0, the kind of number, how many dimensions, each one's size, and then the numbers.

Sizes are 4 bytes each, the largest part first; only single bytes (kind 8) are read.
"""

import gzip
import io
import math
import struct
import zlib

import numpy as np
import torch
from torch import Tensor

from clearhead.data.dataset import Images
from clearhead.data.limits import most_unpacked

BYTES = 8
GZIP = b"\x1f\x8b"


def parse(data: bytes, name: str) -> Tensor:
    """uint8, in the shape that the file says. Whatever is not exactly such a file is refused."""
    if len(data) < 4 or data[:2] != b"\0\0":
        raise ValueError(f"an idx file starts with two zero bytes, got {data[:4]!r} in {name}; get the file again")
    kind, dims = data[2], data[3]
    if kind != BYTES or not 1 <= dims <= 4:
        raise ValueError(
            f"an idx file of images or labels has bytes (kind {BYTES}) in 1 to 4 dimensions, "
            f"got kind {kind} in {dims} dimensions in {name}; get the file again"
        )
    start = 4 + 4 * dims
    if len(data) < start:
        raise ValueError(f"an idx file of {dims} dimensions has a head of {start} bytes, got {len(data)} in {name}")
    shape = struct.unpack(f">{dims}I", data[4:start])
    if len(data) - start != math.prod(shape):
        raise ValueError(
            f"an idx file of shape {shape} has {math.prod(shape)} bytes after its head, got {len(data) - start} "
            f"in {name}; it is cut short or damaged: get it again"
        )
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy())


def gunzip(data: bytes, name: str, most: int) -> bytes:
    """The bytes themselves, or unpacked where they are gzipped; more than `most`, or than MOST_RATIO times as many as
    are packed, are refused while they are read."""
    if not data.startswith(GZIP):
        return data
    most = most_unpacked(len(data), most)
    try:
        unpacked = gzip.GzipFile(fileobj=io.BytesIO(data)).read(most + 1)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise ValueError(f"{name} must be a whole gzip file, got a damaged one ({error}); get it again") from None
    if len(unpacked) > most:
        raise ValueError(f"{name} must unpack to at most {most} bytes, got more; get it from another source")
    return unpacked


def images_and_labels(images: bytes, labels: bytes, n_classes: int) -> Images:
    """(N,1,H,W) and (N,), from a file of images (N,H,W) and a file of their labels (N,)."""
    pixels, numbers = parse(images, "the images"), parse(labels, "the labels")
    if pixels.dim() != 3 or numbers.dim() != 1 or len(pixels) != len(numbers):
        raise ValueError(
            "images must be (N,H,W) with a label (N,) for each, got shapes "
            f"{tuple(pixels.shape)} and {tuple(numbers.shape)}; use files that belong together"
        )
    if len(numbers) and numbers.max() >= n_classes:
        raise ValueError(f"labels must be below {n_classes}, got {int(numbers.max())}; get the file again")
    return Images(pixels[:, None], numbers.long())
