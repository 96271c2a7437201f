import gzip
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.data.mnist import gunzip, images_and_labels, parse
from clearhead.data.user_files import UNPACKED_FLOOR


def idx(tensor):
    head = b"\0\0\x08" + bytes([tensor.dim()]) + struct.pack(f">{tensor.dim()}I", *tensor.shape)
    return head + bytes(tensor.flatten().tolist())


GOOD = idx(torch.arange(24, dtype=torch.uint8).view(2, 3, 4))

shapes = st.lists(st.integers(0, 5), min_size=1, max_size=4)


@given(shape=shapes)
def test_what_is_written_is_read(shape):
    tensor = torch.randint(0, 256, shape, dtype=torch.uint8)
    assert torch.equal(parse(idx(tensor), "it"), tensor)


@given(shape=shapes, extra=st.binary(min_size=1, max_size=9))
def test_bytes_too_many_are_refused(shape, extra):
    with pytest.raises(ValueError, match="bytes after its header, got"):
        parse(idx(torch.zeros(shape, dtype=torch.uint8)) + extra, "it")


@given(length=st.integers(0, len(GOOD) - 1))
def test_a_file_cut_short_is_refused(length):
    with pytest.raises(ValueError, match="idx file"):
        parse(GOOD[:length], "it")


@given(
    data=st.binary(max_size=60), start=st.sampled_from([b"", b"\0\0", b"\0\0\x08", b"\0\0\x08\x01", b"\0\0\x08\x03"])
)
def test_any_bytes_are_read_or_refused(data, start):
    try:
        tensor = parse(start + data, "it")
    except ValueError:
        return
    assert idx(tensor) == start + data


@pytest.mark.parametrize(("kind", "dims"), [(0x0D, 1), (9, 2), (8, 0), (8, 5), (8, 255)])
def test_other_kinds_of_numbers_are_refused(kind, dims):
    with pytest.raises(ValueError, match=f"got data type {kind} and {dims} dimensions in it"):
        parse(bytes([0, 0, kind, dims]) + bytes(4 * dims), "it")


def test_a_size_that_promises_the_whole_memory_is_refused_at_once():
    with pytest.raises(ValueError, match="got 0 in it"):
        parse(b"\0\0\x08\x04" + b"\xff" * 16, "it")


@given(data=st.binary(max_size=200))
def test_gzipped_and_plain_bytes_are_the_same(data):
    assert gunzip(gzip.compress(data), "it", 200) == data
    if not data.startswith(b"\x1f\x8b"):
        assert gunzip(data, "it", 200) == data


def test_what_unpacks_to_too_much_is_refused():
    bomb = gzip.compress(bytes(10_000_000))
    assert len(bomb) < 20_000
    with pytest.raises(ValueError, match="it must unpack to at most 1000 bytes, got more"):
        gunzip(bomb, "it", 1000)


def test_what_unpacks_to_more_than_a_hundred_times_its_size_is_refused():
    assert len(gunzip(gzip.compress(bytes(UNPACKED_FLOOR)), "it", 50_000_000)) == UNPACKED_FLOOR
    with pytest.raises(ValueError, match=f"it must unpack to at most {UNPACKED_FLOOR} bytes, got more"):
        gunzip(gzip.compress(bytes(UNPACKED_FLOOR + 1)), "it", 50_000_000)


@given(length=st.integers(2, 40), flipped=st.integers(0, 400))
def test_damaged_gzip_is_refused(length, flipped):
    packed = gzip.compress(GOOD, mtime=0)
    with pytest.raises(ValueError, match="it is not a valid gzip file"):
        gunzip(packed[:length], "it", 1000)
    at = len(packed) - 8 + flipped % 64 // 8  # in the checksum or the length at its end
    with pytest.raises(ValueError, match="it is not a valid gzip file"):
        gunzip(packed[:at] + bytes([packed[at] ^ 1 << flipped % 8]) + packed[at + 1 :], "it", 1000)


def test_images_come_with_a_channel_and_labels_as_numbers():
    found = images_and_labels(GOOD, idx(torch.tensor([9, 0], dtype=torch.uint8)), 10)
    assert found.images.shape == (2, 1, 3, 4)
    assert found.labels.tolist() == [9, 0]
    assert found.labels.dtype == torch.int64


def test_files_that_do_not_belong_together_are_refused():
    labels = idx(torch.tensor([1, 2, 3], dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"got shapes \(2, 3, 4\) and \(3,\)"):
        images_and_labels(GOOD, labels, 10)
    with pytest.raises(ValueError, match=r"got shapes \(3,\) and \(3,\)"):
        images_and_labels(labels, labels, 10)
    with pytest.raises(ValueError, match="labels must be below 10, got 10"):
        images_and_labels(GOOD, idx(torch.tensor([10, 0], dtype=torch.uint8)), 10)
