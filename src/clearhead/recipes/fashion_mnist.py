"""Fashion-MNIST with the model of the recipe `mnist`, trained for five epochs.

clearhead data get fashion-mnist && clearhead train fashion-mnist
Time: 9 min 34 s on 1 CPU core
Test accuracy: 91.89% with test-time augmentation over each image and its mirror image
"""

from dataclasses import replace

from clearhead.data.datasets import Augmentation, DataConfig
from clearhead.recipes.mnist import mnist
from clearhead.training.config import RunConfig, TrainingConfig


def fashion_mnist() -> RunConfig:
    return replace(
        mnist(),
        recipe="fashion-mnist",
        data=DataConfig(name="fashion-mnist", augmentation=Augmentation(crop=2, flip=True)),
        training=TrainingConfig(epochs=5, batch_size=128, label_smoothing=0.1, tta="flip"),
    )
