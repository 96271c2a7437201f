"""Sequences of digits and sets of images, for the sequence predictor.

`reverse` has a prediction for each digit, and `digits` has one prediction for the sequence. `odd-one-out` asks which of
several MNIST images has another class than the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from clearhead.data import Fit, Question
from clearhead.data.user_files import MAX_LENGTH
from clearhead.models.config import PredictorConfig
from clearhead.tasks.images import read_pixels
from clearhead.tasks.task import Origin, Task, TrainedRun
from clearhead.validation import check_choice, check_int

if TYPE_CHECKING:
    from torch import Tensor

    from clearhead.data.dataset import Dataset, Examples
    from clearhead.tasks.objectives import Objective
    from clearhead.tasks.report import Example, Prediction

NUM_DIGITS = 10
HINT = "pass one sequence of digits: --ids 3 1 4, or run.predict([3, 1, 4])"
SIZE = 28
MIN_SET_SIZE = 3
"""of two images, neither is the odd one"""


@dataclass(frozen=True, kw_only=True)
class DigitTask(Task):
    """A sequence of digits as input."""

    origin: ClassVar[Origin] = "generated"
    model_config: ClassVar[type] = PredictorConfig
    derived: ClassVar[tuple[str, ...]] = ("in_features", "out_features", "context_length")
    input_kind: ClassVar[str] = "digits"
    input_option: ClassVar[Literal["image", "ids", "text"]] = "ids"
    in_features: ClassVar[int] = NUM_DIGITS

    @property
    def context_length(self) -> int:
        """Digits per sequence."""
        raise NotImplementedError

    def next_commands(self, *, has_test: bool) -> list[str]:
        digits = islice(cycle("3141592653589793"), self.context_length)
        return [f"predict {{}} --ids {' '.join(digits)}", *super().next_commands(has_test=has_test)]

    def example(self, run: TrainedRun, inputs: Any, *, invert: bool = False) -> "Example":
        import torch

        from clearhead.tasks.report import Example

        labels = " ".join(prediction.label for prediction in self.predict(run, inputs))
        ids = check_digits(run, inputs)
        return Example(torch.tensor([ids]), labels, tokens=tuple(map(str, ids)))

    def labeled_example(self, run: TrainedRun, inputs: "Tensor", target: "Tensor") -> "Example":
        example, label = self.example(run, inputs.tolist()), self.format_target(run, target)
        return example.with_target(label, correct=example.prediction == label)

    def format_input(self, run: TrainedRun, examples: "Examples", index: int) -> str | None:
        import torch

        inputs, _ = examples.get_batch(torch.tensor([index]))
        return " ".join(map(str, inputs[0].tolist()))

    def input_warning(self, run: TrainedRun, inputs: Any) -> str:
        length = self.context_length
        if len(inputs) == length:
            return ""
        return (
            f"{run.path} was trained on sequences of {length} digits, got {len(inputs)}; its prediction is unreliable"
        )

    def show_examples(self, data: "Dataset", seed: int) -> Sequence[str]:
        import torch

        ids, targets = data.train.get_batch(torch.arange(10))
        return [
            f"{' '.join(map(str, row))}   ->   "
            + (" ".join(map(str, target)) if isinstance(target, list) else f"{target:g}")
            for row, target in zip(ids.tolist(), targets.tolist(), strict=True)
        ]


def check_digits(run: TrainedRun, inputs: Any) -> list[int]:
    """One sequence of digits as a list; ValueError for anything else."""
    if isinstance(inputs, str | Path):
        raise ValueError(f"{run.path} takes digits, got {str(inputs)!r}; {HINT}")
    if getattr(inputs, "ndim", 1) > 1:
        raise ValueError(f"{run.path} takes digits, got images; {HINT}")
    ids: list[Any] = inputs.tolist() if hasattr(inputs, "tolist") else list(inputs)
    if not ids:
        raise ValueError("predict needs at least one input, got none")
    if not isinstance(ids[0], int | list):
        raise ValueError(f"{run.path} takes digits, got {str(ids[0])!r}; {HINT}")
    if not all(isinstance(n, int) for n in ids):
        raise ValueError("digits are one sequence of integers, such as [3, 1, 4]; call predict once for each sequence")
    if invalid := [n for n in ids if not 0 <= n < NUM_DIGITS]:
        raise ValueError(f"ids must be from 0 to {NUM_DIGITS - 1}, got {invalid[0]}")
    return ids


@dataclass(frozen=True, kw_only=True)
class Reverse(DigitTask):
    """Random digits and their reversal."""

    name: ClassVar[str] = "reverse"
    description: ClassVar[str] = "random digits and their reversal"
    out_features: ClassVar[int] = NUM_DIGITS

    length: int = 16
    """digits per sequence"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int(1, MAX_LENGTH, length=self.length)

    @property
    def context_length(self) -> int:
        return self.length

    @property
    def objective(self) -> "Objective":
        from clearhead.tasks.objectives import TokenClassification

        return TokenClassification()

    def read(self, seed: int) -> "Dataset":
        from clearhead.data.sequences import load_reverse

        return load_reverse(self.length, self.validation, self.limit, seed)

    def check_model(self, model: Any) -> None:
        super().check_model(model)
        check_pooling(self.name, model, per_token=True)

    def label_counts(self, model: PredictorConfig) -> dict[str, int]:
        return {"classes": model.out_features}

    def predict(self, run: TrainedRun, inputs: Any, *, invert: bool = False) -> "list[Prediction]":
        """A prediction for each digit."""
        import torch

        from clearhead.tasks.report import to_predictions

        logits = run.logits(torch.tensor([check_digits(run, inputs)]))
        return to_predictions(self.objective, logits[0], run.classes)


