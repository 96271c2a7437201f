"""Start and resume runs: `train` creates a run in runs/, and `resume` continues it, optionally for longer."""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clearhead.messages import round_count
from clearhead.recipes.registry import check_run, config_of
from clearhead.training import checkpoint, loop
from clearhead.training.compatibility import check_config_matches
from clearhead.training.config import RunConfig
from clearhead.training.loop import TrainResult, lr_multiplier
from clearhead.training.progress import Display
from clearhead.training.run_directory import RUNS, RunDirectory
from clearhead.training.state import check_files

LENGTH = ("epochs", "steps")
"""training settings for the length of a run; one of them is 0"""


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
