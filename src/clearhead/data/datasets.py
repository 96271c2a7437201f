"""Data sets by name, and the frozen configs that select one, validated when they are created.

Importing this module does not import torch; loading a data set does.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from clearhead.data.user_files import MAX_EXAMPLES, MAX_IMAGE_SIZE, MAX_LENGTH, check_user_file
from clearhead.files import sha256
from clearhead.messages import MAX_REPR_LENGTH, short_repr, unknown_name
from clearhead.validation import check_bool, check_choice, check_int, check_paths, is_number

if TYPE_CHECKING:
    from clearhead.data.dataset import Dataset


Origin = Literal["generated", "embedded", "downloaded", "your own"]
"""generated on the fly, embedded in the package, downloaded by `clearhead data get`, or the user's own files"""


@dataclass(frozen=True)
class Entry:
    """How a data set is loaded and listed."""

    loader: str
    """module:function, called with (config, seed)"""
    description: str
    origin: Origin
    image_size: int = 0
    """height and width of the images; 0 if there are no images or the config sets their size"""
    files: tuple[str, ...] = ()
    """config fields that hold paths of the user's own files or folder"""


DATASETS = {
    "reverse": Entry("clearhead.data.digits:load_reverse", "random digits and their reversal", "generated"),
    "digits": Entry("clearhead.data.digits:load_digits", "random digits and a question about them", "generated"),
    "odd-one-out": Entry(
        "clearhead.data.mnist:load_odd_one_out",
        "sets of MNIST images, one of another class",
        "embedded",
    ),
    "mnist": Entry("clearhead.data.mnist:load_mnist", "70,000 handwritten digits, 28 x 28", "embedded", image_size=28),
    "cifar10": Entry(
        "clearhead.data.cifar10:load_cifar10", "60,000 color photos of 10 classes, 32 x 32", "downloaded", image_size=32
    ),
    "fashion-mnist": Entry(
        "clearhead.data.mnist:load_fashion_mnist",
        "70,000 images of clothes, 28 x 28",
        "downloaded",
        image_size=28,
    ),
    "pronounce": Entry(
        "clearhead.data.pronounce:load_pronounce",
        "126,052 English words and their phones",
        "embedded",
        files=("train_file", "test_file"),
    ),
    "words": Entry("clearhead.data.text:load_words", "English words, letter by letter", "embedded", files=("file",)),
    "text": Entry(
        "clearhead.data.text:load_text",
        "a text file, by characters or bytes",
        "your own",
        files=("file",),
    ),
    "folder": Entry("clearhead.data.folder:load_folder", "images, one folder per class", "your own", files=("folder",)),
}

