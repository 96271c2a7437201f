import io
import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from clearhead.data import image_datasets
from clearhead.files import sha256
from clearhead.tasks.images import Cifar10

NAMES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
PER_FILE = 4


def random_records(seed):
    random = np.random.default_rng(seed)
    records = random.integers(0, 256, (PER_FILE, image_datasets.RECORD_BYTES), dtype=np.uint8)
    records[:, 0] = random.integers(0, 10, PER_FILE)
    return records.tobytes()


BINARIES = {f"{name}.bin": random_records(i) for i, name in enumerate(NAMES)}


def as_png(data):
    """One image in each row, in height-width-channel order."""
    records = np.frombuffer(data, np.uint8).reshape(-1, image_datasets.RECORD_BYTES)
    pixels = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).reshape(-1, 1024, 3)
    packed = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(packed, "PNG")
    return packed.getvalue()


def png_files():
    labels = {name: [data[i * image_datasets.RECORD_BYTES] for i in range(PER_FILE)] for name, data in BINARIES.items()}
    train = [label for name in NAMES[:5] for label in labels[f"{name}.bin"]]
    return {
        **{f"{name}.png": as_png(BINARIES[f"{name}.bin"]) for name in NAMES},
        "train_lables.json": json.dumps(train).encode(),
        "test_lables.json": json.dumps(labels["test_batch.bin"]).encode(),
    }


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(image_datasets, "IMAGES_PER_FILE", PER_FILE)


def test_png_files_decode_to_the_original_binary_files(small):
    assert image_datasets.decode_cifar10(png_files()) == BINARIES
    assert image_datasets.decode_cifar10(dict(BINARIES)) == BINARIES


def test_binary_files_are_parsed_as_documented():
    images = image_datasets.parse_cifar10(BINARIES["data_batch_1.bin"], "it")
    data = BINARIES["data_batch_1.bin"][image_datasets.RECORD_BYTES :]  # the second image
    assert images.images.shape == (PER_FILE, 3, 32, 32)
    assert images.labels[1] == data[0]
    assert images.images[1, 0, 0, :5].tolist() == list(data[1:6])
    assert images.images[1, 2, 31, 31] == data[3072]


@given(data=st.binary(max_size=40), records=st.integers(0, 2))
def test_a_file_with_a_partial_record_is_rejected(data, records):
    broken = bytes(records * image_datasets.RECORD_BYTES) + data
    if len(broken) % image_datasets.RECORD_BYTES == 0 and broken:
        return
    with pytest.raises(ValueError, match="has 3073 bytes for each image, got"):
        image_datasets.parse_cifar10(broken, "it")


@given(label=st.integers(10, 255))
def test_labels_above_9_are_rejected(label):
    with pytest.raises(ValueError, match=f"labels must be below 10, got {label} in it"):
        image_datasets.parse_cifar10(bytes([label]) + bytes(3072), "it")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("test_batch.png", b"nonsense", "test_batch.png: the file is not PNG"),
        ("test_batch.png", as_png(BINARIES["test_batch.bin"])[:-2000], "test_batch.png: the file is damaged"),
        (
            "test_batch.png",
            as_png(BINARIES["test_batch.bin"] * 2),
            r"must be an RGB image of size \(1024, 4\), got RGB of size \(1024, 8\)",
        ),
        ("test_lables.json", b"[1, 2, 3]", "must have a label for each image, got 4 images, 3 labels"),
        ("test_lables.json", b"[1, 2, 3, 10]", "must be a JSON list of integers from 0 to 9"),
        ("test_lables.json", b"[1, 2, 3, true]", "must be a JSON list of integers from 0 to 9"),
        ("test_lables.json", b"{}", "must be a JSON list of integers from 0 to 9"),
        ("test_lables.json", b"[" * 100_000, "must be a JSON list of labels"),
        ("test_lables.json", b"\xff", "must be a JSON list of labels"),
    ],
)
def test_invalid_images_and_labels_are_rejected(small, name, data, message):
    with pytest.raises(ValueError, match=message):
        image_datasets.decode_cifar10({**png_files(), name: data})


@given(data=st.data())
def test_a_corrupted_png_is_parsed_or_raises_value_error(data):
    packed = bytearray(as_png(BINARIES["test_batch.bin"]))
    at = data.draw(st.integers(0, len(packed) - 1))
    packed[at] ^= data.draw(st.integers(1, 255))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_datasets, "IMAGES_PER_FILE", PER_FILE)
        try:
            assert image_datasets.parse_png(bytes(packed), "it").shape == (PER_FILE, 1024, 3)
        except ValueError as error:
            assert re.search("cannot read the image it: |it must be an RGB image", str(error))  # noqa: PT017


def test_missing_files_are_listed_in_the_error():
    half = {name: data for name, data in BINARIES.items() if "4" not in name}
    with pytest.raises(ValueError, match=r"data_batch_4.bin is missing"):
        image_datasets.decode_cifar10(half)
    with pytest.raises(ValueError, match=r"data_batch_1.png, .* are missing"):
        image_datasets.decode_cifar10({})


def test_the_dataset_is_loaded_from_the_cache(cache, monkeypatch):
    (cache / "cifar10").mkdir(parents=True)
    for name, data in BINARIES.items():
        (cache / "cifar10" / name).write_bytes(data)
        monkeypatch.setitem(image_datasets.CIFAR10.digests, name, sha256(data))
    data = Cifar10(validation=4).load(0)
    assert (len(data.train), len(data.validation), len(data.test)) == (16, 4, 4)
    assert torch.equal(data.test.images, image_datasets.parse_cifar10(BINARIES["test_batch.bin"], "").images)


def test_without_a_cached_copy_the_error_prints_the_download_command(cache):
    with pytest.raises(LookupError, match="run: clearhead data get cifar10"):
        Cifar10().load(0)
