"""Mask files: reading inverts writing, and ambiguous files are rejected."""

import math
import os

import numpy as np
import pytest
import torch

from clearhead.models.mask_view import read_mask
from clearhead.nn import masks

CAUSAL = masks.causal(3).dense()


def write(path, text):
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "convention"),
    [
        ("1 0 0\n1 1 0\n1 1 1\n", "bool"),
        ("1,0,0\n\n1, 1, 0 # the second\n1;1;1", "bool"),
        ("True False False\nTrue True False\ntrue true true", "bool"),
        ("[[1, 0, 0],\n [1, 1, 0],\n [1, 1, 1]]", "bool"),
        ("0 -inf -inf\n0 0 -inf\n0 0 0", "additive"),
        ("0 -10000 -10000\n0 0 -1e9\n0.0 0 0", "additive"),
    ],
)
@pytest.mark.parametrize("suffix", [".txt", ".csv"])
def test_text_files_are_read_as_bool_or_additive(tmp_path, text, convention, suffix):
    mask, detected = read_mask(write(tmp_path / f"mask{suffix}", text))
    assert torch.equal(mask, CAUSAL)
    assert detected == convention


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64, np.float32])
@pytest.mark.parametrize("shape", [(3, 3), (1, 3, 3), (2, 2, 3, 3)])
def test_npy_arrays_of_any_dtype_are_read(tmp_path, dtype, shape):
    np.save(tmp_path / "mask.npy", np.broadcast_to(CAUSAL.numpy(), shape).astype(dtype))
    mask, convention = read_mask(tmp_path / "mask.npy")
    assert torch.equal(mask, CAUSAL.expand(shape))
    assert convention == "bool"


@pytest.mark.parametrize("low", [-math.inf, -10_000.0])
def test_additive_masks_round_trip(tmp_path, low):
    np.save(tmp_path / "mask.npy", masks.to_additive(CAUSAL, low).numpy())
    assert torch.equal(read_mask(tmp_path / "mask.npy")[0], CAUSAL)


def test_the_torch_convention_is_inverted(tmp_path):
    path = write(tmp_path / "mask.txt", "0 1 1\n0 0 1\n0 0 0")
    assert torch.equal(read_mask(path, "torch")[0], CAUSAL)
    assert torch.equal(read_mask(path)[0], ~CAUSAL)


def test_an_all_zero_mask_without_a_convention_is_rejected_as_ambiguous(tmp_path):
    path = write(tmp_path / "mask.txt", "0 0\n0 0")
    with pytest.raises(
        ValueError, match="zeros only: as a bool mask it hides every key, as an additive one it hides n"
    ):
        read_mask(path)
    assert not read_mask(path, "bool")[0].any()
    assert read_mask(path, "additive")[0].all()
    np.save(tmp_path / "mask.npy", np.zeros((2, 2), dtype=bool))
    assert not read_mask(tmp_path / "mask.npy")[0].any()


def test_arrays_are_never_unpickled(tmp_path):
    np.save(tmp_path / "mask.npy", np.array([[print]], dtype=object))
    with pytest.raises(ValueError, match=r"mask.npy is not an array saved by numpy.save: Array can't be memory-mapped"):
        read_mask(tmp_path / "mask.npy")


def test_an_excessive_declared_shape_allocates_no_memory(tmp_path):
    path = tmp_path / "mask.npy"
    np.save(path, np.zeros((2, 2)))
    content = path.read_bytes()
    claimed = content.replace(b"(2, 2), }" + b" " * 10, b"(999999, 999999), }")
    assert len(claimed) == len(content)
    assert claimed != content
    path.write_bytes(claimed)
    with pytest.raises(ValueError, match=r"mask.npy is not an array saved by numpy.save: mmap length"):
        read_mask(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("mask.txt", "1 0\n1", r"a value for each key, got 2 and 1 values \(line 2 of mask.txt\)"),
        ("mask.txt", "1 0\n1 x", "numbers, True or False, got 'x' in line 2 of mask.txt"),
        ("mask.txt", "1 0\n1 0.5", "a bool mask holds 0 and 1, or an additive one .* got 0.5 in row 2, column 2"),
        ("mask.txt", "1 0\n1 nan", "got nan in row 2, column 2"),
        ("mask.txt", "0 -inf\n0 1", "an additive mask holds 0, or -10000 and less, got 1 in row 2, column 2"),
        ("mask.txt", "0 -10\n0 0", "got -10 in row 1, column 2"),
        ("mask.txt", "", "at least one query and one key"),
        ("mask.png", "", r"a mask is read from a .txt, .csv, .npy file, got 'mask.png'"),
        ("mask.npy", "1 0\n1 1", "mask.npy is not an array saved by numpy.save"),
    ],
)
def test_invalid_masks_raise_one_line_errors(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_mask(write(tmp_path / name, text))
    assert "\n" not in str(caught.value)


def test_unreadable_files_raise(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*none.txt: No such file or directory"):
        read_mask(tmp_path / "none.txt")
    with pytest.raises(ValueError, match=r"cannot read .*none.npy: No such file or directory"):
        read_mask(tmp_path / "none.npy")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"binary.txt is not a text file"):
        read_mask(tmp_path / "binary.txt")


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".npy"])
def test_pipes_and_oversized_files_are_rejected_without_reading(tmp_path, suffix):
    os.mkfifo(tmp_path / f"pipe{suffix}")
    with pytest.raises(ValueError, match="got a pipe or a device"):
        read_mask(tmp_path / f"pipe{suffix}")
    with (tmp_path / f"long{suffix}").open("wb") as file:
        file.truncate(10**12)
    with pytest.raises(ValueError, match="has 1,000,000,000,000 bytes, the limit is"):
        read_mask(tmp_path / f"long{suffix}")


def test_the_maximum_mask_size_is_enforced(tmp_path):
    np.save(tmp_path / "mask.npy", np.ones((2048, 2048)))
    assert read_mask(tmp_path / "mask.npy")[0].all()
    np.save(tmp_path / "mask.npy", np.ones((2048, 2049), dtype=bool))
    with pytest.raises(ValueError, match=r"at most 4,194,304 values, got 4,196,352 in mask\.npy"):
        read_mask(tmp_path / "mask.npy")
