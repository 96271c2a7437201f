"""The training loop, from top to bottom: `train` and `resume` both end up in `fit`, and `fit` in `update`.

With one process or many, the code is the same: the first process writes, all compute. A run that is resumed is the run
that was never interrupted, bit for bit, with the same software and the same number of threads and processes.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from clearhead.data.augment import tta_note
from clearhead.training import checkpoint
from clearhead.training.compatibility import check_config_matches
from clearhead.training.config import OptimizerConfig, RunConfig
from clearhead.training.context import TrainContext, autocast, build_context, check_masks, isolated_torch_state
from clearhead.training.distributed import current_ranks, exchanging
from clearhead.training.objectives import N_COUNTS, counts, evaluate, microbatches, summary, to_device
from clearhead.training.progress import (
    DIVERGED,
    FINISHED,
    STOPPED,
    Display,
    Silence,
    StoppedError,
    StopRequest,
    busy_hint,
    count,
    padding_line,
    stopping_on_signals,
)
from clearhead.training.run_directory import RunDirectory
from clearhead.training.snapshots import is_due, save_snapshot
from clearhead.training.state import TrainState, capture_state, changed_file_messages, restore, use_weights

Reason = Literal["finished", "patience", "stopped"]


class DivergedError(ArithmeticError):
    """The loss, the gradient or a weight was not a finite number; the step that it happened in is in no checkpoint."""

    exit_code = DIVERGED

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


@dataclass(frozen=True)
class TrainResult:
    reason: Reason
    """trained to the end; no better evaluation for too long; or asked to stop"""
    step: int
    best_step: int
    """the evaluation that was best, and whose checkpoint is kept; 0 before the first"""
    test: dict[str, Any] | None
    """the best checkpoint on the test set; None when the run was stopped, or there is no such set"""

    @property
    def exit_code(self) -> int:
        return STOPPED if self.reason == "stopped" else FINISHED


def train(config: RunConfig, folder: str | Path, *, shard: bool = False, quiet: bool = False) -> TrainResult:
    """Trains a new run in a new folder. `shard` splits the weights over the processes (FSDP2)."""
    with current_ranks() as ranks, isolated_torch_state(config.training.threads):
        display = Display(quiet=quiet) if ranks.is_main else Silence()
        ctx = build_context(
            config, ranks, shard=shard, report=display.warn
        )  # first: a config that fails leaves no folder
        run = RunDirectory.create(folder, ctx.config.to_dict(), display.warn) if ranks.is_main else None
        return fit(ctx, run, display)


def resume(folder: str | Path, *, shard: bool = False, quiet: bool = False) -> TrainResult:
    """Continues a run after its newest checkpoint, to its end."""
    with current_ranks() as ranks:
        display = Display(quiet=quiet) if ranks.is_main else Silence()
        run = RunDirectory.open(folder, display.warn) if ranks.is_main else None
        config = RunConfig.from_dict(ranks.broadcast_json(with_precision_of_checkpoint(run) if run else None))
        if run:
            check_newest_matches(run, config)
        with isolated_torch_state(config.training.threads):
            with changed_file_messages(run, config):
                ctx = build_context(config, ranks, shard=shard, report=display.warn)
            outcome = fit(ctx, run, display)
            if outcome.reason != "stopped":
                display.say(f"{run.path if run else folder} is trained{reached(outcome)}")
            return outcome


def check_newest_matches(run: RunDirectory, config: RunConfig) -> None:
    """Refuses a config.json that does not match the newest checkpoint: the run would continue with another model or
    other data. Before the model is built, which may not fit into memory."""
    if found := RunDirectory(run.path, run.config, report=lambda message: None).latest_checkpoint():
        check_config_matches(run, config, found)


def with_precision_of_checkpoint(run: RunDirectory) -> dict[str, Any]:
    """The run's config. Where it says "auto", as configs did before they recorded the choice, it is what the newest
    checkpoint was trained in."""
    training = run.config.get("training", {})
    if isinstance(training, dict) and training.get("precision") == "auto" and (found := run.latest_checkpoint()):
        return run.config | {"training": training | {"precision": found.state["environment"]["precision"]}}
    return run.config


def reached(outcome: TrainResult) -> str:
    if outcome.test is None:
        return ""
    return f": {outcome.test['accuracy']:.2%} on the test set{tta_note(outcome.test['tta'])}"


def fit(ctx: TrainContext, run: RunDirectory | None, display: Display) -> TrainResult:
    """From wherever the run is to its end. Only the first process has a run directory."""
    with run.lock() if run else nullcontext(), stopping_on_signals() as request:
        state = restore(ctx, run.latest_checkpoint() if run else None, display.warn)
        if run:
            run.drop_after(state.step)
            if state.best_step in checkpoint.steps(run.path):  # a kill may have come between saving and marking
                run.mark_best(state.best_step)
        announce(ctx, display, is_new=state.step == 0)
        if state.step == 0:
            announce_sequences(ctx, display)
        with display.training(ctx.n_steps, state.step, ctx.config.training.batch_size):
            try:
                reason = train_on(ctx, state, run, request, display)
            except DivergedError as error:
                if run:  # resuming drops this record: it lies after the newest checkpoint
                    run.log({"kind": "diverged", "step": error.step})
                raise
        test = None
        if reason != "stopped" and len(ctx.data.test):
            try:
                with request.met_at_once():
                    test = test_once(ctx, state, run, display)
            except StoppedError:
                reason = "stopped"
    if reason == "stopped" and run:
        display.say(f"stopped after step {state.step}; go on with: clearhead resume {run.path}")
    return TrainResult(reason, state.step, state.best_step, test)


def announce(ctx: TrainContext, display: Display, *, is_new: bool) -> None:
    """What is trained, on which data and how; with a hint where the machine has too little time for it. Data that has
    more to say of itself than its split does so once, before the first step."""
    training, data, ranks = ctx.config.training, ctx.data, ctx.ranks
    threads, n_parameters = torch.get_num_threads(), sum(weight.numel() for weight in ctx.model.parameters())
    parts = {"training": data.train, "validation": data.validation, "test": data.test}
    split = ", ".join(f"{len(part):,} {name}" for name, part in parts.items())
    reason = f" (auto: {ctx.precision_reason})" if ctx.precision_reason else ""
    processes = f"{ranks.world_size} processes, " if ranks.world_size > 1 else ""
    n_steps, epochs = ctx.n_steps, ctx.n_steps / ctx.batches.steps_per_epoch
    length = count(round(epochs, 2), "epoch") if epochs >= 0.01 else "less than 0.01 epochs"
    split_line = f"data       {ctx.config.data.name}: {split} examples"
    for line in data.notes if is_new and data.notes else (split_line,):
        display.say(line)
    display.say(f"model      {type(ctx.model).__name__}, {n_parameters:,} parameters")
    display.say(f"device     {ranks.device.type}, {processes}{count(threads, 'thread')}, {training.precision}{reason}")
    display.say(f"training   {count(n_steps, 'step')} ({length}), batch size {training.batch_size}")
    if ranks.device.type == "cpu" and (hint := busy_hint(threads, ranks.world_size)):
        display.say(hint)


def announce_sequences(ctx: TrainContext, display: Display) -> None:
    """Before the first step: that no mask leaks, which is checked, and how much of the batches is padding."""
    if check_masks(ctx):
        display.say("masks checked: no output sees what comes after it, or padding")
    if (padding := ctx.batches.padding()) is not None:
        display.say(f"padding: {padding_line(*padding)}")


def train_on(
    ctx: TrainContext, state: TrainState, run: RunDirectory | None, request: StopRequest, display: Display
) -> Reason:
    patience = ctx.config.training.patience
    ctx.model.train()
    if state.step == 0 and is_due(ctx, 0):
        save_snapshot(ctx, 0, run)
    while state.step < ctx.n_steps and not (patience and state.evals_since_best >= patience):
        must_stop = train_step(ctx, state, request)
        step, is_last = state.step, state.step == ctx.n_steps
        display.advance(step)

        if step % ctx.config.training.log_every == 0 or is_last:
            log_training(ctx, state, run, display)

        if is_due(ctx, step):
            save_snapshot(ctx, step, run)

        is_best = False
        if (step % ctx.evaluate_every == 0 or is_last) and len(ctx.data.validation):
            is_best = validate(ctx, state, run, display)

        is_over = is_last or must_stop or (patience > 0 and state.evals_since_best >= patience)
        if step % ctx.checkpoint_every == 0 or is_best or is_over:
            save(ctx, state, run)
        if must_stop and (not is_last or len(ctx.data.test)):
            return "stopped"
    return "finished" if state.step == ctx.n_steps else "patience"


def train_step(ctx: TrainContext, state: TrainState, request: StopRequest) -> bool:
    """One step: forward, backward, clip, update. Returns whether any process wants to stop after it."""
    config, ranks, step = ctx.config, ctx.ranks, state.step
    batch = to_device(ctx.batches.at(step, ranks.rank, ranks.world_size), ranks.device)
    sums = torch.zeros(N_COUNTS, dtype=torch.float64, device=ranks.device)
    parts = microbatches(batch, config.training.grad_accum_steps)
    for i, part in enumerate(parts):
        with exchanging(ctx.forward, is_last=i == len(parts) - 1):
            with autocast(config.training.precision, ranks.device):
                outputs = ctx.objective.compute_outputs(ctx.forward, part)
            loss = ctx.objective.loss(outputs, part, config.training.label_smoothing)
            # processes average their gradients: times world, over the examples of all, is the mean over all examples
            (loss * (ranks.world_size / batch.num_global)).backward()
        sums += counts(loss, ctx.objective.correct(outputs.detach(), part), ctx.objective.loss_mask(part))

    # one message for all that processes have to agree on, and one wait for the GPU
    extra = torch.stack([ctx.optimizers.squared_norm(), sums.new_full((), request.requested)])
    *totals, squared_norm, n_stops = ranks.all_reduce_sum(torch.cat([sums, extra])).tolist()
    norm = math.sqrt(squared_norm if ctx.is_sharded else squared_norm / ranks.world_size)
    check_finite(totals[0] / batch.num_global, norm, step + 1)
    if config.optimizer.grad_clip and norm > config.optimizer.grad_clip:
        ctx.optimizers.scale_grads_(config.optimizer.grad_clip / norm)
    ctx.optimizers.step(lr_multiplier(step, ctx.n_steps, config.optimizer))
    ctx.optimizers.zero_grad()
    if ctx.ema is not None:
        ctx.ema.update(step)

    state.step += 1
    state.sums = [before + now for before, now in zip(state.sums, totals, strict=True)]
    return n_stops > 0


def check_finite(loss: float, norm: float, step: int) -> None:
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise DivergedError(
            f"loss and gradient norm must be finite, got loss {loss} and norm {norm} at step {step}, which was not "
            "saved; try a smaller learning rate, a longer warm-up or grad_clip=1",
            step,
        )


def check_finite_weights(are_finite: bool, step: int) -> None:
    """The loss is of the weights before an update: the last one before a checkpoint may have made them infinite."""
    if not are_finite:
        raise DivergedError(
            f"weights, optimizer state or validation loss are not finite after step {step}, which was not saved; "
            "try a smaller learning rate, a longer warm-up or grad_clip=1",
            step,
        )


def log_training(ctx: TrainContext, state: TrainState, run: RunDirectory | None, display: Display) -> None:
    """The mean over the steps since the last such record."""
    config = ctx.config.optimizer
    lr = config.lr * lr_multiplier(state.step - 1, ctx.n_steps, config)
    record = metrics_header("train", ctx, state) | summary(state.sums) | {"lr": lr, "seconds": state.seconds}
    state.sums = [0.0] * N_COUNTS
    if run:
        run.log(record)
    display.trained(record)


def validate(ctx: TrainContext, state: TrainState, run: RunDirectory | None, display: Display) -> bool:
    """Evaluates the averaged weights if there are any; returns whether this is the best so far."""
    with ctx.ema.average_parameters() if ctx.ema else nullcontext():
        result = evaluate(ctx.model, ctx.objective, ctx.data.validation, ctx.data.normalize, ctx.ranks)
    check_finite_weights(math.isfinite(result["loss"]), state.step)
    is_best = state.update_best(ctx.objective.score(result))
    record = metrics_header("validation", ctx, state) | result | {"seconds": state.seconds}
    if run:
        run.log(record)
    display.evaluated(record, "  best so far" if is_best else "")
    return is_best


def save(ctx: TrainContext, state: TrainState, run: RunDirectory | None) -> None:
    saved = capture_state(ctx, state)
    if run and saved:
        tensors = [*saved.model.values(), *saved.optimizer.values()]
        check_finite_weights(all(bool(tensor.isfinite().all()) for tensor in tensors), state.step)
        run.save(saved, ctx.config.training.keep_checkpoints)
        if state.best_step == state.step:
            run.mark_best(state.step)


def test_once(ctx: TrainContext, state: TrainState, run: RunDirectory | None, display: Display) -> dict[str, Any]:
    """The best checkpoint on the test set, unless that has been done before this run was resumed."""
    of_now = [record for record in run.iter_records() if record.get("step") == state.step] if run else []
    tested = [record for record in of_now if record.get("kind") == "test"]
    if known := ctx.ranks.broadcast_json(tested[-1] if tested else None):
        return dict(known)
    found = run.best_checkpoint() if run else None
    use_weights(ctx, found)
    tta = ctx.config.training.tta
    result = evaluate(
        ctx.model,
        ctx.objective,
        ctx.data.test,
        ctx.data.normalize,
        ctx.ranks,
        tta=tta,
    )
    if not math.isfinite(result["loss"]):
        raise DivergedError(
            f"the test loss is {result['loss']}: the weights are finite, but too large to compute with; "
            "train again with a smaller learning rate, a longer warm-up or grad_clip=1",
            state.step,
        )
    record = metrics_header("test", ctx, state) | {"best_step": ctx.ranks.broadcast_json(found and found.step)} | result
    record |= {"tta": tta, "seconds": state.seconds}
    if run:
        run.log(record)
    which = "best" if record["best_step"] == state.best_step else "last"
    display.evaluated(record, tta_note(tta), f"test of the {which} checkpoint (step {record['best_step']})")
    return record


def metrics_header(kind: str, ctx: TrainContext, state: TrainState) -> dict[str, Any]:
    return {"kind": kind, "step": state.step, "epoch": state.step / ctx.batches.steps_per_epoch}


# The learning rate as a pure function of the step, so that there is nothing to save and nothing to step twice.


def lr_multiplier(step: int, n_steps: int, config: OptimizerConfig) -> float:
    """What the learning rate is multiplied by at this step (from 0): a warm-up to 1, then down to `final`.

    warm-up    (step + 1) / warmup
    linear     1 - (1 - final) t           with t from 0 after the warm-up to 1 after the last step
    cosine     final + (1 - final) (1 + cos(pi t)) / 2
    constant   1
    """
    if step < config.warmup:
        return (step + 1) / config.warmup
    t = min(1.0, (step - config.warmup) / max(1, n_steps - config.warmup))
    match config.schedule:
        case "linear":
            return 1 - (1 - config.final_lr_fraction) * t
        case "cosine":
            return config.final_lr_fraction + (1 - config.final_lr_fraction) * (1 + math.cos(math.pi * t)) / 2
        case _:
            return 1.0
