"""`Task`: what a data set must define so that models can be trained, evaluated and used on it.

A task is a frozen dataclass. Its fields are the options of its data; its methods load the splits, name the loss, encode
the user's inputs and decode the model's outputs. To add one, subclass `Task` and list the subclass in
clearhead/tasks/__init__.py; docs/adding-a-task.md shows a complete example. `CustomData` is the task of
`clearhead.fit`, which takes the user's own data and module.

Importing this module does not import torch: configs are read before it is needed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from clearhead.data.user_files import MAX_EXAMPLES, check_user_file
from clearhead.files import sha256
from clearhead.models.config import MAX_NAME, ModuleConfig
from clearhead.validation import check_choice, check_int, check_paths

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure
    from torch import Tensor, nn

    from clearhead.data.batches import Batches
    from clearhead.data.dataset import Dataset, Examples, Normalize
    from clearhead.data.downloads import CachedDataset
    from clearhead.insight.trace import AttentionTrace
    from clearhead.tasks.objectives import Objective
    from clearhead.tasks.report import Example, Outputs, Prediction, Report

Origin = Literal["generated", "embedded", "downloaded", "your own"]
"""generated on the fly, embedded in the package, downloaded by `clearhead data get`, or the user's own files"""
PartName = Literal["validation", "test"]
DataKind = Literal["tensors", "dataset", "batches"]


