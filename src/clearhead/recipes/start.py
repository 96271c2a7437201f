"""From a recipe to a run: `train`, which gives the run its folder below runs/ and never overwrites one; and `resume`,
which may lengthen a run."""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clearhead.data import datasets
from clearhead.messages import round_count
from clearhead.recipes.agreement import check_agreement
from clearhead.recipes.all import config_of
from clearhead.training import checkpoint, loop
from clearhead.training.compatibility import check_config_matches
from clearhead.training.config import RunConfig
from clearhead.training.distributed import Processes, processes
from clearhead.training.loop import Outcome, fit
from clearhead.training.progress import Display, Silence
from clearhead.training.records import CONFIG, RUNS
from clearhead.training.run import Report, RunDirectory, check_new
from clearhead.training.schedule import multiplier
from clearhead.training.setup import own_surroundings, set_up
from clearhead.training.state import check_files

NEXT = {"written": "ask it: clearhead predict {} thorough", "next": "let it write: clearhead sample {}"}
"""by objective: what else to do with a run that is trained"""


def train(
    recipe: str | RunConfig,
    name: str | None = None,
    *,
    changes: Mapping[str, Any] | None = None,
    resume: bool = False,
    shard: bool = False,
    quiet: bool = False,
) -> Outcome:
    """Trains a recipe, perhaps with changes={"training.steps": 100}, or any run config, in runs/NAME.

    Without a name it is the recipe's, with the seed, and with a number if there is such a run already. `resume` goes on
    with the run of that name if it is there; `shard` splits the weights over processes that torchrun has started.
    """
    config = config_of(recipe, dict(changes or {})) if isinstance(recipe, str) else recipe
    if not isinstance(recipe, str) and changes:
        raise ValueError("changes are for a recipe's name, got them for a config; change it with dataclasses.replace")
    check_agreement(config)
    if name is not None:
        check_run_name(name)
    if name is not None and not resume:
        check_new(RUNS / name)  # here too: a mistake is answered before the data is read
    with processes() as team, own_surroundings(config.training.threads):
        display = Display(quiet=quiet) if team.is_first else Silence()
        if resume and config.training.precision == "auto":  # the run has resolved it when it began
            config = with_recorded_precision(config, folder_of(config, name, resume), team)
        setup = set_up(config, team, shard=shard, report=display.warn)  # first: a config that fails leaves no folder
        run = new_or_old(setup.config, name, resume, display.warn) if team.is_first else None
        outcome = fit(setup, run, display)
        if run and outcome.reason != "stopped":
            display.say(f"the run is in {run.path}; look at it with: clearhead curves {run.path}")
            if config.objective in NEXT:
                display.say(NEXT[config.objective].format(run.path))
        return outcome


def resume(
    run: str | Path,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    threads: int | None = None,
    shard: bool = False,
    quiet: bool = False,
) -> Outcome:
    """Continues a run, given by its path or its name in runs/, after its newest checkpoint.

    With `epochs` or `steps` it is trained until there, and its schedule ends there; that and `threads` are recorded in
    its config.json. Under torchrun, the first process does so, and the others follow what is recorded.
    """
    changes = {"epochs": epochs, "steps": steps, "threads": threads}
    given = {name: value for name, value in changes.items() if value is not None}
    if os.environ.get("RANK", "0") == "0":
        found = RunDirectory.open(run)
        check_agreement(RunConfig.from_dict(found.config))  # config.json may have been edited
        if given:
            change_run(found, given, Display(quiet=quiet))
    return loop.resume(run, shard=shard, quiet=quiet)


def change_run(run: RunDirectory, given: dict[str, Any], display: Display) -> None:
    """Checks the changes and records them; says what becomes of the learning rate."""
    if "epochs" in given and "steps" in given:
        raise ValueError(f"give epochs or steps, not both, got epochs={given['epochs']} and steps={given['steps']}")
    before = RunConfig.from_dict(run.config)
    if found := run.newest():  # data that has changed refuses the run, which must be as it was then
        check_config_matches(run, before, found)
        check_files(found.state, datasets.digests(before.data))
    other = {"epochs": "steps", "steps": "epochs"}
    zeros: dict[str, Any] = {other[name]: 0 for name in given if name in other}
    now = replace(before, training=replace(before.training, **given, **zeros))
    said = lengthened(run, before, now) if zeros else ""
    with run.lock():
        run.change_config(now.to_dict())
    if said:
        display.say(said)


