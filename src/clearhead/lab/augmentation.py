"""What random crops achieve and what they do not. Trains small vision transformers on a few handwritten digits."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from clearhead.data.dataset import Examples
from clearhead.lab.claim import Claim, Curve, Result, at_least, at_most
from clearhead.lab.learning import mean_over_seeds, one_thread, train_recipe
from clearhead.training.setup import Setup

N_TEST = 2_000
IMAGES = ("training images", "test images", "shifted test images", "rotated test images")


def trained(crop: int, n_images: int, steps: int, seed: int) -> Setup:
    """The recipe `mnist` with a smaller model without convolutions and with few images, with or without crops."""
    changes = {
        "seed": seed,
        "model.tokenizer": "patches",
        "model.patch_size": 7,
        "model.width": 32,
        "model.hidden": 64,
        "model.depth": 1,
        "data.limit": n_images,
        "data.augmentation.crop": crop,
        "training.batch_size": min(100, n_images),
        "optimizer.lr": 2e-2,
        "optimizer.warmup": 10,
    }
    return train_recipe("mnist", changes, steps)


@torch.no_grad()
def right(setup: Setup, examples: Examples, change: Callable[[Tensor], Tensor] = lambda images: images) -> float:
    """The accuracy on the first examples, perhaps changed."""
    images, labels = examples.take(torch.arange(min(N_TEST, len(examples))))
    assert setup.data.normalise is not None
    answers = setup.model(setup.data.normalise(change(images))).argmax(-1)
    return (answers == labels).double().mean().item()


def shifted(images: Tensor) -> Tensor:
    return images.roll((3, -3), dims=(2, 3))


def turned(images: Tensor) -> Tensor:
    return images.rot90(dims=(2, 3))


def accuracies(crop: int, n_images: int, steps: int, seed: int) -> list[float]:
    """Of one trained model: on its training images, on test images, and on shifted and turned test images."""
    setup = trained(crop, n_images, steps, seed)
    test = setup.data.test
    return [right(setup, setup.data.train), right(setup, test), right(setup, test, shifted), right(setup, test, turned)]


def run(*, seed: int = 0, num_seeds: int = 3, n_images: int = 500, steps: int = 400, crop: int = 3) -> Result:
    """crop is the number of pixels by which training images are moved; 0 asks whether it makes a difference."""

    def measured(crop: int) -> list[float]:
        return mean_over_seeds(lambda each: accuracies(crop, n_images, steps, each), seed, num_seeds)

    with one_thread():
        plain, moved = measured(0), measured(crop)
    gap = plain[0] - plain[1]
    left = (moved[0] - moved[1]) / gap if gap > 0 else math.nan
    checks = (
        at_least("without crops: training accuracy minus test accuracy", gap, 0.1),
        at_most("with crops: this gap, relative to that without", left, 0.6),
        at_least("with crops: test accuracy minus that without", moved[1] - plain[1], 0.05),
        at_least("shifted test images: accuracy with crops minus without", moved[2] - plain[2], 0.2),
        at_most("test images rotated by 90 degrees: accuracy with crops", moved[3], 0.4),
    )
    images = tuple(float(i) for i in range(len(IMAGES)))
    return Result(
        checks,
        (
            Curve(", ".join(IMAGES), "without crops", images, tuple(plain)),
            Curve(", ".join(IMAGES), "with crops", images, tuple(moved)),
        ),
    )


CLAIM = Claim(
    slug="augmentation",
    rows=("R0.10",),
    lesson="Masks, training and testing",
    statement="Random crops narrow the gap between training and test accuracy and make a model robust to shifts, but "
    "not to rotation.",
    mistake="Crop and flip make a model robust to rotation; or: augmentation makes no difference.",
    formula="gap = training accuracy - test accuracy",
    conditions="A small vision transformer without convolutions, trained on 500 MNIST images for 400 steps. "
    "Float32, the mean of three seeds.",
    run=run,
    try_next="clearhead lab augmentation --n-images 5000",
    least={"n_images": 100, "crop": 0},
    most={"n_images": 50_000, "crop": 14},
    trains=True,
    seconds=25,
)
