"""`mnist`: 60,000 + 10,000 handwritten digits of 28 x 28 pixels, embedded in the package.

By Yann LeCun, Corinna Cortes and Christopher J.C. Burges; CC BY-SA 3.0: files/mnist/LICENCE.txt.
"""

import gzip
import io
import math
import struct
import zlib
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from clearhead.data.cache import CachedDataset, Files, pick, read
from clearhead.data.dataset import Dataset, Images, Normalize, train_val_split
from clearhead.data.datasets import DataConfig
from clearhead.data.sources import HttpSource, LocalSource
from clearhead.files import most_unpacked, sha256

CLASSES = tuple("0123456789")
NORMALIZE = Normalize(mean=(0.1307,), std=(0.3081,))
MOST = 50_000_000
DIGESTS = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


def load_mnist(config: DataConfig, seed: int) -> Dataset:
    train, validation = train_val_split(digits("train"), config.validation, config.limit, seed)
    return Dataset(train, validation, digits("t10k"), CLASSES, NORMALIZE)


@cache
def digits(part: str) -> Images:
    """All images of a part, "train" or "t10k"; decoded once for each process."""
    return images_and_labels(embedded(f"{part}-images-idx3-ubyte"), embedded(f"{part}-labels-idx1-ubyte"), len(CLASSES))


def embedded(name: str) -> bytes:
    packed = files("clearhead.data").joinpath("files", "mnist", f"{name}.gz").read_bytes()
    data = gunzip(packed, name, MOST)
    if sha256(data) != DIGESTS[name]:
        raise ValueError(f"{name} must be as its makers published it, got other bytes; install clearhead again")
    return data


# `fashion-mnist`: Fashion-MNIST, 60,000 + 10,000 pictures of clothes of 28 x 28 pixels, by Zalando Research (MIT).


FASHION_CLASSES = (
    "T-shirt",
    "trousers",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
FASHION_NORMALIZE = Normalize(mean=(0.2860,), std=(0.3530,))
FASHION_MOST = 50_000_000
FASHION_DIGESTS = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
SITES = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
)


def decode(files: Files) -> Files:
    """The four idx files, unpacked where they are gzipped."""
    plain = {name.removesuffix(".gz"): gunzip(data, name, FASHION_MOST) for name, data in files.items()}
    return pick(plain, list(FASHION_DIGESTS))


CACHED = CachedDataset(
    name="fashion-mnist",
    digests=FASHION_DIGESTS,
    wanted=frozenset([*FASHION_DIGESTS, *(f"{name}.gz" for name in FASHION_DIGESTS)]),
    decode=decode,
    sources=(
        LocalSource(Path("/usr/share/datasets/fashion-mnist"), origin="from the Debian package dataset-fashion-mnist"),
        *(HttpSource(tuple(f"{site}/{name}.gz" for name in FASHION_DIGESTS), most=FASHION_MOST) for site in SITES),
    ),
)


def load_fashion_mnist(config: DataConfig, seed: int) -> Dataset:
    train, validation = train_val_split(pictures("train"), config.validation, config.limit, seed)
    return Dataset(train, validation, pictures("t10k"), FASHION_CLASSES, FASHION_NORMALIZE)


def pictures(part: str) -> Images:
    images, labels = (read(CACHED, f"{part}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
    return images_and_labels(images, labels, len(FASHION_CLASSES))


# The idx format of MNIST: 0, 0, the kind of number, how many dimensions, each one's size, and then the numbers.
#
# Sizes are 4 bytes each, the largest part first; only single bytes (kind 8) are read.


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
    """The bytes themselves, or unpacked where they are gzipped; more than `most`, or than MAX_RATIO times as many as
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


def images_and_labels(images: bytes, labels: bytes, num_classes: int) -> Images:
    """(N,1,H,W) and (N,), from a file of images (N,H,W) and a file of their labels (N,)."""
    pixels, numbers = parse(images, "the images"), parse(labels, "the labels")
    if pixels.dim() != 3 or numbers.dim() != 1 or len(pixels) != len(numbers):
        raise ValueError(
            "images must be (N,H,W) with a label (N,) for each, got shapes "
            f"{tuple(pixels.shape)} and {tuple(numbers.shape)}; use files that belong together"
        )
    if len(numbers) and numbers.max() >= num_classes:
        raise ValueError(f"labels must be below {num_classes}, got {int(numbers.max())}; get the file again")
    return Images(pixels[:, None], numbers.long())