class TrainedRun(Protocol):
    """What a task needs of a run in order to apply its model: `clearhead.inference.run.Run` implements it."""

    path: Path
    model: "nn.Module"
    classes: tuple[str, ...]
    vocab: tuple[str, ...]
    normalize: "Normalize | None"

    @property
    def model_config(self) -> Any:
        """The config that the model was built from."""
        ...

    @property
    def eval_batch_size(self) -> int: ...

    def logits(self, inputs: "Tensor") -> "Tensor":
        """The model's outputs for encoded inputs, averaged over the views of test-time augmentation."""
        ...

    def check_data_files(self) -> None:
        """ValueError if the user's own files have changed since training."""
        ...


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A data set by its name, with its options as fields."""

    name: ClassVar[str]
    description: ClassVar[str]
    origin: ClassVar[Origin]
    model_config: ClassVar[type]
    """the config class of the models for this task"""
    derived: ClassVar[tuple[str, ...]] = ()
    """fields of the model's config that the data determines; the task has an attribute of the same name for each"""
    file_fields: ClassVar[tuple[str, ...]] = ()
    """options that hold paths of the user's own files or folder"""
    required: ClassVar[str] = ""
    """the option without which there is no data"""
    example_path: ClassVar[str] = ""
    """a value of the required option, for the examples in help texts"""
    options_not_shown: ClassVar[tuple[str, ...]] = ("validation", "limit", "window")
    """options that make no difference to `clearhead data show`"""
    input_kind: ClassVar[str] = ""
    """what `predict` and `look` accept, for messages: images, digits, words or text"""
    input_option: ClassVar[Literal["image", "ids", "text"]] = "ids"
    """the option of `clearhead look` that takes such an input"""
    unit: ClassVar[str] = "sequences"
    """what a report of predictions counts"""
    takes_sets: ClassVar[bool] = False
    """whether several images are one input"""
    has_test: ClassVar[bool] = True

    validation: int = 1000
    """training examples held out for validation, chosen by the seed"""
    limit: int = 0
    """number of training examples to use; 0 for all"""

    def __post_init__(self) -> None:
        check_int(0, MAX_EXAMPLES, validation=self.validation, limit=self.limit)
        check_paths(**{name: getattr(self, name) for name in self.file_fields})

    # The data

    @abstractmethod
    def read(self, seed: int) -> "Dataset":
        """The three splits. The seed selects the held-out training examples."""

    def load(self, seed: int) -> "Dataset":
        """The three splits, with digests of the user's own files."""
        data = self.read(seed)
        return data if data.files else replace(data, files=self.digests())

    def batches(self, data: "Dataset", batch_size: int, seed: int) -> "Batches":
        """The training batches."""
        from clearhead.data.batches import Batches

        return Batches(data, batch_size, seed)

    def digests(self) -> dict[str, str]:
        """SHA-256 of each of the user's own files that the task reads, by path."""
        paths = [getattr(self, name) for name in self.file_fields]
        return {path: sha256(check_user_file(path)) for path in paths if path}

    def check_complete(self) -> None:
        """ValueError if an option is missing that has no default."""
        if self.required and not getattr(self, self.required):
            raise ValueError(
                f"data.{self.required} is empty; run: clearhead train {self.name} --data.{self.required} PATH"
            )

    @classmethod
    def example_options(cls) -> str:
        """The required option with an example of its value."""
        return f" --data.{cls.required} {cls.example_path}" if cls.required else ""

    @classmethod
    def download(cls) -> "CachedDataset | None":
        """The files that `clearhead data get` downloads."""
        return None

    def published_digests(self) -> dict[str, str]:
        """SHA-256 of each file of an embedded or downloaded data set, with which it is compared when it is read."""
        dataset = self.download()
        return {} if dataset is None else dataset.digests

    def for_display(self) -> "Task":
        """The task whose training examples `clearhead data show` shows: none are held out."""
        return replace(self, validation=0)

    def to_dict(self) -> dict[str, Any]:
        """The options as plain values for JSON, with the task's name."""
        return {"name": self.name} | asdict(self)

    # The model

    @property
    @abstractmethod
    def objective(self) -> "Objective":
        """The loss, and which predictions are correct."""

    def check_model(self, model: Any) -> None:
        """ValueError unless a model config agrees with the data."""
        if not isinstance(model, self.model_config):
            raise ValueError(f"{self.name} needs a {self.model_config.__name__}, got a {type(model).__name__}")
        for field in self.derived:
            expected, actual = getattr(self, field), getattr(model, field)
            if actual not in (expected, (expected, expected)):  # an image size may be written as a pair
                raise ValueError(f"{field} is {expected} for {self.name}, got {field}={actual}")

    def label_counts(self, model: Any) -> dict[str, int]:
        """How many `classes` and tokens of `vocab` the checkpoint of a model must name."""
        return {}

    # Messages of training

    def describe(self, data: "Dataset") -> str:
        """The sizes of the splits."""
        splits = {"training": data.train, "validation": data.validation, "test": data.test}
        sizes = ", ".join(f"{len(examples):,} {name}" for name, examples in splits.items())
        return f"{self.name}: {sizes} examples"

    def resume_hint(self, path: Path) -> str:
        """How a run that was stopped continues."""
        return f"continue with: clearhead resume {path}"

    # Use of a trained model

    def next_commands(self, *, has_test: bool) -> list[str]:
        """Subcommands of `clearhead` that use a trained run; {} stands for its path."""
        return [*(["look {} --sample 0"] if has_test else []), "curves {}"]

    def predict(self, run: TrainedRun, inputs: Any, *, invert: bool = False) -> "list[Prediction]":
        """Predictions for the user's own inputs."""
        raise ValueError(f"{run.path} has no predictions for single inputs; evaluate it with: clearhead evaluate")

    def input_warning(self, run: TrainedRun, inputs: Any) -> str:
        """A reason to doubt the prediction for these inputs; "" if there is none."""
        return ""

    def example(self, run: TrainedRun, inputs: Any, *, invert: bool = False) -> "Example":
        """One of the user's own inputs, to look at the attention."""
        raise ValueError(f"{run.path} has no single inputs to look at")

    def labeled_example(self, run: TrainedRun, inputs: "Tensor", target: "Tensor") -> "Example":
        """An example of the data, with its target. Both without a batch dimension."""
        raise ValueError(f"{run.path} has no examples to look at")

    def trace(self, run: TrainedRun, example: "Example") -> "AttentionTrace":
        """The attention of every layer for an example."""
        from clearhead.insight.trace import look

        return look(run.model, example.inputs)

    def figures(self, run: TrainedRun, example: "Example") -> "Iterator[tuple[str, str, Figure]] | None":
        """(file name, title, figure) for each figure of an example; None for the usual ones."""
        return None

    def format_input(self, run: TrainedRun, examples: "Examples", index: int) -> str | None:
        """The input of an example as text; None if it has no text."""
        return None

    def format_target(self, run: TrainedRun, value: "Tensor") -> str:
        """A target or a prediction as text: the name of a class, or of the class of each token."""
        return " ".join(run.classes[int(i)] for i in value.flatten())

    def evaluate(self, run: TrainedRun, part: PartName, measure: Callable[[], dict[str, float]]) -> dict[str, Any]:
        """The metrics of a part. `measure` computes loss and accuracy."""
        return measure()

    def report(
        self, run: TrainedRun, part: PartName, n: int, collect: "Callable[[], Outputs]", before: Callable[[], None]
    ) -> "Report":
        """The first n predictions of a part and its n most confident mistakes.

        `collect` runs the model on all examples. `before` is called before the work begins, which may take minutes.
        """
        from clearhead.tasks.report import report_examples

        return report_examples(self, run, collect(), n)

    def show_examples(self, data: "Dataset", seed: int) -> Sequence[str]:
        """Lines of text that show some training examples; none if a contact sheet shows them."""
        return ()


def changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Paths whose digests differ between the two mappings. Paths missing from `before` do not count."""
    return [path for path, digest in now.items() if before.get(path, digest) != digest]


@dataclass(frozen=True, kw_only=True)
class CustomData(Task):
    """What `clearhead.fit` was given as train_data, val_data and test_data.

    A run holds the description of the module and the data only, never code that is executed: whoever opens or resumes
    it passes them again.
    """

    name: ClassVar[str] = "custom"
    description: ClassVar[str] = "a data set of your own, for clearhead.fit"
    origin: ClassVar[Origin] = "your own"
    model_config: ClassVar[type] = ModuleConfig
    input_kind: ClassVar[str] = "the inputs of your own model"
    input_option: ClassVar[Literal["image", "ids", "text"]] = "ids"

    kind: DataKind = "tensors"
    """a pair of tensors, a map-style dataset, or an iterable of batches"""
    source: str = ""
    """the class of train_data"""
    validation: int = 0
    """examples of val_data; of an iterable, batches, or 1 if their number is unknown"""
    train: int = 0
    """training examples; of an iterable, batches; 0 if their number is unknown"""
    test: int = 0
    """the same as `validation`, of test_data"""

    def __post_init__(self) -> None:
        check_choice(kind=(self.kind, DataKind))
        check_int(0, train=self.train, validation=self.validation, test=self.test, limit=self.limit)
        if not isinstance(self.source, str) or len(self.source) > MAX_NAME:
            raise ValueError(f"source must be the name of a class, got {self.source!r:.60}")

    @property
    def has_test(self) -> bool:  # type: ignore[override]
        return self.test > 0

    def read(self, seed: int) -> "Dataset":
        raise ValueError("the data of a run of clearhead.fit is not stored; pass it to clearhead.fit")

    @property
    def objective(self) -> "Objective":
        raise ValueError("the loss of a run of clearhead.fit is not stored; pass it to clearhead.fit")

    def check_complete(self) -> None:
        raise ValueError(
            "this run was trained with your own model and data, which it does not contain; continue it with: "
            "clearhead resume RUN --model FILE.py:NAME --data FILE.py:NAME, or in Python with "
            "clearhead.fit(..., resume=True)"
        )

    def describe(self, data: "Dataset") -> str:
        units = {"tensors": "examples", "dataset": "examples", "batches": "batches"}
        train = f"{self.train:,} training {units[self.kind]}" if self.train else "an unknown number of batches"
        others = [f"{n:,} {name}" for name, n in (("validation", self.validation), ("test", self.test)) if n]
        return f"{self.source}: {', '.join([train, *others])}"

    def resume_hint(self, path: Path) -> str:
        return (
            f"continue with fit(..., resume=True), or: clearhead resume {path} --model FILE.py:NAME --data FILE.py:NAME"
        )

    def next_commands(self, *, has_test: bool) -> list[str]:
        return ["curves {}"]

    def predict(self, run: TrainedRun, inputs: Any, *, invert: bool = False) -> "list[Prediction]":
        raise ValueError(f"{run.path} has a model of your own, which defines its inputs and outputs; call run.model")

    def evaluate(self, run: TrainedRun, part: PartName, measure: "Callable[[], Any]") -> dict[str, Any]:
        raise ValueError(f"{run.path} does not contain its data; run.metrics has what training measured")

    def example(self, run: TrainedRun, inputs: Any, *, invert: bool = False) -> "Example":
        from clearhead.tasks.report import Example

        return Example(inputs, prediction="")

    def trace(self, run: TrainedRun, example: "Example") -> "AttentionTrace":
        from clearhead.insight.trace import look
        from clearhead.tasks.objectives import call_model

        return call_model(lambda *args, **kwargs: look(run.model, *args, **kwargs), example.inputs)
