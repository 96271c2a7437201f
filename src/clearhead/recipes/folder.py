"""Classify your own images, stored in one folder per class.

clearhead train folder --data.folder PATH
clearhead data show folder --data.folder PATH    write a contact sheet of the images as the model sees them
Time: depends on the number of images; estimate it with --dry-run
Test accuracy: depends on the images

PATH contains cats/*.jpg, dogs/*.jpg and so on, or train/, val/ and test/ with such folders inside. Folder names are
class names. Without a test folder, a fifth of each class becomes the test set.

The model takes square images. --data.fit pad (default) pads an image with the color of its border; crop takes the
largest centered square, which suits photos with a centered subject; stretch changes the aspect ratio. Prediction uses
the same preprocessing as training. If files cannot be read, training stops with an error that lists them;
--data.skip-invalid skips them and records their names in the checkpoints (data.skipped in state.json).
"""

from clearhead.data.datasets import Augmentation, DataConfig, Fit
from clearhead.models.config import VisionConfig
from clearhead.training.config import OptimizerConfig, RunConfig, TrainingConfig

BATCH_SIZE = 32


def folder(*, folder: str = "", image_size: int = 64, fit: Fit = "pad", skip_invalid: bool = False) -> RunConfig:
    """The folder determines the number of classes; the batch is at most as large as the training set."""
    data = DataConfig(
        name="folder",
        folder=folder,
        image_size=image_size,
        fit=fit,
        skip_invalid=skip_invalid,
        augmentation=Augmentation(crop=4, flip=True),
    )
    num_classes, num_train = count_images(data) if folder else (2, BATCH_SIZE)
    return RunConfig(
        recipe="folder",
        model=VisionConfig(
            width=128,
            depth=3,
            num_heads=4,
            mlp_dim=256,
            image_size=image_size,
            patch_size=8,
            num_classes=num_classes,
            patch_embed="conv-stem",
            pooling="attention",
        ),
        data=data,
        optimizer=OptimizerConfig(name="muon", lr=3e-3, schedule="linear", warmup=20),
        training=TrainingConfig(epochs=30, batch_size=min(BATCH_SIZE, num_train), label_smoothing=0.1, tta="flip"),
        objective="classification",
    )


def count_images(data: DataConfig) -> tuple[int, int]:
    """The number of classes and of training images; with `skip_invalid`, only images that can be read are counted."""
    from clearhead.data.folder import list_images, read_valid_images, split_indices  # imports torch

    listing = read_valid_images(data)[0] if data.skip_invalid else list_images(data.folder)
    train, _, n_validation = split_indices(listing, data.validation)
    return len(listing.classes), len(train) - n_validation
