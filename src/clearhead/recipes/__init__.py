"""Recipes: one file per experiment, with its command, time and accuracy.

`RECIPES` lists them by name with measured results; settings are changed by their paths, such as `training.steps`.
`train` creates a run in runs/, and `resume` continues it, optionally for longer. Importing this does not import torch.
"""

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, is_dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from clearhead.data import N_VIEWS
from clearhead.messages import duration, round_count
from clearhead.recipes import (
    cifar10_bert,
    cifar10_fast,
    cifar10_vit,
    digits,
    fashion_mnist,
    folder,
    mnist,
    mnist_plain,
    odd_one_out,
    pronounce,
    pronounce_fast,
    reverse,
    reverse_uva,
    text,
    words,
)
from clearhead.training import checkpoint
from clearhead.training.config import RunConfig
from clearhead.training.progress import Display, TrainResult
from clearhead.training.run_directory import RUNS, RunDirectory
from clearhead.validation import check_name

COMMAND_WIDTH = 88
"""characters of a line of a command that is printed for the user to copy"""
LENGTH = ("epochs", "steps")
"""training settings for the length of a run; one of them is 0"""


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
    """takes the task with the options of its data, from which sizes of the model are derived"""
    description: str
    parameters: int | None
    """the number of parameters, so that it can be listed without torch; None if it depends on the user's data"""
    measured: Measured | None = None


