"""Tasks: a data set with everything that depends on it, from its splits and its loss to how a prediction is shown.

`TASKS` lists them by name. Importing a task does not import torch.
"""

from typing import TYPE_CHECKING

from clearhead.lazy import lazy_exports

if TYPE_CHECKING:
    from clearhead.tasks.images import Cifar10 as Cifar10
    from clearhead.tasks.images import FashionMnist as FashionMnist
    from clearhead.tasks.images import Folder as Folder
    from clearhead.tasks.images import ImageTask as ImageTask
    from clearhead.tasks.images import Mnist as Mnist
    from clearhead.tasks.language import LanguageTask as LanguageTask
    from clearhead.tasks.language import Text as Text
    from clearhead.tasks.language import Words as Words
    from clearhead.tasks.objectives import BinaryClassification as BinaryClassification
    from clearhead.tasks.objectives import CausalLM as CausalLM
    from clearhead.tasks.objectives import Classification as Classification
    from clearhead.tasks.objectives import Objective as Objective
    from clearhead.tasks.objectives import Regression as Regression
    from clearhead.tasks.objectives import SequenceToSequence as SequenceToSequence
    from clearhead.tasks.objectives import SetPointer as SetPointer
    from clearhead.tasks.objectives import TokenClassification as TokenClassification
    from clearhead.tasks.pronounce import Pronounce as Pronounce
    from clearhead.tasks.registry import TASKS as TASKS
    from clearhead.tasks.report import Example as Example
    from clearhead.tasks.report import Prediction as Prediction
    from clearhead.tasks.report import to_predictions as to_predictions
    from clearhead.tasks.sequences import Digits as Digits
    from clearhead.tasks.sequences import DigitTask as DigitTask
    from clearhead.tasks.sequences import OddOneOut as OddOneOut
    from clearhead.tasks.sequences import Reverse as Reverse
    from clearhead.tasks.task import Task as Task

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "clearhead.tasks.images": ("ImageTask", "Mnist", "FashionMnist", "Cifar10", "Folder"),
        "clearhead.tasks.language": ("LanguageTask", "Words", "Text"),
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
        "clearhead.tasks.pronounce": ("Pronounce",),
        "clearhead.tasks.registry": ("TASKS",),
        "clearhead.tasks.report": ("Example", "Prediction", "to_predictions"),
        "clearhead.tasks.sequences": ("DigitTask", "Reverse", "Digits", "OddOneOut"),
        "clearhead.tasks.task": ("Task",),
    },
)
