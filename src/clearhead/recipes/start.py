"""From a recipe to a run: `train`, which gives the run its folder below runs/ and never overwrites one."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clearhead.recipes.agreement import check_agreement
from clearhead.recipes.all import config_of
from clearhead.training.config import RunConfig
from clearhead.training.distributed import Processes, processes
from clearhead.training.loop import Outcome, fit
from clearhead.training.progress import Display, Silence
from clearhead.training.records import CONFIG, RUNS
from clearhead.training.run import Report, RunDirectory, check_new
from clearhead.training.setup import own_surroundings, set_up

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
            f"a run goes on with the settings that it began with, got {', '.join(others)} for {path}; "
            f"leave that out, choose another name, or move {path} away"
        )
    return run


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
