"""`odd-one-out`: sets of MNIST images of one class with one image of another class; the target is its position.

Dims: B sets, S images in a set.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from clearhead.data import mnist
from clearhead.data.dataset import Dataset, Images
from clearhead.data.datasets import DataConfig
from clearhead.data.prng import fold_in, permutation, random_below

N_TRAIN, N_TEST = 50_000, 10_000
N_HELD_OUT = 5_000
"""MNIST training images that are reserved for the validation sets"""


@dataclass(frozen=True, eq=False)
class OddSets:
    """Set i of the stream `key`: float (B,S,784) -> the position of the odd image (B,).

    Images are drawn with replacement from those with the indices `pool`.
    """

    n: int
    set_size: int
    key: int
    images: Images
    pool: Tensor

    def __len__(self) -> int:
        return self.n

    @cached_property
    def by_class(self) -> tuple[Tensor, Tensor, Tensor]:
        """Image indices sorted by class, and the start and the size of each class."""
        labels = self.images.labels[self.pool]
        counts = torch.bincount(labels, minlength=len(mnist.CLASSES))
        return self.pool[labels.argsort(stable=True)], counts.cumsum(0) - counts, counts

    def members(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Image indices of each set (B,S) and the position of the odd image (B,)."""
        num_classes = len(mnist.CLASSES)
        common = random_below(num_classes, fold_in(self.key, "common"), indices)
        odd = (common + 1 + random_below(num_classes - 1, fold_in(self.key, "odd"), indices)) % num_classes
        position = random_below(self.set_size, fold_in(self.key, "place"), indices)
        slots = torch.arange(self.set_size)
        classes = torch.where(slots == position[:, None], odd[:, None], common[:, None])
        ordered, starts, counts = self.by_class
        drawn = random_below(counts[classes], fold_in(self.key, "image"), indices[:, None] * self.set_size + slots)
        return ordered[starts[classes] + drawn], position

    def get_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        members, position = self.members(indices)
        pixels = self.images.images[members.flatten()]
        return mnist.NORMALIZE(pixels).view(*members.shape, -1), position


def load_odd_one_out(config: DataConfig, seed: int) -> Dataset:
    train_images, test_images = mnist.load_images("train"), mnist.load_images("t10k")
    shuffled = permutation(fold_in(seed, "set apart"), len(train_images))

    def sets(split: str, n: int, images: Images, pool: Tensor) -> OddSets:
        return OddSets(n, config.set_size, fold_in(seed, "oddity", split), images, pool)

    return Dataset(
        train=sets("train", config.limit or N_TRAIN, train_images, shuffled[N_HELD_OUT:]),
        validation=sets("validation", config.validation, train_images, shuffled[:N_HELD_OUT]),
        test=sets("test", N_TEST, test_images, torch.arange(len(test_images))),
        classes=(),
        normalize=None,
    )
