"""All recipes by name, with measured results; overrides such as `training.steps=100`, and validation of the config."""

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from clearhead.data.datasets import N_VIEWS, DataConfig
from clearhead.messages import duration
from clearhead.models.config import LanguageConfig, PredictorConfig, Seq2SeqConfig, VisionConfig
from clearhead.recipes.cifar10_bert import cifar10_bert
from clearhead.recipes.cifar10_fast import cifar10_fast
from clearhead.recipes.cifar10_vit import cifar10_vit
from clearhead.recipes.digits import QUESTIONS, digits
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
from clearhead.recipes.words import words
from clearhead.training.config import ObjectiveName, RunConfig
from clearhead.validation import check_name


@dataclass(frozen=True)
class Measured:
    """The result of training a recipe without overrides, as recorded in measured.json."""

    command: str
    seed: int
    epochs: int | None
    """epochs trained, which may be fewer than the recipe's; None for a recipe that counts steps"""
    seconds: float
    """training time, validation included"""
    accuracy: float
    """on the test set"""
    metric: str
    """accuracy, exact match (sequences without an error) or token accuracy"""
    machine: str


@cache
def measurements() -> dict[str, Measured]:
    """All measured results by recipe."""
    text = files("clearhead.recipes").joinpath("measured.json").read_text(encoding="utf-8")
    return {name: Measured(**fields) for name, fields in json.loads(text).items()}


@dataclass(frozen=True)
class Recipe:
    make: Callable[..., RunConfig]
    """returns the config; its parameters are fields of the data config from which other settings are derived"""
    description: str
    parameters: int | None
    """the number of parameters, so that it can be listed without torch; None if it depends on the user's data"""
    measured: Measured | None = None


RECIPES = {
    name: Recipe(make, description, parameters, measurements().get(name))
    for name, make, description, parameters in (
        ("reverse", reverse, "reverse 16 digits", 10_282),
        ("reverse-uva", reverse_uva, "the same as in the UvA notebook", 10_346),
        ("digits", digits, "a question about 16 digits", 55_626),
        ("odd-one-out", odd_one_out, "find the odd one out of ten images", 513_921),
        ("mnist", mnist, "handwritten digits", 143_650),
        ("mnist-plain", mnist_plain, "the same without positions and norms", 87_114),
        ("cifar10-fast", cifar10_fast, "photos of ten classes", 582_578),
        ("cifar10-vit", cifar10_vit, "the same with a plain vision transformer", 546_058),
        ("cifar10-bert", cifar10_bert, "the same with a BERT encoder", 9_575_178),
        ("fashion-mnist", fashion_mnist, "clothes of ten classes", 143_650),
        ("pronounce", pronounce, "pronunciation of English words", 1_866_752),
        ("pronounce-fast", pronounce_fast, "the same in five minutes", 434_944),
        ("words", words, "spelling of English words", 351_520),
        ("text", text, "your own text", None),
        ("folder", folder, "your own images", None),
    )
}


def results_table() -> str:
    """All measured results as a Markdown table."""
    rows = ["| Command | Time | Test accuracy | Machine |", "|---|---|---|---|"]
    for name, measured in measurements().items():
        config = RECIPES[name].make()
        note = "" if measured.metric == "accuracy" else f" {measured.metric}"
        if (n := N_VIEWS[config.training.tta]) > 1:
            note += f", mean of {n} views"
        if measured.epochs is not None and measured.epochs < config.training.epochs:
            note += f" after {measured.epochs} of {config.training.epochs} epochs"
        result = f"{measured.accuracy:.2%}{note}"
        rows.append(f"| `{measured.command}` | {duration(measured.seconds)} | {result} | {measured.machine} |")
    return "\n".join(rows) + "\n"


def find(name: str) -> Recipe:
    name = name.replace("_", "-")
    check_name(name, RECIPES, "recipe")
    return RECIPES[name]


def config_of(name: str, changes: dict[str, Any] | None = None) -> RunConfig:
    """The config of a recipe with changes such as {"training.steps": 100, "seed": 1}.

    Data settings from which others are derived are applied first. Setting the steps unsets the epochs, and vice versa.
    """
    changes, make = dict(changes or {}), find(name).make
    arguments = {f"data.{name}": name for name in inspect.signature(make).parameters}
    config = make(**{arguments[path]: changes.pop(path) for path in list(changes) if path in arguments})
    for name, other in (("training.steps", "training.epochs"), ("training.epochs", "training.steps")):
        if changes.get(name):
            changes.setdefault(other, 0)
    config = with_changes(config, changes)
    validate(config)
    return config


