"""All data sets by name. Nothing here imports torch: a data set's own file does, when it is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING

from clearhead.data.user_files import check_user_file
from clearhead.files import sha256

if TYPE_CHECKING:
    from clearhead.data.config import DataConfig
    from clearhead.data.dataset import Dataset


@dataclass(frozen=True)
class Entry:
    home: str
    """module:function, called with (config, seed)"""
    what: str
    origin: str
    """made as it is needed; embedded in the package; fetched by `clearhead data get`; or the user's own"""
    side: int = 0
    """height and width of its images, or 0 where there are none, or the config says"""
    files: tuple[str, ...] = ()
    """fields of the config that may name files, or a folder of them, of the user's own"""


DATASETS = {
    "reverse": Entry("clearhead.data.digits:load_reverse", "random digits and the same in reverse", "made"),
    "digits": Entry("clearhead.data.digits:load_digits", "random digits and a question about them", "made"),
    "odd-one-out": Entry(
        "clearhead.data.odd_one_out:load_odd_one_out",
        "sets of MNIST images, one of another class",
        "embedded",
    ),
    "mnist": Entry("clearhead.data.mnist:load_mnist", "70,000 handwritten digits, 28 x 28", "embedded", side=28),
    "cifar10": Entry(
        "clearhead.data.cifar10:load_cifar10", "60,000 color photos of 10 classes, 32 x 32", "fetched", side=32
    ),
    "fashion-mnist": Entry(
        "clearhead.data.mnist:load_fashion_mnist",
        "70,000 images of clothes, 28 x 28",
        "fetched",
        side=28,
    ),
    "pronounce": Entry(
        "clearhead.data.pronounce:load_pronounce",
        "126,052 English words and their phonemes",
        "embedded",
        files=("train_file", "test_file"),
    ),
    "words": Entry("clearhead.data.text:load_words", "English words, letter by letter", "embedded", files=("file",)),
    "text": Entry(
        "clearhead.data.text:load_text",
        "your own text, by characters or bytes",
        "yours",
        files=("file",),
    ),
    "folder": Entry(
        "clearhead.data.folder:load_folder", "your own images, one folder per class", "yours", files=("folder",)
    ),
}


def load_dataset(config: "DataConfig", seed: int) -> "Dataset":
    """The data set that the config names; which training examples are set apart depends on the seed."""
    module, function = DATASETS[config.name].home.split(":")
    data: Dataset = getattr(import_module(module), function)(config, seed)
    return data if data.files else replace(data, files=digests(config))


def digests(config: "DataConfig") -> dict[str, str]:
    """The user's own files that the data is read from, by their paths: the sha256 of each, or of a whole folder."""
    if config.name == "folder":
        from clearhead.data.folder import digest

        return {config.folder: digest(config)}
    paths = [getattr(config, field) for field in DATASETS[config.name].files]
    return {path: sha256(check_user_file(path)) for path in paths if path}


def changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Paths of files that were read before and have other bytes now."""
    return [path for path, digest in now.items() if before.get(path, digest) != digest]
