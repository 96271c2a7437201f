"""Which examples a model is fitted to: frozen configs, checked when they are made. Does not import torch."""

import difflib
import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from clearhead.data.datasets import DATASETS

Question = Literal["commonest", "repeat", "sum"]


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
        check_whole(0, crop=self.crop, cutout=self.cutout)
        if not isinstance(self.flip, bool):
            raise ValueError(f"flip must be True or False, got {self.flip!r}; choose one of the two")
        if not is_number(self.mixup) or not 0 <= self.mixup < math.inf:
            raise ValueError(f"mixup must be a number of at least 0, got {self.mixup!r}; try 0.2, or 0 for none")

    @property
    def is_on(self) -> bool:
        return self != Augmentation()


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """A data set by name, with what is asked of it, and how much of it is used. Other sets' fields have no effect."""

    name: str
    """what `clearhead data list` shows"""
    question: Question = "commonest"
    """whole: what is asked about the digits"""
    length: int = 16
    """reverse, whole: digits in a sequence"""
    set_size: int = 10
    """oddity: images in a set"""
    folder: str = ""
    """folder: where the images are"""
    image_size: int = 64
    """folder: height and width that images are resized to"""
    validation: int = 1000
    """training examples set apart, chosen by the run's seed; of a folder at most a fifth, or its own val/"""
    limit: int = 0
    """training examples used, 0 for all"""
    augmentation: Augmentation = field(default_factory=Augmentation)

    def __post_init__(self) -> None:
        if self.name not in DATASETS:
            near = difflib.get_close_matches(str(self.name), DATASETS, n=1)
            hint = f"did you mean {near[0]}?" if near else "see clearhead data list"
            raise LookupError(f"a data set is one of {', '.join(DATASETS)}, got {self.name!r}; {hint}")
        if self.question not in get_args(Question):
            raise ValueError(
                f"question must be one of {', '.join(get_args(Question))}, got {self.question!r}; choose one of them"
            )
        check_whole(1, length=self.length, image_size=self.image_size)
        check_whole(3, set_size=self.set_size)
        check_whole(0, validation=self.validation, limit=self.limit)
        if not isinstance(self.folder, str):
            raise ValueError(f"folder must be a path as text, got {self.folder!r}; pass str(path)")
        if not isinstance(self.augmentation, Augmentation):
            raise ValueError(f"augmentation must be an Augmentation, got {self.augmentation!r}; make one")
        self.check_repeat()

    def check_repeat(self) -> None:
        if self.name == "whole" and self.question == "repeat" and not 2 <= self.length <= 10:
            raise ValueError(
                "whether a digit repeats can be asked of 2 to 10 digits (of more, one always does), "
                f"got length={self.length}; try length=8"
            )


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_whole(least: int, **sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {size!r}; try {name}={least}")
