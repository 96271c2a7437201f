"""Datasets by name, and the configs that select one: frozen, validated when they are created.

Nothing here imports torch; the module of a dataset does, when that dataset is loaded.
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

Question = Literal["most-common", "repeat", "sum"]
Level = Literal["character", "byte"]
Fit = Literal["pad", "crop", "stretch"]
TTA = Literal["none", "flip", "shift"]
"""of an image: itself; with its mirror image; both also moved by a pixel along a diagonal, to either side"""
MOST_MIXUP = 1000
"""by then every pair of images is blended half and half"""
N_VIEWS: dict[TTA, int] = {"none": 1, "flip": 2, "shift": 6}


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """What happens to training images, and to no others, each time they are seen."""

    crop: int = 0
    """pixels of black padding on each side, from which a piece of the old size is cut at a random place"""
    flip: bool = False
    """mirror left and right, every other time"""
    cutout: int = 0
    """side of a square at a random place that is blanked; 0 for none"""
    mixup: float = 0.0
    """blend two images by a share from Beta(mixup, mixup); 0 for none"""

    def __post_init__(self) -> None:
        check_int(0, MAX_IMAGE_SIZE, crop=self.crop, cutout=self.cutout)
        check_bool(flip=self.flip)
        if not is_number(self.mixup) or not 0 <= self.mixup < math.inf:
            raise ValueError(
                f"mixup must be a number of at least 0, got {short_repr(self.mixup)}; try 0.2, or 0 for none"
            )
        if self.mixup > MOST_MIXUP:
            raise ValueError(f"mixup must be a number of at most {MOST_MIXUP}, got {short_repr(self.mixup)}")

    @property
    def is_on(self) -> bool:
        return self != Augmentation()


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """A data set by name, with what is asked of it, and how much of it is used. Other sets' fields have no effect."""

    name: str
    """what `clearhead data list` shows"""
    question: Question = "most-common"
    """digits: what is asked about the digits"""
    length: int = 16
    """reverse, digits: digits in a sequence; text: characters or bytes that are read at once"""
    set_size: int = 10
    """odd-one-out: images in a set"""
    folder: str = ""
    """folder: where the images are"""
    image_size: int = 64
    """folder: height and width that images are resized to"""
    fit: Fit = "pad"
    """how an image becomes a square, in training and in prediction: pad it with the colour of its border, crop the
    largest square in its middle, or stretch it"""
    skip_invalid: bool = False
    """folder: leave out image files that cannot be read, and list them, instead of stopping with an error"""
    train_file: str = ""
    """pronounce: a dictionary to learn, in place of the embedded one"""
    test_file: str = ""
    """pronounce: a dictionary to test on; its words are never learnt"""
    stress: bool = False
    """pronounce: keep the stress of vowels, AH0, AH1 and AH2, or drop it"""
    file: str = ""
    """text: the text; words: a list of words, a line for each, in place of the dictionary's"""
    level: Level = "character"
    """text: what a token is"""
    window: int = 50
    """pronounce, words: batches whose examples are sorted by length together, to pad less; 0 for none"""
    validation: int = 1000
    """training examples set apart, chosen by the run's seed; of a folder at most a fifth, or its own val/; of words,
    chosen by their spelling; of a text at most a tenth, its end"""
    limit: int = 0
    """training examples used, 0 for all; of a dictionary, words"""
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
            raise ValueError(f"augmentation must be an Augmentation, got {short_repr(self.augmentation)}; make one")
        self.check_repeat()
        self.check_crop()

    def check_repeat(self) -> None:
        if self.name == "digits" and self.question == "repeat" and not 2 <= self.length <= 10:
            raise ValueError(
                "whether a digit repeats can be asked of 2 to 10 digits (of more, one always does), "
                f"got length={self.length}; try length=8"
            )

    def check_crop(self) -> None:
        """More padding than an image has pixels would only make black images, and take memory for it."""
        side = DATASETS[self.name].side or self.image_size
        if self.augmentation.crop > side:
            raise ValueError(
                f"crop must be at most the {side} pixels of an image's side, got {self.augmentation.crop}; "
                f"try crop={max(1, side // 8)}"
            )


def load_dataset(config: DataConfig, seed: int) -> "Dataset":
    """The data set that the config names; which training examples are set apart depends on the seed."""
    module, function = DATASETS[config.name].home.split(":")
    data: Dataset = getattr(import_module(module), function)(config, seed)
    return data if data.files else replace(data, files=digests(config))


def digests(config: DataConfig) -> dict[str, str]:
    """The user's own files that the data is read from, by their paths: the sha256 of each, or of a whole folder."""
    if config.name == "folder":
        from clearhead.data.folder import digest

        return {config.folder: digest(config)}
    paths = [getattr(config, field) for field in DATASETS[config.name].files]
    return {path: sha256(check_user_file(path)) for path in paths if path}


def changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Paths of files that were read before and have other bytes now."""
    return [path for path, digest in now.items() if before.get(path, digest) != digest]
