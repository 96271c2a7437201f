"""`odd-one-out`: sets of MNIST images of one class, with one of another class among them. Which one?

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
SET_APART = 5_000
"""MNIST's training images that only validation sets are made of"""


@dataclass(frozen=True, eq=False)
class OddSets:
    """Set i of a stream of its own, drawn from the images at `chosen`: float (B,S,784) -> the odd one's place (B,).

    Images are drawn with replacement.
    """

    n: int
    set_size: int
    key: int
    images: Images
    chosen: Tensor

    def __len__(self) -> int:
        return self.n

    @cached_property
    def by_class(self) -> tuple[Tensor, Tensor, Tensor]:
        """The chosen images sorted by class; where each class starts; how many it has."""
        labels = self.images.labels[self.chosen]
        counts = torch.bincount(labels, minlength=len(mnist.CLASSES))
        return self.chosen[labels.argsort(stable=True)], counts.cumsum(0) - counts, counts

    def members(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The images of each set, by number (B,S), and the place of the odd one (B,)."""
        num_classes = len(mnist.CLASSES)
        common = random_below(num_classes, fold_in(self.key, "common"), indices)
        odd = (common + 1 + random_below(num_classes - 1, fold_in(self.key, "odd"), indices)) % num_classes
        place = random_below(self.set_size, fold_in(self.key, "place"), indices)
        slots = torch.arange(self.set_size)
        classes = torch.where(slots == place[:, None], odd[:, None], common[:, None])
        ordered, starts, counts = self.by_class
        drawn = random_below(counts[classes], fold_in(self.key, "image"), indices[:, None] * self.set_size + slots)
        return ordered[starts[classes] + drawn], place

    def get_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        members, place = self.members(indices)
        pixels = self.images.images[members.flatten()]
        return mnist.NORMALIZE(pixels).view(*members.shape, -1), place


def load_odd_one_out(config: DataConfig, seed: int) -> Dataset:
    images, unseen = mnist.digits("train"), mnist.digits("t10k")
    mixed = permutation(fold_in(seed, "set apart"), len(images))

    def sets(split: str, n: int, drawn_from: Images, chosen: Tensor) -> OddSets:
        return OddSets(n, config.set_size, fold_in(seed, "oddity", split), drawn_from, chosen)

    return Dataset(
        train=sets("train", config.limit or N_TRAIN, images, mixed[SET_APART:]),
        validation=sets("validation", config.validation, images, mixed[:SET_APART]),
        test=sets("test", N_TEST, unseen, torch.arange(len(unseen))),
        classes=(),
        normalize=None,
    )