def lengthened(run: RunDirectory, before: RunConfig, now: RunConfig) -> str:
    """What a new length means for a run; ValueError where it has ended for good, or is longer already."""
    per_epoch, trained = steps_per_epoch(run, before), max(checkpoint.steps(run.path), default=0)
    end, old_end = now.training.n_steps(per_epoch), before.training.n_steps(per_epoch)
    if end < trained:
        unit, n = ("epochs", trained / per_epoch) if now.training.epochs else ("steps", trained)
        raise ValueError(
            f"{run.path} has been trained for {round_count(n)} {unit}, got --{unit} {getattr(now.training, unit)}; "
            "a run cannot be shortened to less than that"
        )
    if end == old_end:
        return ""
    found = run.newest() if before.training.patience else None
    if found and found.state["standing"]["stale"] >= before.training.patience:
        raise ValueError(
            f"{run.path} ended early, after {before.training.patience} evaluations without improvement "
            "(training.patience); it cannot be lengthened"
        )
    if before.optimizer.schedule == "constant" or not trained:
        effect = "the learning rate at each step is unaffected" if trained else "no step is trained yet"
    else:
        old, new = (f"{before.optimizer.lr * multiplier(trained, n, before.optimizer):.3g}" for n in (old_end, end))
        effect = (
            f"the {before.optimizer.schedule} schedule now ends there, and the learning rate continues at {new}"
            f"{'' if new == old else f' instead of {old}, unlike in a run of this length from the beginning'}"
        )
    return f"the run now ends after step {end:,} instead of {old_end:,}: {effect}"


def steps_per_epoch(run: RunDirectory, config: RunConfig) -> int:
    """As its records say; without any, as its data says."""
    last = None
    for record in run.iter_records():
        last = record if record.get("epoch") else last
    if last:
        return round(last["step"] / last["epoch"])
    return len(datasets.load(config.data, config.seed).train) // config.training.batch_size


def with_recorded_precision(config: RunConfig, path: Path, team: Processes) -> RunConfig:
    """The config with the precision that the run in this folder has recorded; unchanged where there is no run yet."""
    recorded = None
    if team.is_first and (path / CONFIG).exists():
        recorded = RunConfig.from_dict(RunDirectory.open(path).config).training.precision
    precision = team.share(recorded) or config.training.precision
    return replace(config, training=replace(config.training, precision=precision))


def new_or_old(config: RunConfig, name: str | None, resume: bool, report: Report) -> RunDirectory:
    """The run's folder: a new one, or with `resume` the one of that name, if it has the same config."""
    path = folder_of(config, name, resume)
    if not (resume and (path / CONFIG).exists()):
        return RunDirectory.create(path, config.to_dict(), report)
    run = RunDirectory.open(path, report)
    changes = config.changes_since(RunConfig.from_dict(run.config))
    if others := [f"{name}={now} (was {before})" for name, (before, now) in changes.items()]:
        raise ValueError(
            f"a run continues with the settings that it started with, got {', '.join(others)} for {path}; choose "
            f"another name, or continue it as it is: clearhead resume {path}{longer(config, changes, path)}"
        )
    return run


def longer(config: RunConfig, changes: Mapping[str, Any], path: Path) -> str:
    """The command that lengthens the run, where nothing but its length is to be changed."""
    if not set(changes) <= {"training.steps", "training.epochs"}:
        return ""
    unit = "epochs" if config.training.epochs else "steps"
    return f"; to lengthen it: clearhead resume {path} --{unit} {getattr(config.training, unit)}"


def folder_of(config: RunConfig, name: str | None, resume: bool = False) -> Path:
    first = name or f"{config.recipe}-{config.seed}"
    check_run_name(first)
    path, n = RUNS / first, 1
    while name is None and path.exists() and not resume:
        n += 1
        path = RUNS / f"{first}-{n}"
    return path


def check_run_name(name: str) -> None:
    if not re.fullmatch(r"\w[\w.+-]{0,59}", name):
        raise ValueError(
            "a run's name has at most 60 letters, digits and _ . + - and begins with one of the first three, "
            f"got {name!r:.80}; "
            "the folder is runs/NAME here"
        )
