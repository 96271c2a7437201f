"""From a recipe to a run: `train`, which gives the run its folder below runs/ and never overwrites one; and `resume`,
which may lengthen a run."""

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.data import datasets
from clearhead.data.batches import evaluation_batches
from clearhead.data.config import N_VIEWS
from clearhead.messages import duration, round_count
from clearhead.nn.eval_mode import eval_mode
from clearhead.recipes.registry import config_of
from clearhead.recipes.validate import validate
from clearhead.training import checkpoint, loop
from clearhead.training.compatibility import check_config_matches
from clearhead.training.config import RunConfig
from clearhead.training.context import TrainContext, build_context, isolated_torch_state
from clearhead.training.distributed import Ranks, current_ranks
from clearhead.training.loop import TrainResult, fit, lr_multiplier, train_step
from clearhead.training.metrics_log import CONFIG, RUNS
from clearhead.training.objectives import BATCH_SIZE, to_device
from clearhead.training.progress import Display, Silence, StopRequest, padding_line
from clearhead.training.run_directory import Report, RunDirectory, check_new
from clearhead.training.state import TrainState, check_files

NEXT = {"seq2seq": "ask it: clearhead predict {} thorough", "causal-lm": "let it write: clearhead sample {}"}
"""by objective: what else to do with a run that is trained"""


def train(
    recipe: str | RunConfig,
    name: str | None = None,
    *,
    changes: Mapping[str, Any] | None = None,
    resume: bool = False,
    shard: bool = False,
    quiet: bool = False,
) -> TrainResult:
    """Trains a recipe, perhaps with changes={"training.steps": 100}, or any run config, in runs/NAME.

    Without a name it is the recipe's, with the seed, and with a number if there is such a run already. `resume` goes on
    with the run of that name if it is there; `shard` splits the weights over processes that torchrun has started.
    """
    config = config_of(recipe, dict(changes or {})) if isinstance(recipe, str) else recipe
    if not isinstance(recipe, str) and changes:
        raise ValueError("changes are for a recipe's name, got them for a config; change it with dataclasses.replace")
    validate(config)
    if name is not None:
        check_run_name(name)
    if name is not None and not resume:
        check_new(RUNS / name)  # here too: a mistake is answered before the data is read
    with current_ranks() as ranks, isolated_torch_state(config.training.threads):
        display = Display(quiet=quiet) if ranks.is_main else Silence()
        if resume and config.training.precision == "auto":  # the run has resolved it when it began
            config = with_recorded_precision(config, folder_of(config, name, resume), ranks)
        ctx = build_context(
            config, ranks, shard=shard, report=display.warn
        )  # first: a config that fails leaves no folder
        run = new_or_old(ctx.config, name, resume, display.warn) if ranks.is_main else None
        outcome = fit(ctx, run, display)
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
) -> TrainResult:
    """Continues a run, given by its path or its name in runs/, after its newest checkpoint.

    With `epochs` or `steps` it is trained until there, and its schedule ends there; that and `threads` are recorded in
    its config.json. Under torchrun, the first process does so, and the others follow what is recorded.
    """
    changes = {"epochs": epochs, "steps": steps, "threads": threads}
    given = {name: value for name, value in changes.items() if value is not None}
    if os.environ.get("RANK", "0") == "0":
        found = RunDirectory.open(run)
        validate(RunConfig.from_dict(found.config))  # config.json may have been edited
        if given:
            change_run(found, given, Display(quiet=quiet))
    return loop.resume(run, shard=shard, quiet=quiet)


def change_run(run: RunDirectory, given: dict[str, Any], display: Display) -> None:
    """Checks the changes and records them; says what becomes of the learning rate."""
    if "epochs" in given and "steps" in given:
        raise ValueError(f"give epochs or steps, not both, got epochs={given['epochs']} and steps={given['steps']}")
    before = RunConfig.from_dict(run.config)
    if found := run.latest_checkpoint():  # data that has changed refuses the run, which must be as it was then
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
    found = run.latest_checkpoint() if before.training.patience else None
    if found and found.state["train_state"]["evals_since_best"] >= before.training.patience:
        raise ValueError(
            f"{run.path} ended early, after {before.training.patience} evaluations without improvement "
            "(training.patience); it cannot be lengthened"
        )
    if before.optimizer.schedule == "constant" or not trained:
        effect = "the learning rate at each step is unaffected" if trained else "no step is trained yet"
    else:
        old, new = (f"{before.optimizer.lr * lr_multiplier(trained, n, before.optimizer):.3g}" for n in (old_end, end))
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
    return len(datasets.load_dataset(config.data, config.seed).train) // config.training.batch_size


def with_recorded_precision(config: RunConfig, path: Path, ranks: Ranks) -> RunConfig:
    """The config with the precision that the run in this folder has recorded; unchanged where there is no run yet."""
    recorded = None
    if ranks.is_main and (path / CONFIG).exists():
        recorded = RunConfig.from_dict(RunDirectory.open(path).config).training.precision
    precision = ranks.broadcast_json(recorded) or config.training.precision
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


# What a run will take, from a few real steps that leave nothing behind: parameters, memory, seconds.


