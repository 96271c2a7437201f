"""CIFAR-10 on a laptop CPU: a convolutional stem, two blocks of width 128, and Muon.

clearhead data get cifar10 && clearhead train cifar10-fast
Time: 42 min on 2 CPU cores
Test accuracy: 91.18% with test-time augmentation over six views

With --training.steps 900 --training.tta flip, the accuracy is 83.7% after 7 minutes.
"""

from clearhead.data import Augmentation
from clearhead.models.config import VisionConfig
from clearhead.tasks.images import Cifar10
from clearhead.training.config import OptimizerConfig, RunConfig, TrainingConfig

DATA = Cifar10(augmentation=Augmentation(crop=4, flip=True))


def cifar10_fast(data: Cifar10 = DATA) -> RunConfig:
    return RunConfig(
        recipe="cifar10-fast",
        model=VisionConfig(
            width=128,
            depth=2,
            num_heads=2,
            mlp_dim=256,
            image_size=data.image_size,
            in_channels=data.in_channels,
            patch_size=4,
            num_classes=data.num_classes,
            patch_embed="conv-stem",
            pooling="attention",
        ),
        data=data,
        optimizer=OptimizerConfig(name="muon", lr=3e-3, schedule="linear", warmup=100, weight_decay=0.1),
        training=TrainingConfig(epochs=14, batch_size=128, label_smoothing=0.1, tta="shift"),
    )
