"""All tasks by name. To add one, write its class in a file of this package and list it here."""

from typing import Any

from clearhead.messages import MAX_REPR_LENGTH, short_repr, unknown_name
from clearhead.tasks.images import Cifar10, FashionMnist, Folder, Mnist
from clearhead.tasks.language import Text, Words
from clearhead.tasks.pronounce import Pronounce
from clearhead.tasks.sequences import Digits, OddOneOut, Reverse
from clearhead.tasks.task import CustomData, Task

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
