"""`mnist` and `fashion-mnist`: 60,000 + 10,000 gray images of 28 x 28 pixels, in the idx format; and `odd-one-out`.

MNIST, handwritten digits by Yann LeCun, Corinna Cortes and Christopher J.C. Burges, is embedded in the package
(CC BY-SA 3.0, files/mnist/LICENCE.txt). Fashion-MNIST, clothes by Zalando Research (MIT), is downloaded.

An idx file has two zero bytes, the data type, the number of dimensions, the size of each dimension as a big-endian
32-bit integer, and then the values. Only unsigned bytes (data type 8) are read.

`odd-one-out` has sets of MNIST images of one class and one image of another class; the target is its position.
Dims: B sets, S images in a set.
"""

import gzip
import io
import math
import struct
import zlib
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from clearhead.data.dataset import Dataset, Images, Normalize, train_val_split
from clearhead.data.downloads import CachedDataset, Files, HttpSource, LocalSource, pick, read
from clearhead.data.prng import fold_in, permutation, random_below
from clearhead.files import max_unpacked_bytes, sha256

UNSIGNED_BYTE = 8
GZIP_MAGIC = b"\x1f\x8b"
MAX_BYTES = 50_000_000
"""limit on the size of an unpacked file"""

CLASSES = tuple("0123456789")
NORMALIZE = Normalize(mean=(0.1307,), std=(0.3081,))
DIGESTS = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


def load_mnist(validation: int, limit: int, seed: int) -> Dataset:
    train, held_out = train_val_split(load_images("train"), validation, limit, seed)
    return Dataset(train, held_out, load_images("t10k"), CLASSES, NORMALIZE)