def with_changes(config: Any, changes: dict[str, Any]) -> Any:
    """A copy of the config with the values at dotted paths replaced; each dataclass is rebuilt and validated once."""
    nested: dict[str, dict[str, Any]] = {}
    values = {}
    for path, value in changes.items():
        first, _, rest = path.partition(".")
        check_name(first, vars(config), f"field of {type(config).__name__}")
        has_fields = is_dataclass(getattr(config, first))
        if bool(rest) != has_fields and not is_dataclass(value):
            rule = f"has fields, which are set as {first}.NAME" if has_fields else "has no fields"
            raise LookupError(f"{first} {rule}, got {path!r}")
        if rest:
            nested.setdefault(first, {})[rest] = value
        else:
            values[first] = value
    for name, inner in nested.items():
        values[name] = with_changes(getattr(config, name), inner)
    return replace(config, **values)


NUM_CLASSES = 10
"""number of classes of every data set except the user's own"""
OBJECTIVES: dict[str, ObjectiveName] = {
    "reverse": "token-classification",
    "odd-one-out": "set-pointer",
    "pronounce": "seq2seq",
    "words": "causal-lm",
    "text": "causal-lm",
}
"""objective by data set; image data sets use classification, and that of digits depends on the question"""
GENERATIVE: dict[str, type] = {"seq2seq": Seq2SeqConfig, "causal-lm": LanguageConfig}
"""model config by generative objective"""
IMAGES = {"mnist": (1, 28), "fashion-mnist": (1, 28), "cifar10": (3, 32)}
"""channels, and height and width"""


def validate(config: RunConfig) -> None:
    """Raise a ValueError if data, model and objective are incompatible, before any data is read."""
    data, objective = config.data, objective_for(config.data)
    name = f"digits with question={data.question}" if data.name == "digits" else data.name
    if config.objective != objective:
        raise ValueError(f"{name} needs objective={objective}, got {config.objective}")
    if data.name == "folder" and not data.folder:
        raise ValueError("data.folder is empty; run: clearhead train folder --data.folder PATH")
    if data.name == "text" and not data.file:
        raise ValueError("data.file is empty; run: clearhead train text --data.file PATH")
    if data.name in (*IMAGES, "folder"):
        check_vision(config.model, data)
    elif objective in GENERATIVE:
        check_generative(config.model, data, GENERATIVE[objective])
    else:
        check_predictor(config.model, name, objective)


def objective_for(data: DataConfig) -> ObjectiveName:
    return QUESTIONS[data.question].objective if data.name == "digits" else OBJECTIVES.get(data.name, "classification")


def check_vision(model: object, data: DataConfig) -> None:
    if not isinstance(model, VisionConfig):
        raise ValueError(f"{data.name} needs a VisionConfig, got a {type(model).__name__}")
    channels, size = IMAGES.get(data.name, (3, data.image_size))
    if (model.in_channels, model.image_shape) != (channels, (size, size)):
        height, width = model.image_shape
        raise ValueError(
            f"{data.name} has images of {size} x {size} with in_channels={channels}, "
            f"got a model for {height} x {width} with in_channels={model.in_channels}"
        )
    if data.name != "folder" and model.num_classes < NUM_CLASSES:
        raise ValueError(f"{data.name} has {NUM_CLASSES} classes, got num_classes={model.num_classes}")


def check_generative(model: object, data: DataConfig, kind: type) -> None:
    if not isinstance(model, kind):
        raise ValueError(f"{data.name} needs a {kind.__name__}, got a {type(model).__name__}")
    if data.name != "text" or not isinstance(model, LanguageConfig) or model.pos_embed != "learned":
        return
    if model.context_length < data.length:
        raise ValueError(
            f"context_length must be at least data.length={data.length} with learned positions, "
            f"got {model.context_length}"
        )


def check_predictor(model: object, name: str, objective: ObjectiveName) -> None:
    if not isinstance(model, PredictorConfig):
        raise ValueError(f"{name} needs a PredictorConfig, got a {type(model).__name__}")
    is_per_token = objective in ("token-classification", "set-pointer")
    if (model.pooling == "none") != is_per_token:
        expected = "none" if is_per_token else "mean, cls or attention"
        raise ValueError(f"{name} needs pooling={expected}, got {model.pooling}")
    features = {
        "in_features": 28 * 28 if objective == "set-pointer" else 10,
        "out_features": NUM_CLASSES if objective in ("classification", "token-classification") else 1,
    }
    for field, expected_size in features.items():
        if (size := getattr(model, field)) != expected_size:
            raise ValueError(f"{name} needs {field}={expected_size}, got {size}")
