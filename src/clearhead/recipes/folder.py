"""Your own pictures: a folder for each class, with the pictures in it.

clearhead train folder --data.folder PATH
takes      depends on how many there are: ask with --dry-run
reaches    depends on what they show

PATH/cats/*.jpg, PATH/dogs/*.jpg ..., or the same below PATH/train/, PATH/val/ and PATH/test/. The classes are the names
of the folders. Where there is no test folder, a fifth of each class is kept for the test.
"""

from clearhead.data.config import Augmentation, DataConfig
from clearhead.models.config import VisionConfig
from clearhead.training.config import OptimizerConfig, RunConfig, TrainingConfig

BATCH_SIZE = 32


def folder(*, folder: str = "", image_size: int = 64) -> RunConfig:
    """The number of classes is the number of folders; without a folder, two. Few pictures make one small batch."""
    n_classes, n_pictures = counts(folder) if folder else (2, BATCH_SIZE)
    return RunConfig(
        recipe="folder",
        model=VisionConfig(
            width=128,
            depth=3,
            n_heads=4,
            hidden=256,
            image_size=image_size,
            patch_size=8,
            n_classes=n_classes,
            tokenizer="stem",
            readout="attention",
        ),
        data=DataConfig(
            name="folder", folder=folder, image_size=image_size, augmentation=Augmentation(crop=4, flip=True)
        ),
        optimizer=OptimizerConfig(kind="muon", lr=3e-3, schedule="linear", warmup=20),
        training=TrainingConfig(epochs=30, batch_size=min(BATCH_SIZE, n_pictures), label_smoothing=0.1, views="mirror"),
        objective="classes",
    )


def counts(folder: str) -> tuple[int, int]:
    """Classes, and pictures to learn from."""
    from clearhead.data.folder import divided, list_pictures  # imports torch

    listing = list_pictures(folder)
    train, _, n_validation = divided(listing, DataConfig.validation)
    return len(listing.classes), len(train) - n_validation