Question = Literal["most-common", "repeat", "sum"]
Level = Literal["character", "byte"]
Fit = Literal["pad", "crop", "stretch"]
TTA = Literal["none", "flip", "shift"]
"""test-time augmentation: none; the mirror image; or both also shifted diagonally by one pixel either way"""
MAX_MIXUP = 1000
"""Beta(1000, 1000) is practically constant at 1/2: larger values change nothing"""
N_VIEWS: dict[TTA, int] = {"none": 1, "flip": 2, "shift": 6}
"""views per image for each kind of test-time augmentation"""


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random augmentation of training images, drawn anew in each epoch."""

    crop: int = 0
    """random crop: pad each side with this many black pixels, then crop to the original size; 0 disables"""
    flip: bool = False
    """flip horizontally with probability 1/2"""
    cutout: int = 0
    """side of a square that is blanked at a random position; 0 disables"""
    mixup: float = 0.0
    """blend pairs of images with a weight drawn from Beta(mixup, mixup); 0 disables"""

    def __post_init__(self) -> None:
        check_int(0, MAX_IMAGE_SIZE, crop=self.crop, cutout=self.cutout)
        check_bool(flip=self.flip)
        if not is_number(self.mixup) or not 0 <= self.mixup < math.inf:
            raise ValueError(f"mixup must be a number of at least 0, got {short_repr(self.mixup)}; try 0.2")
        if self.mixup > MAX_MIXUP:
            raise ValueError(f"mixup must be a number of at most {MAX_MIXUP}, got {short_repr(self.mixup)}")

    @property
    def is_on(self) -> bool:
        return self != Augmentation()


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """A data set by name, with its options. Options of other data sets have no effect."""

    name: str
    """a name that `clearhead data list` prints"""
    question: Question = "most-common"
    """digits: the question to answer about the digits"""
    length: int = 16
    """reverse, digits: digits per sequence; text: context length in characters or bytes"""
    set_size: int = 10
    """odd-one-out: images per set"""
    folder: str = ""
    """folder: path of the folder of images"""
    image_size: int = 64
    """folder: height and width to which images are resized"""
    fit: Fit = "pad"
    """how an image is made square, in training and in prediction: pad it with the color of its border, crop the
    largest centered square, or stretch it"""
    skip_invalid: bool = False
    """folder: skip and list image files that cannot be read, instead of stopping with an error"""
    train_file: str = ""
    """pronounce: dictionary to train on, instead of the embedded one"""
    test_file: str = ""
    """pronounce: dictionary to test on; its words are excluded from training"""
    stress: bool = False
    """pronounce: keep the stress of vowels (AH0, AH1, AH2)"""
    file: str = ""
    """text: the text file; words: a list of words, one per line, instead of those of the embedded dictionary"""
    level: Level = "character"
    """text: unit of a token"""
    window: int = 50
    """pronounce, words: sort examples by length within this many batches, to pad less; 0 disables"""
    validation: int = 1000
    """training examples held out for validation, chosen by the seed; folder: at most a fifth, or its own val/;
    pronounce, words: chosen by spelling; text: windows at its end, at most a tenth of it"""
    limit: int = 0
    """number of training examples (of a dictionary: words) to use; 0 for all"""
    augmentation: Augmentation = field(default_factory=Augmentation)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name not in DATASETS:
            is_short = isinstance(self.name, str) and len(self.name) <= MAX_REPR_LENGTH
            raise unknown_name("data set", self.name if is_short else short_repr(self.name), DATASETS)
        check_choice(question=(self.question, Question), level=(self.level, Level), fit=(self.fit, Fit))
        check_int(1, MAX_LENGTH, length=self.length)
        check_int(1, MAX_IMAGE_SIZE, image_size=self.image_size)
        check_int(3, MAX_LENGTH, set_size=self.set_size)
        check_int(0, MAX_EXAMPLES, validation=self.validation, limit=self.limit, window=self.window)
        check_bool(stress=self.stress, skip_invalid=self.skip_invalid)
        check_paths(folder=self.folder, train_file=self.train_file, test_file=self.test_file, file=self.file)
        if not isinstance(self.augmentation, Augmentation):
            raise ValueError(f"augmentation must be an Augmentation, got {short_repr(self.augmentation)}")
        self.check_repeat()
        self.check_crop()

    def check_repeat(self) -> None:
        if self.name == "digits" and self.question == "repeat" and not 2 <= self.length <= 10:
            raise ValueError(
                "question=repeat requires 2 to 10 digits, because more digits always repeat; "
                f"got length={self.length}; try length=8"
            )

    def check_crop(self) -> None:
        """Padding wider than the image would only waste memory on black crops."""
        side = DATASETS[self.name].image_size or self.image_size
        if self.augmentation.crop > side:
            raise ValueError(
                f"crop must be at most the {side} pixels of the image size, got {self.augmentation.crop}; "
                f"try crop={max(1, side // 8)}"
            )


def load_dataset(config: DataConfig, seed: int) -> "Dataset":
    """Load the data set that the config names. The seed selects the examples held out for validation."""
    module, function = DATASETS[config.name].loader.split(":")
    data: Dataset = getattr(import_module(module), function)(config, seed)
    return data if data.files else replace(data, files=digests(config))


def digests(config: DataConfig) -> dict[str, str]:
    """SHA-256 of each of the user's own files that the data set reads, or of the whole folder, by path."""
    if config.name == "folder":
        from clearhead.data.folder import digest

        return {config.folder: digest(config)}
    paths = [getattr(config, field) for field in DATASETS[config.name].files]
    return {path: sha256(check_user_file(path)) for path in paths if path}


def changed_files(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Paths whose digests differ between the two mappings. Paths that are missing from `old` are ignored."""
    return [path for path, digest in new.items() if old.get(path, digest) != digest]
