"""All recipes by name, with what was measured; from a name and some changed numbers to a config that fits together."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from clearhead.recipes.cifar10_bert import cifar10_bert
from clearhead.recipes.cifar10_fast import cifar10_fast
from clearhead.recipes.cifar10_vit import cifar10_vit
from clearhead.recipes.digits import digits
from clearhead.recipes.fashion_mnist import fashion_mnist
from clearhead.recipes.folder import folder
from clearhead.recipes.mnist import mnist
from clearhead.recipes.mnist_plain import mnist_plain
from clearhead.recipes.odd_one_out import odd_one_out
from clearhead.recipes.pronounce import pronounce
from clearhead.recipes.pronounce_fast import pronounce_fast
from clearhead.recipes.reverse import reverse
from clearhead.recipes.reverse_uva import reverse_uva
from clearhead.recipes.text import text
from clearhead.recipes.validate import validate
from clearhead.recipes.words import words
from clearhead.training.config import RunConfig
from clearhead.validation import check_name


@dataclass(frozen=True)
class Measured:
    """What the recipe took and reached, unchanged, with seed 0, on at most two processor cores."""

    seconds: float
    """of training, validation included"""
    accuracy: float
    """on the test set; of sequences, the share without a mistake; of `words`, the share of letters"""
    epochs: int | None = None
    """after which it was stopped, where the whole takes too long"""


@dataclass(frozen=True)
class Recipe:
    make: Callable[..., RunConfig]
    """its arguments are fields of its data config, and what depends on them follows"""
    what: str
    measured: Measured | None = None


RECIPES = {
    "reverse": Recipe(reverse, "16 digits in reverse order", Measured(seconds=3.6, accuracy=1.0)),
    "reverse-uva": Recipe(
        reverse_uva, "the same with the numbers of the UvA notebook", Measured(seconds=28, accuracy=1.0)
    ),
    "digits": Recipe(digits, "one answer about 16 digits", Measured(seconds=44, accuracy=1.0)),
    "odd-one-out": Recipe(odd_one_out, "the odd one out of ten images", Measured(seconds=332, accuracy=0.9917)),
    "mnist": Recipe(mnist, "handwritten digits, quickly", Measured(seconds=75, accuracy=0.9905)),
    "mnist-plain": Recipe(
        mnist_plain, "the same without positions and norms: why it is poor", Measured(seconds=380, accuracy=0.9230)
    ),
    "cifar10-fast": Recipe(
        cifar10_fast, "photographs of ten classes, on a laptop", Measured(seconds=2549, accuracy=0.9118)
    ),
    "cifar10-vit": Recipe(
        cifar10_vit,
        "the same with a plain vision transformer of 4x4 patches",
        Measured(seconds=5744, accuracy=0.8431),
    ),
    "cifar10-bert": Recipe(
        cifar10_bert,
        "the same with a BERT-style encoder of 12 layers",
        Measured(seconds=2422, accuracy=0.3288, epochs=1),
    ),
    "fashion-mnist": Recipe(fashion_mnist, "clothes of ten classes", Measured(seconds=574, accuracy=0.9189)),
    "pronounce": Recipe(pronounce, "how English words are said"),
    "pronounce-fast": Recipe(pronounce_fast, "the same, in a few minutes", Measured(seconds=308, accuracy=0.6082)),
    "words": Recipe(words, "words that nobody has written yet", Measured(seconds=239, accuracy=0.3450)),
    "text": Recipe(text, "your own text, and how it goes on"),
    "folder": Recipe(folder, "your own pictures"),
}


def find(name: str) -> Recipe:
    name = name.replace("_", "-")
    check_name(name, RECIPES, "recipe")
    return RECIPES[name]


def config_of(name: str, changes: dict[str, Any] | None = None) -> RunConfig:
    """A recipe's config, with changes such as {"training.steps": 100, "seed": 1}: those of the data that others follow
    from come first; steps and epochs take the place of one another."""
    changes, make = dict(changes or {}), find(name).make
    arguments = {f"data.{name}": name for name in inspect.signature(make).parameters}
    config = make(**{arguments[path]: changes.pop(path) for path in list(changes) if path in arguments})
    for one, other in (("training.steps", "training.epochs"), ("training.epochs", "training.steps")):
        if changes.get(one):
            changes.setdefault(other, 0)
    config = changed(config, changes)
    validate(config)
    return config


def changed(config: Any, changes: dict[str, Any]) -> Any:
    """A config with the values at some paths replaced, all at once for each of its parts."""
    parts: dict[str, dict[str, Any]] = {}
    values = {}
    for path, value in changes.items():
        first, _, rest = path.partition(".")
        check_name(first, vars(config), f"field of {type(config).__name__}")
        has_fields = is_dataclass(getattr(config, first))
        if bool(rest) != has_fields and not is_dataclass(value):
            rule = f"is changed field by field, as in {first}.NAME" if has_fields else "has no fields"
            raise LookupError(f"{first} {rule}, got {path!r}; name what is to be changed")
        if rest:
            parts.setdefault(first, {})[rest] = value
        else:
            values[first] = value
    for name, inside in parts.items():
        values[name] = changed(getattr(config, name), inside)
    return replace(config, **values)
