"""Sets: `odd-one-out`, which of several MNIST images has another class than the rest."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from clearhead.data.options import Fit
from clearhead.data.user_files import MAX_LENGTH
from clearhead.models.config import PredictorConfig
from clearhead.tasks.images import read_pixels
from clearhead.tasks.sequences import check_pooling
from clearhead.tasks.task import Origin, Task, TrainedRun
from clearhead.validation import check_choice, check_int

if TYPE_CHECKING:
    from torch import Tensor

    from clearhead.data.dataset import Dataset
    from clearhead.tasks.objectives import Objective
    from clearhead.tasks.report import Example, Prediction

SIZE = 28
MIN_SET_SIZE = 3
"""of two images, neither is the odd one"""


@dataclass(frozen=True, kw_only=True)
class OddOneOut(Task):
    """Sets of MNIST images, one of another class: a score per image, softmax over the set."""

    name: ClassVar[str] = "odd-one-out"
    description: ClassVar[str] = "sets of MNIST images, one of another class"
    origin: ClassVar[Origin] = "embedded"
    model_config: ClassVar[type] = PredictorConfig
    derived: ClassVar[tuple[str, ...]] = ("in_features", "out_features", "context_length")
    input_kind: ClassVar[str] = "images"
    input_option: ClassVar[Literal["image", "ids", "text"]] = "image"
    unit: ClassVar[str] = "sets"
    takes_sets: ClassVar[bool] = True
    in_features: ClassVar[int] = SIZE * SIZE
    out_features: ClassVar[int] = 1

    set_size: int = 10
    """images per set"""
    fit: Fit = "pad"
    """how your own images are made square in prediction"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int(MIN_SET_SIZE, MAX_LENGTH, set_size=self.set_size)
        check_choice(fit=(self.fit, Fit))

    @property
    def context_length(self) -> int:
        return self.set_size

    @property
    def objective(self) -> "Objective":
        from clearhead.tasks.objectives import SetPointer

        return SetPointer()

    def read(self, seed: int) -> "Dataset":
        from clearhead.data.mnist import load_odd_one_out

        return load_odd_one_out(self.set_size, self.validation, self.limit, seed)

    def published_digests(self) -> dict[str, str]:
        from clearhead.data.mnist import DIGESTS

        return DIGESTS

    def check_model(self, model: Any) -> None:
        super().check_model(model)
        check_pooling(self.name, model, per_token=True)

    def next_commands(self, *, has_test: bool) -> list[str]:
        return ["predictions {}", *super().next_commands(has_test=has_test)]

    def encode(self, run: TrainedRun, inputs: Any, *, invert: bool) -> "Tensor":
        """Image files, or uint8 (S,1,28,28), of one set -> (S,784)"""
        from clearhead.data.mnist import NORMALIZE

        images = NORMALIZE(read_pixels(run, inputs, SIZE, 1, self.fit, invert=invert)).flatten(1)
        if len(images) < MIN_SET_SIZE:
            raise ValueError(f"a set needs at least {MIN_SET_SIZE} images, got {len(images)}")
        return images

    def probabilities(self, run: TrainedRun, images: "Tensor") -> Sequence[float]:
        """Of each image of a set (S,784)."""
        scores: list[float] = run.logits(images[None]).flatten().softmax(0).tolist()
        return scores

    def predict(self, run: TrainedRun, inputs: Any, *, invert: bool = False) -> "list[Prediction]":
        """ "odd" for the most probable image, the first of equals, else "-"."""
        from clearhead.tasks.report import Prediction

        probabilities = self.probabilities(run, self.encode(run, inputs, invert=invert))
        odd = probabilities.index(max(probabilities))
        return [Prediction("odd" if i == odd else "-", p, {"odd": p, "-": 1 - p}) for i, p in enumerate(probabilities)]

    def example(self, run: TrainedRun, inputs: Any, *, invert: bool = False) -> "Example":
        return self.set_example(run, self.encode(run, inputs, invert=invert))

    def set_example(self, run: TrainedRun, images: "Tensor") -> "Example":
        """Normalized images (S,784) of one set, of which each is a token."""
        from clearhead.tasks.report import Example

        probabilities, names = self.probabilities(run, images), tuple(f"image {i}" for i in range(len(images)))
        return Example(images[None], names[probabilities.index(max(probabilities))], tokens=names)

    def labeled_example(self, run: TrainedRun, inputs: "Tensor", target: "Tensor") -> "Example":
        example, odd = self.set_example(run, inputs), self.format_target(run, target)
        return example.with_target(odd, correct=example.prediction == odd)

    def format_target(self, run: TrainedRun, value: "Tensor") -> str:
        return f"image {int(value)}"
