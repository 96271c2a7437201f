"""Data sets: generated, embedded, downloaded, or the user's own. Independent of models."""

from typing import TYPE_CHECKING

from clearhead.lazy import lazy_exports

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
    from clearhead.data.options import Augmentation as Augmentation
    from clearhead.data.vocab import Vocabulary as Vocabulary

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "clearhead.data.options": ("Augmentation",),
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
)
