"""MNIST with a small vision transformer: a convolutional stem, two blocks of width 64, and Muon.

clearhead train mnist
Time: 75 s on 2 CPU cores
Test accuracy: 99.05% (98.7% in 48 s with --training.steps 340; 99.2% in 116 s with --training.steps 700)

clearhead train mnist --training.epochs 15 --training.evaluate-every 0 --training.ema 0.999
    --optimizer.weight-decay 0.05 --data.augmentation.cutout 6
Test accuracy: 99.66% in 17 minutes
"""

from clearhead.data import Augmentation
from clearhead.models.config import VisionConfig
from clearhead.tasks.images import ImageTask, Mnist
from clearhead.training.config import OptimizerConfig, RunConfig, TrainingConfig

DATA = Mnist(augmentation=Augmentation(crop=2))


def mnist(data: ImageTask = DATA) -> RunConfig:
    return RunConfig(
        recipe="mnist",
        model=VisionConfig(
            width=64,
            depth=2,
            num_heads=2,
            mlp_dim=128,
            image_size=data.image_size,
            in_channels=data.in_channels,
            patch_size=4,
            num_classes=data.num_classes,
            patch_embed="conv-stem",
            pooling="attention",
        ),
        data=data,
        optimizer=OptimizerConfig(name="muon", lr=3e-3, schedule="linear", warmup=50),
        training=TrainingConfig(epochs=1, batch_size=128, evaluate_every=100),
    )
