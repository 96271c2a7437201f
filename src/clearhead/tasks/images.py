"""Image classification: `mnist`, `fashion-mnist`, `cifar10`, and `folder` for the user's own images."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from clearhead.data import Augmentation, Fit
from clearhead.data.user_files import MAX_EXAMPLES, MAX_IMAGE_SIZE
from clearhead.messages import short_repr
from clearhead.models.config import VisionConfig
from clearhead.tasks.task import Origin, Task, TrainedRun
from clearhead.validation import check_bool, check_choice, check_int

if TYPE_CHECKING:
    from torch import Tensor

    from clearhead.data.batches import Batches
    from clearhead.data.dataset import Dataset, Examples
    from clearhead.data.downloads import CachedDataset
    from clearhead.tasks.objectives import Objective
    from clearhead.tasks.report import Example, Prediction


@dataclass(frozen=True, kw_only=True)
class ImageTask(Task):
    """One class per image."""

    model_config: ClassVar[type] = VisionConfig
    derived: ClassVar[tuple[str, ...]] = ("image_size", "in_channels", "num_classes")
    input_kind: ClassVar[str] = "images"
    input_option: ClassVar[Literal["image", "ids", "text"]] = "image"
    unit: ClassVar[str] = "images"
    can_be_drawn: ClassVar[bool] = False
    """whether visitors of the page can draw an input: gray, white on black"""
    license_notice: ClassVar[str] = ""
    """what files that contain images of this data set must say"""

    fit: Fit = "pad"
    """how an image is made square, in training and in prediction: pad it with the color of its border, crop the
    largest centered square, or stretch it"""
    augmentation: Augmentation = field(default_factory=Augmentation)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(fit=(self.fit, Fit))
        if not isinstance(self.augmentation, Augmentation):
            raise ValueError(f"augmentation must be an Augmentation, got {short_repr(self.augmentation)}")
        size = self.image_size
        if self.augmentation.crop > size:  # padding wider than the image would only waste memory on black crops
            raise ValueError(
                f"crop must be at most the {size} pixels of the image size, got {self.augmentation.crop}; "
                f"try crop={max(1, size // 8)}"
            )

    @property
    @abstractmethod
    def image_size(self) -> int:
        """Height and width of the images."""

    @property
    @abstractmethod
    def in_channels(self) -> int: ...

    @property
    @abstractmethod
    def num_classes(self) -> int: ...

    @property
    def objective(self) -> "Objective":
        from clearhead.tasks.objectives import Classification

        return Classification()

    def batches(self, data: "Dataset", batch_size: int, seed: int) -> "Batches":
        from clearhead.data.batches import Batches

        return Batches(data, batch_size, seed, augmentation=self.augmentation)

    def label_counts(self, model: VisionConfig) -> dict[str, int]:
        return {"classes": model.num_classes}

    def next_commands(self, *, has_test: bool) -> list[str]:
        return ["predict {} IMAGE", *super().next_commands(has_test=has_test)]

    def predict(self, run: TrainedRun, inputs: Any, *, invert: bool = False) -> "list[Prediction]":
        """Image files, or uint8 (B,C,height,width); `invert` swaps dark and light."""
        from clearhead.tasks.report import to_predictions

        assert run.normalize is not None
        pixels = read_pixels(run, inputs, self.image_size, self.in_channels, self.fit, invert=invert)
        return to_predictions(self.objective, run.logits(run.normalize(pixels)), run.classes)

    def example(self, run: TrainedRun, inputs: Any, *, invert: bool = False) -> "Example":
        """An image file, or uint8 (C,height,width)."""
        from clearhead.tasks.report import Example

        assert run.normalize is not None
        pixels = read_pixels(run, inputs, self.image_size, self.in_channels, self.fit, invert=invert)
        (prediction,) = self.predict(run, pixels)
        predicted = run.classes.index(prediction.label)
        return Example(run.normalize(pixels), str(prediction), image=pixels[0], predicted=predicted)

    def labeled_example(self, run: TrainedRun, inputs: "Tensor", target: "Tensor") -> "Example":
        example = self.example(run, inputs)
        return example.with_target(run.classes[int(target)], correct=example.predicted == int(target))


def read_pixels(run: TrainedRun, inputs: Any, size: int, channels: int, fit: Fit, *, invert: bool) -> "Tensor":
    """Image files, squared and resized as in training, or uint8 (C,H,W) or (B,C,H,W) -> uint8 (B,C,H,W)."""
    import torch

    from clearhead.data.images import read_image, resize

    if isinstance(inputs, torch.Tensor):
        if inputs.dim() < 3:
            raise ValueError(f"{run.path} takes images, got digits; pass image files")
        pixels = inputs[None] if inputs.dim() == 3 else inputs
    else:
        paths = [inputs] if isinstance(inputs, str | Path) else list(inputs)
        check_files(run, paths)
        images = [read_image(Path(path)) for path in paths]
        images = [image.convert("L") for image in images] if channels == 1 else images
        pixels = torch.stack([resize(image, size, fit)[:channels] for image in images])
    return 255 - pixels if invert else pixels


def check_files(run: TrainedRun, paths: Sequence[Any]) -> None:
    if not paths:
        raise ValueError("predict needs at least one input, got none")
    if not isinstance(paths[0], str | Path):
        raise ValueError(f"{run.path} takes images, got digits; pass image files")


@dataclass(frozen=True, kw_only=True)
class Mnist(ImageTask):
    """70,000 handwritten digits."""

    name: ClassVar[str] = "mnist"
    description: ClassVar[str] = "70,000 handwritten digits, 28 x 28"
    origin: ClassVar[Origin] = "embedded"
    can_be_drawn: ClassVar[bool] = True
    license_notice: ClassVar[str] = (
        "The example digits are from the MNIST database by Yann LeCun, Corinna Cortes and Christopher J.C. Burges, "
        "licensed under Creative Commons Attribution-Share Alike 3.0 (https://creativecommons.org/licenses/by-sa/3.0/)."
    )
    image_size: ClassVar[int] = 28
    in_channels: ClassVar[int] = 1
    num_classes: ClassVar[int] = 10

    def read(self, seed: int) -> "Dataset":
        from clearhead.data.image_datasets import load_mnist

        return load_mnist(self.validation, self.limit, seed)

    def published_digests(self) -> dict[str, str]:
        from clearhead.data.image_datasets import MNIST_DIGESTS

        return MNIST_DIGESTS


@dataclass(frozen=True, kw_only=True)
class FashionMnist(ImageTask):
    """70,000 images of clothes."""

    name: ClassVar[str] = "fashion-mnist"
    description: ClassVar[str] = "70,000 images of clothes, 28 x 28"
    origin: ClassVar[Origin] = "downloaded"
    image_size: ClassVar[int] = 28
    in_channels: ClassVar[int] = 1
    num_classes: ClassVar[int] = 10

    def read(self, seed: int) -> "Dataset":
        from clearhead.data.image_datasets import load_fashion_mnist

        return load_fashion_mnist(self.validation, self.limit, seed)

    @classmethod
    def download(cls) -> "CachedDataset":
        from clearhead.data.image_datasets import FASHION_MNIST

        return FASHION_MNIST


@dataclass(frozen=True, kw_only=True)
class Cifar10(ImageTask):
    """60,000 color photos."""

    name: ClassVar[str] = "cifar10"
    description: ClassVar[str] = "60,000 color photos of 10 classes, 32 x 32"
    origin: ClassVar[Origin] = "downloaded"
    image_size: ClassVar[int] = 32
    in_channels: ClassVar[int] = 3
    num_classes: ClassVar[int] = 10

    def read(self, seed: int) -> "Dataset":
        from clearhead.data.image_datasets import load_cifar10

        return load_cifar10(self.validation, self.limit, seed)

    @classmethod
    def download(cls) -> "CachedDataset":
        from clearhead.data.image_datasets import CIFAR10

        return CIFAR10


@dataclass(frozen=True, kw_only=True)
class Folder(ImageTask):
    """The user's own images, one folder per class."""

    name: ClassVar[str] = "folder"
    description: ClassVar[str] = "images, one folder per class"
    origin: ClassVar[Origin] = "your own"
    file_fields: ClassVar[tuple[str, ...]] = ("folder",)
    required: ClassVar[str] = "folder"
    example_path: ClassVar[str] = "images"
    options_not_shown: ClassVar[tuple[str, ...]] = ()
    in_channels: ClassVar[int] = 3

    folder: str = ""
    """path of the folder of images"""
    image_size: int = 64
    """height and width to which images are resized"""
    skip_invalid: bool = False
    """skip and list image files that cannot be read, instead of stopping with an error"""
    validation: int = 1000
    """training images held out for validation, chosen by the seed: at most a fifth of them, or the folder val/"""

    def __post_init__(self) -> None:
        check_int(1, MAX_IMAGE_SIZE, image_size=self.image_size)
        super().__post_init__()
        check_bool(skip_invalid=self.skip_invalid)

    @cached_property
    def counts(self) -> tuple[int, int]:
        """The number of classes and of training images; placeholders if there is no folder yet."""
        if not self.folder:
            return 2, MAX_EXAMPLES
        from clearhead.data.folder import count_images

        return count_images(self)

    @property
    def num_classes(self) -> int:
        return self.counts[0]

    def for_display(self) -> "Folder":
        """Split as in training, because the sizes of the splits are printed."""
        return self

    @property
    def num_images(self) -> int:
        """Training images, without those held out."""
        return min(self.counts[1], self.limit) if self.limit else self.counts[1]

    def read(self, seed: int) -> "Dataset":
        from clearhead.data.folder import load_folder

        return load_folder(self, seed)

    def digests(self) -> dict[str, str]:
        from clearhead.data.folder import digest

        return {self.folder: digest(self)}

    def format_input(self, run: TrainedRun, examples: "Examples", index: int) -> str | None:
        """The path of an image below the folder."""
        from clearhead.data.folder import file_names

        return file_names(self, examples)[index]
