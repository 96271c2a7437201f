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

from clearhead.data import Augmentation
from clearhead.models.config import VisionConfig
from clearhead.tasks.images import Folder
from clearhead.training.config import OptimizerConfig, RunConfig, TrainingConfig

DATA = Folder(augmentation=Augmentation(crop=4, flip=True))
BATCH_SIZE = 32


def folder(data: Folder = DATA) -> RunConfig:
    """Fewer images than a batch make one small batch."""
    return RunConfig(
        recipe="folder",
        model=VisionConfig(
            width=128,
            depth=3,
            num_heads=4,
            mlp_dim=256,
            image_size=data.image_size,
            in_channels=data.in_channels,
            patch_size=8,
            num_classes=data.num_classes,
            patch_embed="conv-stem",
            pooling="attention",
        ),
        data=data,
        optimizer=OptimizerConfig(name="muon", lr=3e-3, schedule="linear", warmup=20),
        training=TrainingConfig(
            epochs=30, batch_size=min(BATCH_SIZE, data.num_images), label_smoothing=0.1, tta="flip"
        ),
    )
