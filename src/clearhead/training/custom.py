"""`clearhead.fit`: train any nn.Module on any data, with the loop, the checkpoints and the exact resume of a recipe.

A run holds a description of the module and the data, never their code: whoever resumes it passes both again.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.data.batches import Batches
from clearhead.data.custom import (
    Collate,
    MapBatches,
    MapExamples,
    StreamBatches,
    TensorExamples,
    user_batches,
    user_dataset,
)
from clearhead.data.dataset import Dataset, Tree, map_tensors, tensors_in
from clearhead.models.config import MAX_NAME, ModuleConfig
from clearhead.nn.blocks import eval_mode
from clearhead.tasks.objectives import UserObjective
from clearhead.tasks.task import CustomData
from clearhead.training import checkpoint
from clearhead.training.config import (
    CHANGED_BY_RESUME,
    FACTORY,
    Compile,
    OptimizerConfig,
    Precision,
    RunConfig,
    Schedule,
    SnapshotConfig,
    TrainingConfig,
)
from clearhead.training.context import TrainContext, assemble_context, check_microbatches, isolated_torch_state
from clearhead.training.distributed import current_ranks, load_tensors, preserved_rng, state_of
from clearhead.training.evaluation import Callback, batch_sums, to_device
from clearhead.training.loop import TrainResult, run_training, with_recorded_precision
from clearhead.training.progress import Display, SilentDisplay
from clearhead.training.run_directory import RUNS, RunDirectory, check_new, has_run
from clearhead.training.state import load_eval_weights, state_digest
from clearhead.validation import suggest_keywords

RECIPE = "fit"
"""the recipe in the config of a run of `fit`"""
NOT_REPRODUCIBLE = (
    "train_data gives other examples when it is read again with the same seed of torch's generator, so that a resumed "
    "run will not be exact; draw its random numbers from torch"
)
STREAM = (
    "train_data is an iterable of batches: a resumed run reads past those that it was trained on, and is exact only if "
    "they come in the same order again"
)


@suggest_keywords
def fit(
    model: nn.Module | Callable[[], nn.Module],
    train_data: Any,
    val_data: Any = None,
    *,
    test_data: Any = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    correct: Callable[[Any, Any], Tensor] | None = None,
    forward: Callable[[Callable[..., Any], Any], Any] | None = None,
    collate: Collate | None = None,
    epochs: int = 0,
    steps: int = 0,
    batch_size: int = 32,
    optimizer: str | OptimizerConfig | Callable[[nn.Module], torch.optim.Optimizer] = "adamw",
    lr: float | None = None,
    weight_decay: float | None = None,
    schedule: Schedule | None = None,
    warmup: int | None = None,
    grad_clip: float | None = None,
    ema: float = 0.0,
    precision: Precision = "float32",
    compile: Compile = "off",
    grad_accum_steps: int = 1,
    eval_batch_size: int | None = None,
    evaluate_every: int = 0,
    checkpoint_every: int = 0,
    keep_checkpoints: int = 2,
    patience: int = 0,
    log_every: int = 10,
    snapshots: int = 0,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
    threads: int = 0,
    dir: str | Path | None = None,
    resume: bool = False,
    shard: bool = False,
    quiet: bool = False,
) -> TrainResult:
    """Train a module, or what a function without arguments returns, for a number of epochs or steps.

    Data is a pair of tensors (inputs, targets), a map-style dataset of such pairs, or an iterable of batches.
    `loss(outputs, targets)` returns the mean over the batch; the default is cross-entropy. `correct(outputs, targets)`
    says which predictions are correct; by default, the most probable class is compared with the target.
    `forward(model, inputs)` calls the model; by default a dict is passed as keyword arguments and a tuple as positional
    ones. `optimizer` is "adamw", "muon", or a function from the model to a torch.optim.Optimizer.

    The run is saved in `dir` (default: runs/CLASS). `resume` continues the run that is there, for more epochs or steps
    if that is asked. At the end, the module is in eval mode and has the weights of the best checkpoint.
    """
    training = TrainingConfig(
        epochs=epochs,
        steps=steps,
        batch_size=batch_size,
        ema=ema,
        precision=precision,
        compile=compile,
        grad_accum_steps=grad_accum_steps,
        eval_batch_size=eval_batch_size or batch_size,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
        patience=patience,
        log_every=log_every,
        threads=threads,
    )
    shortcuts = {"lr": lr, "weight_decay": weight_decay, "schedule": schedule, "warmup": warmup, "grad_clip": grad_clip}
    given = {name: value for name, value in shortcuts.items() if value is not None}
    parts = UserParts(
        model=model,
        data={"train": train_data, "val": val_data, "test": test_data},
        objective=UserObjective(loss, correct, forward),
        collate=collate,
        optimizer=optimizer if callable(optimizer) else None,
        callbacks=tuple(callbacks),
    )
    settings = FitSettings(
        training=training,
        optimizer=optimizer_settings(optimizer, given),
        snapshots=SnapshotConfig(inputs=snapshots),
        seed=seed,
    )
    return fit_parts(parts, settings, None if dir is None else Path(dir), resume=resume, shard=shard, quiet=quiet)


@dataclass(frozen=True)
class UserParts:
    """What a run cannot contain: the user's own objects and functions."""

    model: nn.Module | Callable[[], nn.Module]
    data: dict[str, Any]
    """train, val and test"""
    objective: UserObjective
    collate: Collate | None = None
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    callbacks: tuple[Callback, ...] = ()