WARM_UP, TIMED, SECONDS = 2, 20, 5.0
"""steps before the clock runs; steps that it runs for, unless that many seconds are over before"""
A_LIFE = 100 * 365 * 24 * 3600.0
"""in seconds"""


@dataclass(frozen=True)
class Estimate:
    parameters: int
    memory: int
    """bytes for weights, gradients, optimizer, averages and what a step keeps for its way back; torch itself and the
    data come on top"""
    examples: int
    """to train on"""
    steps: int
    steps_per_epoch: int
    seconds_per_step: float
    seconds_per_evaluation: float
    evaluations: int
    evaluations_per_epoch: float
    seconds_per_test: float
    """of the one at the end; 0 where there is nothing to be tested on"""
    padding: tuple[float, float] | None
    """see Batches.padding"""
    notes: tuple[str, ...] = ()
    """see DataSet.notes"""

    @property
    def seconds_per_epoch(self) -> float:
        """Of a whole one, validation included, also where a run is shorter."""
        evaluating = self.evaluations_per_epoch * self.seconds_per_evaluation
        return self.steps_per_epoch * self.seconds_per_step + evaluating

    @property
    def seconds(self) -> float:
        evaluating = self.evaluations * self.seconds_per_evaluation + self.seconds_per_test
        return self.steps * self.seconds_per_step + evaluating

    @property
    def end(self) -> str:
        if self.seconds > A_LIFE:
            return "nobody here will see it done"
        return f"started now, done at {datetime.now() + timedelta(seconds=self.seconds):%H:%M on %d %B}"

    def __str__(self) -> str:
        epochs = self.steps / self.steps_per_epoch
        tested = ", test included" if self.seconds_per_test else ""
        return "\n".join(
            [
                *self.notes,
                f"parameters         {self.parameters:,}",
                f"memory             {self.memory / 2**20:,.0f} MB for weights, optimizer and one step",
                f"training examples  {self.examples:,}",
                *([f"padding            {padding_line(*self.padding)}"] if self.padding else []),
                f"steps              {self.steps:,} ({round_count(epochs)} epoch{'' if epochs == 1 else 's'})",
                f"time per step      {duration(self.seconds_per_step)}",
                f"time per epoch     {duration(self.seconds_per_epoch)}, validation included",
                f"in all             {duration(self.seconds)}{tested}; {self.end}",
            ]
        )


def estimate(config: RunConfig) -> Estimate:
    """Trains a few steps in memory; no folder is made."""
    display = Display(quiet=True)
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    with isolated_torch_state(config.training.threads):
        ctx = build_context(config, Ranks(device=device), shard=False, report=display.warn)
        memory = memory_of(ctx)
        per_step = time_steps(ctx)
        per_answer = time_answer(ctx)
    validation, n_views = len(ctx.data.validation), N_VIEWS[config.training.tta]
    return Estimate(
        parameters=sum(weight.numel() for weight in ctx.model.parameters()),
        memory=memory,
        examples=len(ctx.data.train),
        steps=ctx.n_steps,
        steps_per_epoch=ctx.batches.steps_per_epoch,
        seconds_per_step=per_step,
        seconds_per_evaluation=validation * per_answer,
        evaluations=-(-ctx.n_steps // ctx.evaluate_every) if validation else 0,
        evaluations_per_epoch=ctx.batches.steps_per_epoch / ctx.evaluate_every if validation else 0.0,
        seconds_per_test=len(ctx.data.test) * n_views * per_answer,
        padding=ctx.batches.padding(),
        notes=ctx.data.notes,
    )


def memory_of(ctx: TrainContext) -> int:
    """Of the first step: whatever lasts, and every tensor that is kept between its way forth and back."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        train_step(ctx, TrainState(), StopRequest())
    weights = {weight.untyped_storage().data_ptr(): size_of(weight) for weight in ctx.model.parameters()}
    lasting = 2 * sum(weights.values())  # and a gradient for each
    lasting += sum(map(size_of, ctx.optimizers.state_tensors().values()))
    lasting += sum(map(size_of, ctx.ema.averages.values())) if ctx.ema else 0
    portion = sum(size for place, size in kept.items() if place not in weights)
    return lasting + portion // ctx.config.training.grad_accum_steps


def size_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def time_steps(ctx: TrainContext) -> float:
    """Seconds for one step."""
    state, request = TrainState(), StopRequest()
    ctx.model.train()
    for _ in range(WARM_UP):
        train_step(ctx, state, request)
    start, n = time.perf_counter(), 0
    while n < TIMED and time.perf_counter() - start < SECONDS:
        train_step(ctx, state, request)
        n += 1
    return (time.perf_counter() - start) / n


def time_answer(ctx: TrainContext) -> float:
    """Seconds for one view of one example, from a batch of those that validate, or else of those for the test."""
    examples = ctx.data.validation if len(ctx.data.validation) else ctx.data.test
    if not len(examples):
        return 0.0
    start = time.perf_counter()
    batch = next(evaluation_batches(examples, ctx.data.normalize, BATCH_SIZE))
    with eval_mode(ctx.model), torch.inference_mode():
        ctx.objective.compute_outputs(ctx.model, to_device(batch, ctx.ranks.device)).cpu()
    return (time.perf_counter() - start) / len(batch.inputs)
