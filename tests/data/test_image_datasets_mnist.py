import gzip
import hashlib
import struct
from importlib.resources import files

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.data import image_datasets
from clearhead.data.downloads import LocalSource, obtain
from clearhead.data.image_datasets import gunzip, images_and_labels, parse_idx
from clearhead.files import UNPACKED_FLOOR, sha256
from clearhead.tasks.images import FashionMnist, Mnist

MD5 = {  # as published
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


@pytest.mark.parametrize("name", MD5)
def test_embedded_files_have_the_published_md5(name):
    assert hashlib.md5(image_datasets.read_embedded(name)).hexdigest() == MD5[name]


def test_mnist_splits_have_the_published_sizes():
    data = Mnist(validation=5000).load(0)
    assert (len(data.train), len(data.validation), len(data.test)) == (55_000, 5_000, 10_000)
    images, labels = data.test.get_batch(torch.arange(10_000))
    assert images.shape == (10_000, 1, 28, 28)
    assert torch.bincount(labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert data.classes[labels[0]] == "7"


def test_normalized_mnist_has_zero_mean_and_unit_std():
    normal = image_datasets.MNIST_NORMALIZE(image_datasets.load_images("train").images)
    assert abs(normal.mean()) < 1e-3
    assert abs(normal.std() - 1) < 1e-3


def test_modified_embedded_bytes_raise(monkeypatch):
    monkeypatch.setattr(image_datasets, "gunzip", lambda packed, name, most: b"\0\0\x08\x01\0\0\0\0")
    with pytest.raises(ValueError, match="does not match its SHA-256 digest"):
        image_datasets.read_embedded("t10k-labels-idx1-ubyte")


def test_the_license_file_names_license_and_authors():
    text = files("clearhead.data").joinpath("files/mnist/LICENCE.txt").read_text()
    assert all(words in text for words in ("CC BY-SA 3.0", "LeCun", "Cortes", "Burges"))


def idx(tensor):
    head = b"\0\0\x08" + bytes([tensor.dim()]) + struct.pack(f">{tensor.dim()}I", *tensor.shape)
    return head + bytes(tensor.flatten().tolist())


VALID_IDX = idx(torch.arange(24, dtype=torch.uint8).view(2, 3, 4))

shapes = st.lists(st.integers(0, 5), min_size=1, max_size=4)


@given(shape=shapes)
def test_idx_parsing_inverts_idx_encoding(shape):
    tensor = torch.randint(0, 256, shape, dtype=torch.uint8)
    assert torch.equal(parse_idx(idx(tensor), "it"), tensor)


@given(shape=shapes, extra=st.binary(min_size=1, max_size=9))
def test_trailing_bytes_are_rejected(shape, extra):
    with pytest.raises(ValueError, match="bytes after its header, got"):
        parse_idx(idx(torch.zeros(shape, dtype=torch.uint8)) + extra, "it")


@given(length=st.integers(0, len(VALID_IDX) - 1))
def test_a_truncated_idx_file_is_rejected(length):
    with pytest.raises(ValueError, match="idx file"):
        parse_idx(VALID_IDX[:length], "it")


@given(
    data=st.binary(max_size=60), start=st.sampled_from([b"", b"\0\0", b"\0\0\x08", b"\0\0\x08\x01", b"\0\0\x08\x03"])
)
def test_arbitrary_bytes_are_parsed_or_raise_value_error(data, start):
    try:
        tensor = parse_idx(start + data, "it")
    except ValueError:
        return
    assert idx(tensor) == start + data


@pytest.mark.parametrize(("kind", "dims"), [(0x0D, 1), (9, 2), (8, 0), (8, 5), (8, 255)])
def test_unsupported_data_types_and_ranks_are_rejected(kind, dims):
    with pytest.raises(ValueError, match=f"got data type {kind} and {dims} dimensions in it"):
        parse_idx(bytes([0, 0, kind, dims]) + bytes(4 * dims), "it")


def test_an_excessive_declared_size_is_rejected_without_allocation():
    with pytest.raises(ValueError, match="got 0 in it"):
        parse_idx(b"\0\0\x08\x04" + b"\xff" * 16, "it")


@given(data=st.binary(max_size=200))
def test_gunzip_accepts_gzipped_and_plain_bytes(data):
    assert gunzip(gzip.compress(data), "it", 200) == data
    if not data.startswith(b"\x1f\x8b"):
        assert gunzip(data, "it", 200) == data


def test_a_gzip_bomb_is_rejected():
    bomb = gzip.compress(bytes(10_000_000))
    assert len(bomb) < 20_000
    with pytest.raises(ValueError, match="it must unpack to at most 1000 bytes, got more"):
        gunzip(bomb, "it", 1000)


def test_compression_ratio_above_the_limit_is_rejected():
    assert len(gunzip(gzip.compress(bytes(UNPACKED_FLOOR)), "it", 50_000_000)) == UNPACKED_FLOOR
    with pytest.raises(ValueError, match=f"it must unpack to at most {UNPACKED_FLOOR} bytes, got more"):
        gunzip(gzip.compress(bytes(UNPACKED_FLOOR + 1)), "it", 50_000_000)


@given(length=st.integers(2, 40), flipped=st.integers(0, 400))
def test_corrupted_gzip_is_rejected(length, flipped):
    packed = gzip.compress(VALID_IDX, mtime=0)
    with pytest.raises(ValueError, match="it is not a valid gzip file"):
        gunzip(packed[:length], "it", 1000)
    at = len(packed) - 8 + flipped % 64 // 8  # in the trailing checksum or length
    with pytest.raises(ValueError, match="it is not a valid gzip file"):
        gunzip(packed[:at] + bytes([packed[at] ^ 1 << flipped % 8]) + packed[at + 1 :], "it", 1000)


def test_images_have_a_channel_dimension_and_labels_are_int64():
    found = images_and_labels(VALID_IDX, idx(torch.tensor([9, 0], dtype=torch.uint8)), 10)
    assert found.images.shape == (2, 1, 3, 4)
    assert found.labels.tolist() == [9, 0]
    assert found.labels.dtype == torch.int64


def test_mismatched_images_and_labels_are_rejected():
    labels = idx(torch.tensor([1, 2, 3], dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"got shapes \(2, 3, 4\) and \(3,\)"):
        images_and_labels(VALID_IDX, labels, 10)
    with pytest.raises(ValueError, match=r"got shapes \(3,\) and \(3,\)"):
        images_and_labels(labels, labels, 10)
    with pytest.raises(ValueError, match="labels must be below 10, got 10"):
        images_and_labels(VALID_IDX, idx(torch.tensor([10, 0], dtype=torch.uint8)), 10)


def random_idx(*shape):
    values = torch.randint(0, 10, shape, dtype=torch.uint8)
    return b"\0\0\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + bytes(values.flatten().tolist())


FILES = {
    "train-images-idx3-ubyte": random_idx(12, 28, 28),
    "train-labels-idx1-ubyte": random_idx(12),
    "t10k-images-idx3-ubyte": random_idx(5, 28, 28),
    "t10k-labels-idx1-ubyte": random_idx(5),
}


@pytest.mark.parametrize("pack", [gzip.compress, bytes])
def test_fashion_mnist_loads_from_gzipped_or_plain_files(cache, tmp_path, monkeypatch, pack):
    ending = ".gz" if pack is gzip.compress else ""
    (tmp_path / "mine").mkdir()
    for name, data in FILES.items():
        (tmp_path / "mine" / f"{name}{ending}").write_bytes(pack(data))
        monkeypatch.setitem(image_datasets.FASHION_DIGESTS, name, sha256(data))
    obtain(image_datasets.FASHION_MNIST, (LocalSource(tmp_path / "mine"),), print)
    data = FashionMnist(validation=2).load(0)
    assert (len(data.train), len(data.validation), len(data.test)) == (10, 2, 5)
    assert data.test.get_batch(torch.arange(5))[0].shape == (5, 1, 28, 28)
    assert len(data.classes) == 10


def test_fashion_mnist_rejects_files_with_other_digests(cache, tmp_path):
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(LookupError, match="train-images-idx3-ubyte does not match its published SHA-256 digest"):
        obtain(image_datasets.FASHION_MNIST, (LocalSource(tmp_path),), print)


def test_a_missing_fashion_mnist_file_is_named_in_the_error():
    with pytest.raises(ValueError, match="t10k-labels-idx1-ubyte is missing"):
        image_datasets.decode_fashion_mnist(
            {name: data for name, data in FILES.items() if not name.startswith("t10k-l")}
        )
