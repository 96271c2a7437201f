"""Data sets: generated, embedded, downloaded, or the user's own. Independent of models.

The options that several data sets share are defined here. Importing them does not import torch.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from clearhead.data.user_files import MAX_IMAGE_SIZE
from clearhead.lazy import lazy_exports
from clearhead.messages import short_repr
from clearhead.validation import check_bool, check_int, is_number

if TYPE_CHECKING:
    from clearhead.data.batches import Batch as Batch
    from clearhead.data.batches import Batches as Batches
    from clearhead.data.dataset import Dataset as Dataset
    from clearhead.data.dataset import Examples as Examples
    from clearhead.data.dataset import Images as Images
    from clearhead.data.dataset import Normalize as Normalize
    from clearhead.data.dataset import SequencePairs as SequencePairs
    from clearhead.data.dataset import Subset as Subset
    from clearhead.data.dataset import train_val_split as train_val_split
    from clearhead.data.images import read_image as read_image
    from clearhead.data.vocab import Vocabulary as Vocabulary

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


class FolderOptions(Protocol):
    """What the loader of `folder` needs of its task."""

    @property
    def folder(self) -> str: ...
    @property
    def image_size(self) -> int: ...
    @property
    def fit(self) -> Fit: ...
    @property
    def skip_invalid(self) -> bool: ...
    @property
    def validation(self) -> int: ...
    @property
    def limit(self) -> int: ...


class DictionaryOptions(Protocol):
    """What the loader of `pronounce` needs of its task."""

    @property
    def train_file(self) -> str: ...
    @property
    def test_file(self) -> str: ...
    @property
    def stress(self) -> bool: ...
    @property
    def validation(self) -> int: ...
    @property
    def limit(self) -> int: ...


__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "clearhead.data.dataset": (
            "Dataset",
            "Examples",
            "Images",
            "SequencePairs",
            "Subset",
            "Normalize",
            "train_val_split",
        ),
        "clearhead.data.batches": ("Batch", "Batches"),
        "clearhead.data.vocab": ("Vocabulary",),
        "clearhead.data.images": ("read_image",),
    },
    own=("Augmentation",),
)
