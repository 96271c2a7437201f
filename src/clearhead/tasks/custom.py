"""`CustomData`: the user's own data and module, trained by `clearhead.fit`. A run holds their description only.

A run never contains code that is executed: whoever opens or resumes it passes the module and the data again.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from clearhead.models.config import MAX_NAME, ModuleConfig
from clearhead.tasks.task import Origin, PartName, Task, TrainedRun
from clearhead.validation import check_choice, check_int

if TYPE_CHECKING:
    from collections.abc import Callable

    from clearhead.data.dataset import Dataset
    from clearhead.insight.trace import AttentionTrace
    from clearhead.tasks.objectives import Objective
    from clearhead.tasks.report import Example, Prediction

DataKind = Literal["tensors", "dataset", "batches"]


@dataclass(frozen=True, kw_only=True)
class CustomData(Task):
    """What `clearhead.fit` was given as train_data, val_data and test_data."""

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
