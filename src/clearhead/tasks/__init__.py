"""Tasks: a data set with everything that depends on it, from its splits and its loss to how a prediction is shown.

`TASKS` lists them by name. To add one, write its class in a file of this package and list it here. Importing a task
does not import torch.
"""

from typing import TYPE_CHECKING, Any

from clearhead.lazy import lazy_exports
from clearhead.messages import MAX_REPR_LENGTH, short_repr, unknown_name
from clearhead.tasks.images import Cifar10, FashionMnist, Folder, Mnist
from clearhead.tasks.language import Text, Words
from clearhead.tasks.pronounce import Pronounce
from clearhead.tasks.sequences import Digits, OddOneOut, Reverse
from clearhead.tasks.task import CustomData, Task

if TYPE_CHECKING:
    from clearhead.tasks.images import ImageTask as ImageTask
    from clearhead.tasks.language import LanguageTask as LanguageTask
    from clearhead.tasks.objectives import BinaryClassification as BinaryClassification
    from clearhead.tasks.objectives import CausalLM as CausalLM
    from clearhead.tasks.objectives import Classification as Classification
    from clearhead.tasks.objectives import Objective as Objective
    from clearhead.tasks.objectives import Regression as Regression
    from clearhead.tasks.objectives import SequenceToSequence as SequenceToSequence
    from clearhead.tasks.objectives import SetPointer as SetPointer
    from clearhead.tasks.objectives import TokenClassification as TokenClassification
    from clearhead.tasks.report import Example as Example
    from clearhead.tasks.report import Prediction as Prediction
    from clearhead.tasks.report import to_predictions as to_predictions
    from clearhead.tasks.sequences import DigitTask as DigitTask

TASKS: dict[str, type[Task]] = {
    "reverse": Reverse,
    "digits": Digits,
    "odd-one-out": OddOneOut,
    "mnist": Mnist,
    "cifar10": Cifar10,
    "fashion-mnist": FashionMnist,
    "pronounce": Pronounce,
    "words": Words,
    "text": Text,
    "folder": Folder,
    "custom": CustomData,
}


def find_task(name: Any) -> type[Task]:
    """The class of a task; LookupError with the closest name if there is none."""
    if not isinstance(name, str) or name not in TASKS:
        is_short = isinstance(name, str) and len(name) <= MAX_REPR_LENGTH
        raise unknown_name("data set", name if is_short else short_repr(name), TASKS)
    return TASKS[name]


__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "clearhead.tasks.images": ("ImageTask",),
        "clearhead.tasks.language": ("LanguageTask",),
        "clearhead.tasks.sequences": ("DigitTask",),
        "clearhead.tasks.objectives": (
            "Objective",
            "Classification",
            "TokenClassification",
            "BinaryClassification",
            "Regression",
            "SetPointer",
            "SequenceToSequence",
            "CausalLM",
        ),
        "clearhead.tasks.report": ("Example", "Prediction", "to_predictions"),
    },
    own=(
        *("TASKS", "Task", "Mnist", "FashionMnist", "Cifar10", "Folder", "Words", "Text"),
        *("Pronounce", "Reverse", "Digits", "OddOneOut"),
    ),
)