@dataclass(frozen=True)
class FitSettings:
    """What a run contains, except for the description of the parts."""

    training: TrainingConfig
    optimizer: OptimizerConfig
    snapshots: SnapshotConfig
    seed: int


def fit_parts(
    parts: UserParts, settings: FitSettings, folder: Path | None, *, resume: bool, shard: bool, quiet: bool
) -> TrainResult:
    """Train the user's parts with these settings, in a new folder or, with `resume`, from the checkpoint in it."""
    training, seed = settings.training, settings.seed
    if folder is not None and not resume:
        check_unused(folder)
    with current_ranks() as ranks, isolated_torch_state(training.threads):
        display = Display(quiet=quiet) if ranks.is_main else SilentDisplay()
        torch.manual_seed(seed)
        module = build_module(parts.model)
        data = user_dataset(parts.data, seed, parts.collate)
        batches = user_batches(data, training.batch_size, training.epochs, training.steps, seed)
        config = RunConfig(
            recipe=RECIPE,
            model=describe_module(module),
            data=describe_data(data, parts.data["train"]),
            optimizer=settings.optimizer,
            training=replace(training, batch_size=batches.batch_size),
            seed=seed,
            snapshots=settings.snapshots,
        )
        check_microbatches(config, ranks.world_size)
        if training.patience and not len(data.validation):
            display.warn("patience has no effect without val_data")
        folder = folder or default_folder(config, resume=resume)
        if resume:
            config = with_recorded_precision(config, folder, ranks)
        if ranks.world_size > 1:  # all ranks start with the weights of rank 0
            load_tensors(state_of(module), ranks.broadcast_tensors(cpu_copy(state_of(module))))
        ctx = assemble_context(
            config,
            ranks,
            data,
            batches,
            parts.objective,
            module,
            shard=shard,
            report=display.warn,
            optimizer=parts.optimizer,
            callbacks=parts.callbacks,
        )
        if parts.optimizer is not None:  # the records show the learning rate of its first group
            lr = float(ctx.optimizers.base_lrs[0][1])
            ctx = replace(ctx, config=replace(ctx.config, optimizer=replace(ctx.config.optimizer, lr=lr)))
        check_first_batch(ctx)
        run = open_or_create(folder, ctx, display, resume=resume) if ranks.is_main else None
        report_exactness(batches, display)
        result = run_training(ctx, run, display, CHANGED_BY_RESUME)
        if result.reason != "stopped":
            load_eval_weights(ctx, run.best_checkpoint() if run else None)
            display.info(f"saved in {folder}")
        module.eval()
        return result


def optimizer_settings(
    optimizer: str | OptimizerConfig | Callable[[nn.Module], torch.optim.Optimizer], shortcuts: dict[str, Any]
) -> OptimizerConfig:
    """The config of an optimizer, with the arguments of `fit` that have a value."""
    if isinstance(optimizer, OptimizerConfig):
        if shortcuts:
            name, value = next(iter(shortcuts.items()))
            raise ValueError(f"{name} is a field of the OptimizerConfig that was given, got {name}={value!r} beside it")
        return optimizer
    if isinstance(optimizer, torch.optim.Optimizer | type):
        raise ValueError(
            "optimizer must be a name or a function from the model to an optimizer, "
            f"got {optimizer if isinstance(optimizer, type) else type(optimizer).__name__}; try "
            "optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1)"
        )
    if callable(optimizer):
        if own := [name for name in ("lr", "weight_decay") if name in shortcuts]:
            raise ValueError(f"{own[0]} is set by the function that makes the optimizer, got {own[0]}= beside it")
        return OptimizerConfig(name=FACTORY, **shortcuts)
    if optimizer not in ("adamw", "muon"):
        raise ValueError(f"optimizer must be 'adamw', 'muon' or a function of the model, got {optimizer!r:.60}")
    return OptimizerConfig(name=optimizer, **shortcuts)  # type: ignore[arg-type]


