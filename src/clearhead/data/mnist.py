"""`mnist`: 60,000 + 10,000 handwritten digits of 28 x 28 pixels, embedded in the package.

By Yann LeCun, Corinna Cortes and Christopher J.C. Burges; CC BY-SA 3.0: files/mnist/LICENCE.txt.
"""

from functools import cache
from importlib.resources import files

from clearhead.data.config import DataConfig
from clearhead.data.dataset import DataSet, Images, Normalise, set_apart
from clearhead.data.idx import gunzip, images_and_labels
from clearhead.files import sha256

CLASSES = tuple("0123456789")
NORMALISE = Normalise(mean=(0.1307,), std=(0.3081,))
MOST = 50_000_000
DIGESTS = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


def load(config: DataConfig, seed: int) -> DataSet:
    train, validation = set_apart(digits("train"), config.validation, config.limit, seed)
    return DataSet(train, validation, digits("t10k"), CLASSES, NORMALISE)


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
