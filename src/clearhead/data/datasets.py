"""All data sets by name. Nothing here imports torch: a data set's own file does, when it is loaded."""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clearhead.data.config import DataConfig
    from clearhead.data.dataset import DataSet


@dataclass(frozen=True)
class Entry:
    home: str
    """the module whose load(config, seed) makes it"""
    what: str
    origin: str
    """made as it is needed; embedded in the package; fetched by `clearhead data get`; or the user's own"""


DATASETS = {
    "reverse": Entry("clearhead.data.reverse", "random digits; the answer is the same digits backwards", "made"),
    "whole": Entry("clearhead.data.whole", "random digits; one answer about all of them", "made"),
    "oddity": Entry("clearhead.data.oddity", "sets of MNIST images; which one is of another class?", "embedded"),
    "mnist": Entry("clearhead.data.mnist", "70,000 handwritten digits, 28 x 28", "embedded"),
    "cifar10": Entry("clearhead.data.cifar10", "60,000 colour photographs of 10 classes, 32 x 32", "fetched"),
    "fashion": Entry("clearhead.data.fashion", "70,000 pictures of clothes of 10 classes, 28 x 28", "fetched"),
    "pronounce": Entry("clearhead.data.pronounce", "126,052 English words and how they are said", "embedded"),
    "words": Entry("clearhead.data.words", "English words, letter by letter", "embedded"),
    "text": Entry("clearhead.data.text", "your own text, character by character or byte by byte", "yours"),
    "folder": Entry("clearhead.data.folder", "your own images, one folder for each class", "yours"),
}


def load(config: "DataConfig", seed: int) -> "DataSet":
    """The data set that the config names; which training examples are set apart depends on the seed."""
    data: DataSet = import_module(DATASETS[config.name].home).load(config, seed)
    return data
