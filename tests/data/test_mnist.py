import hashlib
from importlib.resources import files

import pytest
import torch

from clearhead.data import mnist
from clearhead.data.datasets import DataConfig, load_dataset

MD5 = {  # as published
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


@pytest.mark.parametrize("name", MD5)
def test_the_embedded_files_are_the_published_ones(name):
    assert hashlib.md5(mnist.read_embedded(name)).hexdigest() == MD5[name]


def test_all_images_are_there():
    data = load_dataset(DataConfig(name="mnist", validation=5000), seed=0)
    assert (len(data.train), len(data.validation), len(data.test)) == (55_000, 5_000, 10_000)
    images, labels = data.test.get_batch(torch.arange(10_000))
    assert images.shape == (10_000, 1, 28, 28)
    assert torch.bincount(labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert data.classes[labels[0]] == "7"


def test_pixels_are_normalised_to_mean_0_and_deviation_1():
    normal = mnist.NORMALIZE(mnist.load_images("train").images)
    assert abs(normal.mean()) < 1e-3
    assert abs(normal.std() - 1) < 1e-3


def test_changed_bytes_are_noticed(monkeypatch):
    monkeypatch.setattr(mnist, "gunzip", lambda packed, name, most: b"\0\0\x08\x01\0\0\0\0")
    with pytest.raises(ValueError, match="does not match its SHA-256 digest"):
        mnist.read_embedded("t10k-labels-idx1-ubyte")


def test_licence_and_makers_are_named_beside_the_data():
    text = files("clearhead.data").joinpath("files/mnist/LICENCE.txt").read_text()
    assert all(words in text for words in ("CC BY-SA 3.0", "LeCun", "Cortes", "Burges"))