@cache
def load_images(split: str) -> Images:
    """All MNIST images of a split, "train" or "t10k"; decoded once per process."""
    images, labels = (read_embedded(f"{split}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
    return images_and_labels(images, labels, len(CLASSES))


def read_embedded(name: str) -> bytes:
    """An idx file of the embedded MNIST."""
    compressed = files("clearhead.data").joinpath("files", "mnist", f"{name}.gz").read_bytes()
    data = gunzip(compressed, name, MAX_BYTES)
    if sha256(data) != DIGESTS[name]:
        raise ValueError(f"{name} does not match its SHA-256 digest; reinstall clearhead")
    return data


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
    """The four idx files of Fashion-MNIST, unpacked if they are gzipped."""
    unpacked = {name.removesuffix(".gz"): gunzip(data, name, MAX_BYTES) for name, data in files.items()}
    return pick(unpacked, list(FASHION_DIGESTS))


CACHED = CachedDataset(
    name="fashion-mnist",
    digests=FASHION_DIGESTS,
    wanted=frozenset([*FASHION_DIGESTS, *(f"{name}.gz" for name in FASHION_DIGESTS)]),
    decode=decode,
    sources=(
        LocalSource(Path("/usr/share/datasets/fashion-mnist"), origin="from the Debian package dataset-fashion-mnist"),
        *(HttpSource(tuple(f"{site}/{name}.gz" for name in FASHION_DIGESTS), max_bytes=MAX_BYTES) for site in SITES),
    ),
)


def load_fashion_mnist(validation: int, limit: int, seed: int) -> Dataset:
    train, held_out = train_val_split(load_fashion_images("train"), validation, limit, seed)
    return Dataset(train, held_out, load_fashion_images("t10k"), FASHION_CLASSES, FASHION_NORMALIZE)


def load_fashion_images(split: str) -> Images:
    """All Fashion-MNIST images of a split, "train" or "t10k"."""
    images, labels = (read(CACHED, f"{split}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
    return images_and_labels(images, labels, len(FASHION_CLASSES))


def parse(data: bytes, name: str) -> Tensor:
    """The values of an idx file, uint8 in the shape given by its header. Malformed files are rejected."""
    if len(data) < 4 or data[:2] != b"\0\0":
        raise ValueError(f"an idx file must start with two zero bytes, got {data[:4]!r} in {name}")
    kind, dims = data[2], data[3]
    if kind != UNSIGNED_BYTE or not 1 <= dims <= 4:
        raise ValueError(
            f"an idx file must have data type {UNSIGNED_BYTE} (unsigned byte) and 1 to 4 dimensions, "
            f"got data type {kind} and {dims} dimensions in {name}"
        )
    start = 4 + 4 * dims
    if len(data) < start:
        raise ValueError(
            f"the header of an idx file with {dims} dimensions has {start} bytes, got {len(data)} in {name}"
        )
    shape = struct.unpack(f">{dims}I", data[4:start])
    if len(data) - start != math.prod(shape):
        raise ValueError(
            f"an idx file of shape {shape} has {math.prod(shape)} bytes after its header, got {len(data) - start} "
            f"in {name}: the file is truncated or corrupted"
        )
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy())


def gunzip(data: bytes, name: str, max_bytes: int) -> bytes:
    """The data, decompressed if it is gzipped.

    Decompression stops with an error beyond `max_bytes` bytes or MAX_RATIO times the compressed size.
    """
    if not data.startswith(GZIP_MAGIC):
        return data
    max_bytes = max_unpacked_bytes(len(data), max_bytes)
    try:
        unpacked = gzip.GzipFile(fileobj=io.BytesIO(data)).read(max_bytes + 1)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise ValueError(f"{name} is not a valid gzip file: {error}") from None
    if len(unpacked) > max_bytes:
        raise ValueError(f"{name} must unpack to at most {max_bytes} bytes, got more")
    return unpacked


def images_and_labels(images: bytes, labels: bytes, num_classes: int) -> Images:
    """Images (N,1,H,W) and labels (N,), from an idx file of images (N,H,W) and one of labels (N,)."""
    pixels, targets = parse(images, "the images"), parse(labels, "the labels")
    if pixels.dim() != 3 or targets.dim() != 1 or len(pixels) != len(targets):
        raise ValueError(
            "images must have shape (N,H,W) and labels (N,), got shapes "
            f"{tuple(pixels.shape)} and {tuple(targets.shape)}"
        )
    if len(targets) and targets.max() >= num_classes:
        raise ValueError(f"labels must be below {num_classes}, got {int(targets.max())}")
    return Images(pixels[:, None], targets.long())


N_TRAIN, N_TEST = 50_000, 10_000
N_HELD_OUT = 5_000
"""MNIST training images that are reserved for the validation sets"""


@dataclass(frozen=True, eq=False)
class OddSets:
    """Set i of the stream `key`: float (B,S,784) -> the position of the odd image (B,).

    Images are drawn with replacement from those at the indices `pool`.
    """

    n: int
    set_size: int
    key: int
    images: Images
    pool: Tensor

    def __len__(self) -> int:
        return self.n

    @cached_property
    def by_class(self) -> tuple[Tensor, Tensor, Tensor]:
        """Image indices sorted by class, and the start and the size of each class."""
        labels = self.images.labels[self.pool]
        counts = torch.bincount(labels, minlength=len(CLASSES))
        return self.pool[labels.argsort(stable=True)], counts.cumsum(0) - counts, counts

    def members(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Image indices of each set (B,S) and the position of the odd image (B,)."""
        num_classes = len(CLASSES)
        common = random_below(num_classes, fold_in(self.key, "common"), indices)
        odd = (common + 1 + random_below(num_classes - 1, fold_in(self.key, "odd"), indices)) % num_classes
        position = random_below(self.set_size, fold_in(self.key, "place"), indices)
        slots = torch.arange(self.set_size)
        classes = torch.where(slots == position[:, None], odd[:, None], common[:, None])
        ordered, starts, counts = self.by_class
        offsets = random_below(counts[classes], fold_in(self.key, "image"), indices[:, None] * self.set_size + slots)
        return ordered[starts[classes] + offsets], position

    def get_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        members, position = self.members(indices)
        pixels = self.images.images[members.flatten()]
        return NORMALIZE(pixels).view(*members.shape, -1), position


def load_odd_one_out(set_size: int, validation: int, limit: int, seed: int) -> Dataset:
    train_images, test_images = load_images("train"), load_images("t10k")
    shuffled = permutation(fold_in(seed, "set apart"), len(train_images))

    def sets(split: str, n: int, images: Images, pool: Tensor) -> OddSets:
        return OddSets(n, set_size, fold_in(seed, "oddity", split), images, pool)

    return Dataset(
        train=sets("train", limit or N_TRAIN, train_images, shuffled[N_HELD_OUT:]),
        validation=sets("validation", validation, train_images, shuffled[:N_HELD_OUT]),
        test=sets("test", N_TEST, test_images, torch.arange(len(test_images))),
        classes=(),
        normalize=None,
    )
