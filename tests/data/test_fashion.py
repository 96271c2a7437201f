import gzip
import struct

import pytest
import torch

from clearhead.data import mnist
from clearhead.data.cache import obtain
from clearhead.data.datasets import DataConfig, load_dataset
from clearhead.data.sources import LocalSource
from clearhead.files import sha256


def idx(*shape):
    values = torch.randint(0, 10, shape, dtype=torch.uint8)
    return b"\0\0\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + bytes(values.flatten().tolist())


FILES = {
    "train-images-idx3-ubyte": idx(12, 28, 28),
    "train-labels-idx1-ubyte": idx(12),
    "t10k-images-idx3-ubyte": idx(5, 28, 28),
    "t10k-labels-idx1-ubyte": idx(5),
}


@pytest.mark.parametrize("pack", [gzip.compress, bytes])
def test_gzipped_or_plain_files_are_fetched_and_loaded(cache, tmp_path, monkeypatch, pack):
    ending = ".gz" if pack is gzip.compress else ""
    (tmp_path / "mine").mkdir()
    for name, data in FILES.items():
        (tmp_path / "mine" / f"{name}{ending}").write_bytes(pack(data))
        monkeypatch.setitem(mnist.FASHION_DIGESTS, name, sha256(data))
    obtain(mnist.CACHED, (LocalSource(tmp_path / "mine"),), print)
    data = load_dataset(DataConfig(name="fashion-mnist", validation=2), seed=0)
    assert (len(data.train), len(data.validation), len(data.test)) == (10, 2, 5)
    assert data.test.get_batch(torch.arange(5))[0].shape == (5, 1, 28, 28)
    assert len(data.classes) == 10


def test_mnists_own_files_are_not_taken_for_it(cache, tmp_path):
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(LookupError, match="train-images-idx3-ubyte does not match its published SHA-256 digest"):
        obtain(mnist.CACHED, (LocalSource(tmp_path),), print)


def test_a_file_that_is_missing_is_named():
    with pytest.raises(ValueError, match="t10k-labels-idx1-ubyte is missing"):
        mnist.decode({name: data for name, data in FILES.items() if not name.startswith("t10k-l")})
