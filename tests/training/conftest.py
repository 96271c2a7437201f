"""Runs of a dozen steps on random images, with everything on that draws random numbers."""

from dataclasses import replace

import pytest
import torch

from clearhead.data import datasets
from clearhead.data.config import Augmentation, DataConfig
from clearhead.data.dataset import DataSet, Images, Normalise
from clearhead.models.config import VisionConfig
from clearhead.training.config import OptimizerConfig, RunConfig, TrainingConfig

MODEL = VisionConfig(
    image_size=8, patch_size=4, channels=1, n_classes=3, width=8, depth=2, n_heads=2, tokenizer="convolutions"
)
CONFIG = RunConfig(
    recipe="test",
    model=replace(MODEL, dropout=0.2, attention_dropout=0.1, drop_path=0.1),
    data=DataConfig(name="mnist", augmentation=Augmentation(crop=1, flip=True, cutout=2, mixup=0.4)),
    optimizer=OptimizerConfig(kind="muon", lr=0.01, warmup=3),
    training=TrainingConfig(
        steps=12, batch_size=10, ema=0.8, log_every=5, evaluate_every=4, checkpoint_every=3, keep=20, accumulate=2
    ),
)


def random_images(n, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (n,), generator=generator)
    images = torch.randint(0, 100, (n, 1, 8, 8), generator=generator)
    return Images((images + 60 * labels[:, None, None, None]).to(torch.uint8), labels)


@pytest.fixture
def config(monkeypatch):
    data = DataSet(
        random_images(57, 0), random_images(13, 1), random_images(17, 2), ("a", "b", "c"), Normalise((0.5,), (0.2,))
    )
    monkeypatch.setattr(datasets, "load", lambda config, seed: data)
    return CONFIG