@dataclass(frozen=True, kw_only=True)
class Digits(DigitTask):
    """Random digits and a question about them."""

    name: ClassVar[str] = "digits"
    description: ClassVar[str] = "random digits and a question about them"

    question: Question = "most-common"
    """the question to answer about the digits"""
    length: int | None = None
    """digits per sequence; none for 16, or 8 with the question repeat, because of 16 digits one always repeats"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(question=(self.question, Question))
        check_int(1, MAX_LENGTH, length=self.context_length)
        if self.question == "repeat" and not 2 <= self.context_length <= NUM_DIGITS:
            raise ValueError(
                "question=repeat requires 2 to 10 digits, because more digits always repeat; "
                f"got length={self.length}; try length=8"
            )

    @property
    def context_length(self) -> int:
        if self.length is not None:
            return self.length
        return 8 if self.question == "repeat" else 16

    @property
    def out_features(self) -> int:
        return NUM_DIGITS if self.question == "most-common" else 1

    @property
    def objective(self) -> "Objective":
        from clearhead.tasks.objectives import BinaryClassification, Classification, Regression

        return {"most-common": Classification(), "repeat": BinaryClassification(), "sum": Regression()}[self.question]

    def read(self, seed: int) -> "Dataset":
        from clearhead.data.sequences import load_digits

        return load_digits(self.question, self.context_length, self.validation, self.limit, seed)

    def check_model(self, model: Any) -> None:
        super().check_model(model)
        check_pooling(self.name, model, per_token=False)

    def label_counts(self, model: PredictorConfig) -> dict[str, int]:
        return {"most-common": {"classes": model.out_features}, "repeat": {"classes": 2}, "sum": {}}[self.question]

    def predict(self, run: TrainedRun, inputs: Any, *, invert: bool = False) -> "list[Prediction]":
        """One prediction for the sequence."""
        import torch

        from clearhead.tasks.report import to_predictions

        logits = run.logits(torch.tensor([check_digits(run, inputs)]))
        if logits.shape != (1, self.out_features):
            raise ValueError(
                f"digits with question={self.question} needs a model with {self.out_features} outputs, got outputs of "
                f"shape {tuple(logits.shape)} from {run.path}"
            )
        return to_predictions(self.objective, logits, run.classes)

    def labeled_example(self, run: TrainedRun, inputs: "Tensor", target: "Tensor") -> "Example":
        if self.question != "sum":
            return super().labeled_example(run, inputs, target)
        from clearhead.data.batches import Batch

        batch = Batch(inputs[None], target[None], None, None, 1)
        correct = bool(self.objective.correct(run.logits(batch.inputs), batch))
        return self.example(run, inputs.tolist()).with_target(f"{float(target):g}", correct=correct)

    def format_target(self, run: TrainedRun, value: "Tensor") -> str:
        return f"{float(value):.4g}" if self.question == "sum" else super().format_target(run, value)


def check_pooling(name: str, model: PredictorConfig, *, per_token: bool) -> None:
    """A prediction for each token needs a model without pooling, and the other way round."""
    if (model.pooling == "none") != per_token:
        expected = "none" if per_token else "mean, cls or attention"
        raise ValueError(f"{name} needs pooling={expected}, got {model.pooling}")


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
        from clearhead.data.image_datasets import load_odd_one_out

        return load_odd_one_out(self.set_size, self.validation, self.limit, seed)

    def published_digests(self) -> dict[str, str]:
        from clearhead.data.image_datasets import MNIST_DIGESTS

        return MNIST_DIGESTS

    def check_model(self, model: Any) -> None:
        super().check_model(model)
        check_pooling(self.name, model, per_token=True)

    def next_commands(self, *, has_test: bool) -> list[str]:
        return ["predictions {}", *super().next_commands(has_test=has_test)]

    def encode(self, run: TrainedRun, inputs: Any, *, invert: bool) -> "Tensor":
        """Image files, or uint8 (S,1,28,28), of one set -> (S,784)"""
        from clearhead.data.image_datasets import MNIST_NORMALIZE

        images = MNIST_NORMALIZE(read_pixels(run, inputs, SIZE, 1, self.fit, invert=invert)).flatten(1)
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