RECIPES = {
    name: Recipe(make, description, parameters, measurements().get(name))
    for name, make, description, parameters in (
        ("reverse", reverse.reverse, "reverse 16 digits", 10_282),
        ("reverse-uva", reverse_uva.reverse_uva, "the same as in the UvA notebook", 10_346),
        ("digits", digits.digits, "a question about 16 digits", 55_626),
        ("odd-one-out", odd_one_out.odd_one_out, "find the odd one out of ten images", 513_921),
        ("mnist", mnist.mnist, "handwritten digits", 143_650),
        ("mnist-plain", mnist_plain.mnist_plain, "the same without positions and norms", 87_114),
        ("cifar10-fast", cifar10_fast.cifar10_fast, "photos of ten classes", 582_578),
        ("cifar10-vit", cifar10_vit.cifar10_vit, "the same with a plain vision transformer", 546_058),
        ("cifar10-bert", cifar10_bert.cifar10_bert, "the same with a BERT encoder", 9_575_178),
        ("fashion-mnist", fashion_mnist.fashion_mnist, "clothes of ten classes", 143_650),
        ("pronounce", pronounce.pronounce, "pronunciation of English words", 1_866_752),
        ("pronounce-fast", pronounce_fast.pronounce_fast, "the same in five minutes", 434_944),
        ("words", words.words, "spelling of English words", 351_520),
        ("text", text.text, "your own text", None),
        ("folder", folder.folder, "your own images", None),
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
    """A recipe's config, with changes such as {"training.steps": 100, "seed": 1}.

    Changes of the data come first, because sizes of the model are derived from it. Steps and epochs replace each other.
    """
    changes, make = dict(changes or {}), find(name).make
    data_changes = {path: changes.pop(path) for path in list(changes) if path.startswith("data.")}
    default = make()
    config = make(with_changes(default, data_changes).data) if data_changes else default
    for field in config.task.derived:
        if f"model.{field}" in changes:
            raise ValueError(
                f"model.{field} is determined by the data, which gives {getattr(config.task, field)}, "
                f"got {changes[f'model.{field}']}"
            )
    for one, other in (("training.steps", "training.epochs"), ("training.epochs", "training.steps")):
        if changes.get(one):
            changes.setdefault(other, 0)
    config = with_changes(config, changes)
    check_run(config)
    return config


def overrides_of(config: RunConfig) -> dict[str, Any] | None:
    """The changes that turn a recipe into this config, the inverse of `config_of`; None if no recipe leads to it.

    If the user's files are missing, from which sizes of the model are derived, those sizes are not checked.
    """
    if config.recipe not in RECIPES:
        return None
    default = RECIPES[config.recipe].make()
    if type(config.data) is not type(default.data) or type(config.model) is not type(default.model):
        return None
    base = default
    with suppress(OSError, ValueError):
        base = replace(RECIPES[config.recipe].make(config.data), data=default.data)
    found = {path: now for path, (_, now) in config.changes_since(base).items()}
    dropped = {f"model.{field}" for field in config.task.derived}
    dropped |= {path for path in ("training.steps", "training.epochs") if found.get(path) == 0}  # set by the other one
    found = {path: value for path, value in found.items() if path not in dropped}
    with suppress(OSError, ValueError):
        return found if config_of(config.recipe, found) == config else None
    return found


def train_command(config: RunConfig, overrides: Mapping[str, Any], name: str, environment: Mapping[str, Any]) -> str:
    """The shell command that trains a run with these overrides of its recipe. `environment` is that of a checkpoint."""
    world_size = environment.get("world_size", 1)
    start = "clearhead" if world_size == 1 else f"torchrun --nproc-per-node {world_size} -m clearhead"
    words = [f"--name {shlex.quote(name)}"]
    for path, value in overrides.items():
        option, text = "--" + path.replace("_", "-"), option_value(value)
        words.append(f"{option}={shlex.quote(text)}" if text[:1] in ("", "-") else f"{option} {shlex.quote(text)}")
    words += ["--shard"] * bool(environment.get("sharded", False))
    lines = [f"{start} train {config.recipe}"]
    for word in words:
        if len(lines[-1]) + len(word) < COMMAND_WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(f"    {word}")
    return " \\\n".join(lines)


def option_value(value: Any) -> str:
    """A value as the command line accepts it."""
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case (height, width):
            return f"{height}x{width}"
    return str(value)


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


def check_run(config: RunConfig) -> None:
    """ValueError if the model does not match the data, or if data is missing; runs before any example is read."""
    config.task.check_complete()
    config.task.check_model(config.model)


def train(
    recipe: str | RunConfig,
    name: str | None = None,
    *,
    changes: Mapping[str, Any] | None = None,
    resume: bool = False,
    shard: bool = False,
    quiet: bool = False,
) -> TrainResult:
    """Train a recipe, optionally with changes={"training.steps": 100}, or any run config, in runs/NAME.

    The default name is RECIPE-SEED, followed by a number if that run exists. `resume` continues the run of this name if
    it exists; `shard` splits the weights over the processes that torchrun has started (FSDP2).
    """
    import clearhead.training.loop as loop

    config = config_of(recipe, dict(changes or {})) if isinstance(recipe, str) else recipe
    if not isinstance(recipe, str) and changes:
        raise ValueError("changes apply to the name of a recipe, got a config; change it with dataclasses.replace")
    check_run(config)
    folder_name = f"{config.recipe}-{config.seed}" if name is None else name
    check_run_name(folder_name)
    numbered = name is None and not resume
    return loop.train(config, RUNS / folder_name, resume=resume, numbered=numbered, shard=shard, quiet=quiet)


def resume(
    run: str | Path,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    threads: int | None = None,
    shard: bool = False,
    quiet: bool = False,
) -> TrainResult:
    """Continue a run, given by its path or its name in runs/, from its latest checkpoint.

    `epochs` or `steps` set a new length for the run and its schedule; these and `threads` are recorded in config.json,
    under torchrun by rank 0.
    """
    import clearhead.training.loop as loop

    changes = {"epochs": epochs, "steps": steps, "threads": threads}
    changes = {name: value for name, value in changes.items() if value is not None}
    requested = {*changes, *(LENGTH if changes.keys() & set(LENGTH) else ())}  # a new length sets both
    if os.environ.get("RANK", "0") == "0":
        directory = RunDirectory.open(run)
        config = RunConfig.from_dict(directory.config)  # config.json may have been edited
        config.task.check_complete()
        loop.check_latest_matches(directory, config)
        if not config.task.file_fields:  # the user's own files are compared by digest
            config.task.check_model(config.model)
        if changes:
            change_training(directory, changes, Display(quiet=quiet))
    return loop.resume(run, shard=shard, quiet=quiet, requested={f"training.{name}" for name in requested})


def change_training(run: RunDirectory, changes: dict[str, Any], display: Display) -> None:
    """Validate and record the changes, and print their effect on the learning rate."""
    from clearhead.training.state import check_config_matches, check_files

    if "epochs" in changes and "steps" in changes:
        epochs, steps = changes["epochs"], changes["steps"]
        raise ValueError(f"epochs and steps are mutually exclusive, got epochs={epochs} and steps={steps}")
    old = RunConfig.from_dict(run.config)
    if latest := run.latest_checkpoint():  # refuse before config.json is written
        check_config_matches(run.path, old, latest)
        check_files(latest.state, old.task.digests())
    other = {"epochs": "steps", "steps": "epochs"}
    zeros: dict[str, Any] = {other[name]: 0 for name in changes if name in other}
    new = replace(old, training=replace(old.training, **changes, **zeros))
    message = extend(run, old, new) if zeros else ""
    with run.lock():
        run.change_config(new.to_dict())
    if message:
        display.info(message)


def extend(run: RunDirectory, old: RunConfig, new: RunConfig) -> str:
    """A message about the effect of a new length; ValueError if the run has stopped early or is already longer."""
    from clearhead.training.loop import lr_multiplier

    per_epoch, trained = steps_per_epoch(run, old), max(checkpoint.saved_steps(run.path), default=0)
    end, old_end = new.training.n_steps(per_epoch), old.training.n_steps(per_epoch)
    if end < trained:
        unit, n = ("epochs", trained / per_epoch) if new.training.epochs else ("steps", trained)
        raise ValueError(
            f"{run.path} has been trained for {round_count(n)} {unit}, got --{unit} {getattr(new.training, unit)}; "
            "a run cannot be shortened below its current step"
        )
    if end == old_end:
        return ""
    latest = run.latest_checkpoint() if old.training.patience else None
    if latest and latest.state["train_state"]["evals_since_best"] >= old.training.patience:
        raise ValueError(
            f"{run.path} stopped early, after {old.training.patience} evaluations without improvement "
            "(training.patience); it cannot be extended"
        )
    if old.optimizer.schedule == "constant" or not trained:
        effect = "the learning rate at each step is unaffected" if trained else "no step has been trained yet"
    else:
        lr, new_lr = (f"{old.optimizer.lr * lr_multiplier(trained, n, old.optimizer):.3g}" for n in (old_end, end))
        effect = (
            f"the {old.optimizer.schedule} schedule now ends there, and the learning rate continues at {new_lr}"
            f"{'' if new_lr == lr else f' instead of {lr}, unlike in a run of this length from the start'}"
        )
    return f"the run now ends after step {end:,} instead of {old_end:,}: {effect}"


def steps_per_epoch(run: RunDirectory, config: RunConfig) -> int:
    """From the metrics of the run or, if there are none, from its data."""
    last = None
    for record in run.iter_records():
        last = record if record.get("epoch") else last
    if last:
        return round(last["step"] / last["epoch"])
    return len(config.task.load(config.seed).train) // config.training.batch_size


def check_run_name(name: str) -> None:
    if not re.fullmatch(r"\w[\w.+-]{0,59}", name):
        raise ValueError(
            "a run name must have at most 60 letters, digits and _ . + -, and start with a letter, a digit or _, "
            f"got {name!r:.80}"
        )
