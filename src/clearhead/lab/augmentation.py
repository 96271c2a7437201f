"""What random crops are good for, and what not. Trains two small vision transformers on a few handwritten digits."""

from collections.abc import Callable

import torch
from torch import Tensor

from clearhead.data.dataset import Examples
from clearhead.lab.claim import Claim, Result, at_least, at_most
from clearhead.lab.learning import one_thread
from clearhead.recipes.all import config_of
from clearhead.training.distributed import ALONE
from clearhead.training.loop import update
from clearhead.training.setup import Setup, set_up
from clearhead.training.signals import StopRequest
from clearhead.training.state import Standing

N_TEST = 2_000


def trained(crop: int, n_images: int, steps: int, seed: int) -> Setup:
    """The recipe `mnist`, smaller and with few images, with or without crops."""
    changes = {
        "seed": seed,
        "model.width": 32,
        "model.depth": 1,
        "data.limit": n_images,
        "data.augmentation.crop": crop,
        "training.steps": steps,
        "training.batch_size": min(100, n_images),
        "optimizer.warmup": 10,
    }
    setup, standing = set_up(config_of("mnist", changes), ALONE, shard=False, report=print), Standing()
    setup.model.train()
    while standing.step < steps:
        update(setup, standing, StopRequest())
    setup.model.eval()
    return setup


@torch.no_grad()
def right(setup: Setup, examples: Examples, change: Callable[[Tensor], Tensor] = lambda images: images) -> float:
    """The share of right answers for the first examples, perhaps changed."""
    images, labels = examples.take(torch.arange(min(N_TEST, len(examples))))
    assert setup.data.normalise is not None
    answers = setup.model(setup.data.normalise(change(images))).argmax(-1)
    return (answers == labels).double().mean().item()


def shifted(images: Tensor) -> Tensor:
    return images.roll((3, -3), dims=(2, 3))


def turned(images: Tensor) -> Tensor:
    return images.rot90(dims=(2, 3))


def run(*, seed: int = 0, n_images: int = 1_000, steps: int = 200, crop: int = 4) -> Result:
    """crop is how many pixels the images are moved by in training: 0 for the mistake that it makes no difference."""
    with one_thread():
        plain, moved = trained(0, n_images, steps, seed), trained(crop, n_images, steps, seed)
        data = plain.data
        gaps = [right(setup, data.train) - right(setup, data.test) for setup in (plain, moved)]
        on_shifted = [right(setup, data.test, shifted) for setup in (plain, moved)]
        on_turned = [right(setup, data.test, turned) for setup in (plain, moved)]
    return Result(
        (
            at_least("without crops: right in training less right in testing", gaps[0], 0.02),
            at_most("with crops: the same, over that without", gaps[1] / gaps[0], 0.7),
            at_least("shifted images: right with crops less right without", on_shifted[1] - on_shifted[0], 0.1),
            at_most("turned images: right with crops", on_turned[1], 0.4),
        )
    )


CLAIM = Claim(
    slug="augmentation",
    rows=("R0.10",),
    lesson="Masks, training and testing",
    statement="Random crops narrow the gap between training and testing and teach what a shift is, but not a turn.",
    mistake="Crop and flip make a model robust to rotation; or: augmentation makes no difference.",
    formula="gap = right answers on training images - right answers on new ones",
    run=run,
    try_next="clearhead lab augmentation --n-images 5000",
    least={"n_images": 100, "crop": 0},
    most={"n_images": 50_000, "crop": 14},
    trains=True,
)