def build_module(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """The module itself, or what a class or a function without arguments returns."""
    built = model if isinstance(model, nn.Module) else model() if callable(model) else model
    if not isinstance(built, nn.Module):
        raise ValueError(f"model must be an nn.Module or a function that returns one, got a {type(built).__name__}")
    if any(isinstance(weight, nn.parameter.UninitializedParameter) for weight in built.parameters()):
        raise ValueError(f"{type(built).__name__} has lazy parameters; initialize them by calling the model once")
    return built


def describe_module(module: nn.Module) -> ModuleConfig:
    weights = list(module.parameters())
    if not any(weight.requires_grad for weight in weights):
        raise ValueError(f"{type(module).__name__} has no parameter to train: none requires a gradient")
    state, parameters = state_of(module), {name for name, _ in module.named_parameters()}
    infinite = [name for name, tensor in state.items() if name not in parameters and not checkpoint.is_finite(tensor)]
    return ModuleConfig(
        name=type(module).__name__[:MAX_NAME],
        parameters=sum(weight.numel() for weight in weights),
        sha256=state_digest(state),
        infinite=tuple(infinite),
    )


def describe_data(data: Dataset, train_data: Any) -> CustomData:
    train = data.train
    if isinstance(train, TensorExamples):
        return CustomData(
            kind="tensors",
            source=f"tensors {shapes_of(train.inputs)} and {shapes_of(train.targets)}"[:MAX_NAME],
            train=len(train),
            validation=len(data.validation),
            test=len(data.test),
        )
    has_length = isinstance(train, MapExamples) or hasattr(train_data, "__len__")
    return CustomData(
        kind="dataset" if isinstance(train, MapExamples) else "batches",
        source=type(train_data).__name__[:MAX_NAME],
        train=len(train) if has_length else 0,
        validation=len(data.validation),
        test=len(data.test),
    )


def shapes_of(tree: Tree) -> str:
    return ", ".join("x".join(map(str, tensor.shape)) for tensor in tensors_in(tree))


def check_first_batch(ctx: TrainContext) -> None:
    """Call model, loss and accuracy with two examples, so that their mistakes are found before a run is created."""
    first = to_device(ctx.batches.at(0, ctx.ranks.rank, ctx.ranks.world_size), ctx.ranks.device)
    two = replace(
        first,
        inputs=map_tensors(lambda t: t[:2] if t.dim() else t, first.inputs),
        targets=map_tensors(lambda t: t[:2] if t.dim() else t, first.targets),
    )
    with preserved_rng(), eval_mode(ctx.model), torch.no_grad():
        outputs = ctx.objective.compute_outputs(ctx.model, two)
        batch_sums(ctx.objective, outputs, two, ctx.objective.loss(outputs, two))


def report_exactness(batches: Batches, display: Display) -> None:
    """Say at the start if a resumed run may differ from an uninterrupted one."""
    if isinstance(batches, StreamBatches):
        display.warn(STREAM)
    elif isinstance(batches, MapBatches) and not batches.is_reproducible():
        display.warn(NOT_REPRODUCIBLE)


def check_unused(folder: Path) -> None:
    if has_run(folder):
        raise ValueError(f"{folder} already contains a run; pass resume=True to continue it, or choose another dir")
    check_new(folder)


def default_folder(config: RunConfig, *, resume: bool) -> Path:
    """runs/CLASS; runs/CLASS-2 and so on for a new run if that exists."""
    assert isinstance(config.model, ModuleConfig)
    name = re.sub(r"\W+", "-", config.model.name).strip("-").lower() or RECIPE
    folder, n = RUNS / name, 1
    while not resume and folder.exists():
        n += 1
        folder = RUNS / f"{name}-{n}"
    return folder


def open_or_create(folder: Path, ctx: TrainContext, display: Display, *, resume: bool) -> RunDirectory:
    """A new run directory, or with `resume` the existing one, whose length and threads may change."""
    config = ctx.config
    if not (resume and has_run(folder)):
        check_unused(folder)
        return RunDirectory.create(folder, config.to_dict(), display.warn)
    run = RunDirectory.open(folder, display.warn)
    before = RunConfig.from_dict(run.config)
    changes = config.changes_since(before)
    if others := {name: change for name, change in changes.items() if name not in CHANGED_BY_RESUME}:
        listed = ", ".join(f"{name} was {old!r:.60}, is {new!r:.60}" for name, (old, new) in others.items())
        raise ValueError(f"{folder} was started with other settings, data or another model: {listed}")
    if changes:
        trained = max(checkpoint.saved_steps(run.path), default=0)
        if ctx.n_steps < trained:
            raise ValueError(f"{folder} has been trained for {trained} steps already, got {ctx.n_steps}")
        with run.lock():
            run.change_config(config.to_dict())
    return run


def resume_fit(
    run: str | Path,
    parts: UserParts,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    threads: int | None = None,
    shard: bool = False,
    quiet: bool = False,
) -> TrainResult:
    """Continue a run of `fit` with its own settings; the user's parts are passed again."""
    directory = RunDirectory.open(run)
    config = RunConfig.from_dict(directory.config)
    if not isinstance(config.data, CustomData):
        raise ValueError(f"{directory.path} was trained by the recipe {config.recipe}; resume it without --model")
    if config.optimizer.name == FACTORY:
        raise ValueError(f"{directory.path} has an optimizer of your own; continue it with fit(..., resume=True)")
    if epochs is not None and steps is not None:
        raise ValueError(f"epochs and steps are mutually exclusive, got epochs={epochs} and steps={steps}")
    training = config.training
    if epochs is not None or steps is not None:
        training = replace(training, epochs=epochs or 0, steps=steps or 0)
    training = training if threads is None else replace(training, threads=threads)
    settings = FitSettings(training, config.optimizer, config.snapshots, config.seed)
    return fit_parts(parts, settings, directory.path, resume=True, shard=shard, quiet=quiet)


def cpu_copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
