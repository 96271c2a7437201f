"""Handwritten digits with a small vision transformer whose tokens are made by two convolutions.

clearhead train mnist
takes      100 seconds on two processor cores, 54 for one epoch
reaches    99.27% after 2 epochs (with 4 heads; 118 seconds), 98.68% after one
"""

from clearhead.data.config import Augmentation, DataConfig
from clearhead.models.config import VisionConfig
from clearhead.training.config import OptimizerConfig, RunConfig, TrainingConfig


def mnist() -> RunConfig:
    return RunConfig(
        recipe="mnist",
        model=VisionConfig(
            width=64,
            depth=2,
            n_heads=2,
            hidden=128,
            image_size=28,
            channels=1,
            patch_size=4,
            n_classes=10,
            tokenizer="stem",
            readout="attention",
        ),
        data=DataConfig(name="mnist", augmentation=Augmentation(crop=2)),
        optimizer=OptimizerConfig(kind="muon", lr=3e-3, schedule="linear", warmup=50),
        training=TrainingConfig(epochs=2, batch_size=128, evaluate_every=100),
        objective="classes",
    )
