"""The training loop: `train` and `resume` set up a run, `run_training` trains it, and `train_step` makes one update.

The code is the same for one process and for many: all ranks compute, and rank 0 writes the files. A resumed run equals
an uninterrupted one bit for bit, given the same software and the same number of threads and processes.
"""

import math
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from clearhead.data import TTA
from clearhead.data.batches import tta_note
from clearhead.data.dataset import Examples
from clearhead.training import checkpoint
from clearhead.training.config import OptimizerConfig, RunConfig
from clearhead.training.context import TrainContext, autocast, build_context, check_masks, isolated_torch_state
from clearhead.training.distributed import Ranks, current_ranks, gradient_sync
from clearhead.training.evaluation import (
    NUM_SUMS,
    batch_sums,
    call_callbacks,
    compute_metrics,
    evaluate,
    microbatches,
    to_device,
    zero_sums,
)
from clearhead.training.progress import (
    DIVERGED,
    Display,
    Reason,
    SilentDisplay,
    StoppedError,
    StopRequest,
    TrainResult,
    count,
    loss_and_accuracy,
    oversubscription_hint,
    padding_summary,
    stopping_on_signals,
)
from clearhead.training.run_directory import RunDirectory, check_new, has_run, open_or_create
from clearhead.training.snapshots import save_snapshot
from clearhead.training.state import (
    TrainState,
    capture_state,
    changed_file_messages,
    check_config_matches,
    load_eval_weights,
    restore,
)

REMEDY = "try a smaller learning rate, a longer warm-up or grad_clip=1"


class DivergedError(ArithmeticError):
    """The loss, the gradient or a weight is not finite. No checkpoint contains the step at which it happened."""

    exit_code = DIVERGED

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


def train(
    config: RunConfig,
    folder: str | Path,
    *,
    resume: bool = False,
    numbered: bool = False,
    shard: bool = False,
    quiet: bool = False,
) -> TrainResult:
    """Train a run in a new folder.

    With `resume`, continue the run in this folder if there is one with the same config. With `numbered`, append -2, -3
    and so on to the folder's name if it exists. `shard` splits the weights over the processes (FSDP2).
    """
    folder = Path(folder)
    if not resume and not numbered:
        check_new(folder)  # before the data is read
    with current_ranks() as ranks, isolated_torch_state(config.training.threads):
        display = Display(quiet=quiet) if ranks.is_main else SilentDisplay()
        if resume:
            config = with_recorded_precision(config, folder, ranks)
        ctx = build_context(config, ranks, shard=shard, report=display.warn)  # an invalid config leaves no folder
        run = None
        if ranks.is_main:
            run = open_or_create(folder, ctx.config, resume=resume, numbered=numbered, report=display.warn)
        result = run_training(ctx, run, display)
        if run and result.reason != "stopped":
            display.info(f"saved in {run.path}; next:")
            for command in config.task.next_commands(has_test=result.test is not None):
                display.info(f"  clearhead {command.format(run.path)}")
        return result


def resume(
    folder: str | Path, *, shard: bool = False, quiet: bool = False, requested: Collection[str] = ()
) -> TrainResult:
    """Continue a run from its latest checkpoint to its end.

    Settings whose values differ from the checkpoint's are reported, except those in `requested`.
    """
    with current_ranks() as ranks:
        display = Display(quiet=quiet) if ranks.is_main else SilentDisplay()
        run = RunDirectory.open(folder, display.warn) if ranks.is_main else None
        config = RunConfig.from_dict(ranks.broadcast_json(run.config if run else None))
        if run:
            check_latest_matches(run, config)
        with isolated_torch_state(config.training.threads):
            with changed_file_messages(run, config):
                ctx = build_context(config, ranks, shard=shard, report=display.warn)
            result = run_training(ctx, run, display, requested)
            if run and result.reason != "stopped":
                display.info(f"training of {run.path} is complete{test_note(result)}")
            return result


def run_training(
    ctx: TrainContext, run: RunDirectory | None, display: Display, requested: Collection[str] = ()
) -> TrainResult:
    """Train from the latest checkpoint, or from the beginning, to the end, then test. Only rank 0 has a `run`."""
    with run.lock() if run else nullcontext(), stopping_on_signals() as request:
        state = restore(ctx, run.latest_checkpoint() if run else None, display.warn, requested)
        if run:
            run.drop_after(state.step)
            if state.best_step in checkpoint.saved_steps(run.path):  # a kill may have come between save and mark_best
                run.mark_best(state.best_step)
        announce(ctx, display, is_new=state.step == 0)
        if state.step:
            display.info(f"resuming   from the checkpoint of step {state.step:,}")
        with display.training(ctx.n_steps, state.step, ctx.config.training.batch_size):
            try:
                reason = train_loop(ctx, state, run, request, display)
            except DivergedError as error:
                if run:  # resuming drops this record: it comes after the latest checkpoint
                    run.log({"kind": "diverged", "step": error.step})
                raise
        test = None
        if reason != "stopped" and len(ctx.data.test):
            try:
                with request.raising():
                    test = test_best_checkpoint(ctx, state, run, display)
            except StoppedError:
                reason = "stopped"
    if reason == "stopped" and run:
        display.info(f"stopped after step {state.step}; {ctx.config.task.resume_hint(run.path)}")
    return TrainResult(reason, state.step, state.best_step or None, test)


def train_loop(
    ctx: TrainContext, state: TrainState, run: RunDirectory | None, request: StopRequest, display: Display
) -> Reason:
    config = ctx.config.training
    ctx.model.train()
    if state.step == 0 and ctx.is_snapshot_due(0):
        save_snapshot(ctx, 0, run)
    while state.step < ctx.n_steps and not (config.patience and state.evals_since_best >= config.patience):
        must_stop = train_step(ctx, state, request)
        step, is_last = state.step, state.step == ctx.n_steps
        display.advance(step)

        records = []
        if step % config.log_every == 0 or is_last:
            records.append(log_training(ctx, state, run, display))

        if ctx.is_snapshot_due(step):
            save_snapshot(ctx, step, run)

        if (step % ctx.evaluate_every == 0 or is_last) and len(ctx.data.validation):
            records.append(validate(ctx, state, run, display))

        is_over = is_last or must_stop or (config.patience > 0 and state.evals_since_best >= config.patience)
        is_saved = step % ctx.checkpoint_every == 0 or state.best_step == step or is_over
        if is_saved:
            save_checkpoint(ctx, state, run)
        if ctx.callbacks and (error := call_callbacks(ctx.callbacks, records, ctx.model, ctx.ranks)):
            if not is_saved:
                save_checkpoint(ctx, state, run)
            raise error
        if must_stop and (not is_last or len(ctx.data.test)):
            return "stopped"
    return "finished" if state.step == ctx.n_steps else "patience"


def train_step(ctx: TrainContext, state: TrainState, request: StopRequest) -> bool:
    """Forward, backward, clip, update. Returns whether any rank was asked to stop."""
    config, ranks, step = ctx.config, ctx.ranks, state.step
    batch = to_device(ctx.batches.at(step, ranks.rank, ranks.world_size), ranks.device)
    sums = zero_sums(ranks.device)
    parts = microbatches(batch, config.training.grad_accum_steps)
    for i, part in enumerate(parts):
        with gradient_sync(ctx.forward, is_last=i == len(parts) - 1):
            with autocast(config.training.precision, ranks.device):
                outputs = ctx.objective.compute_outputs(ctx.forward, part)
            loss = ctx.objective.loss(outputs, part, config.training.label_smoothing)
            # gradients are averaged over ranks: times world_size / num_global gives the mean over all examples
            (loss * (ranks.world_size / batch.num_global)).backward()
        sums += batch_sums(ctx.objective, outputs, part, loss).to(sums.device)

    # one message for everything that the ranks must agree on, and one synchronization with the GPU
    extra = torch.stack([ctx.optimizers.squared_norm().to(sums.device), sums.new_full((), request.requested)])
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


def lr_multiplier(step: int, n_steps: int, config: OptimizerConfig) -> float:
    """The factor of the learning rate at a step, counted from 0: a linear warm-up, then the schedule.

    warm-up    (step + 1) / warmup
    linear     1 - (1 - f) t                         with t from 0 after the warm-up to 1 after the last step,
    cosine     f + (1 - f) (1 + cos(pi t)) / 2       and f = final_lr_fraction
    constant   1

    A pure function of the step: a scheduler has no state to save.
    """
    if step < config.warmup:
        return (step + 1) / config.warmup
    t = min(1.0, (step - config.warmup) / max(1, n_steps - config.warmup))
    final = config.final_lr_fraction
    match config.schedule:
        case "linear":
            return 1 - (1 - final) * t
        case "cosine":
            return final + (1 - final) * (1 + math.cos(math.pi * t)) / 2
        case "constant":
            return 1.0
        case _:
            raise ValueError(f"unknown schedule {config.schedule!r}")


def log_training(ctx: TrainContext, state: TrainState, run: RunDirectory | None, display: Display) -> dict[str, Any]:
    """Log the mean over the steps since the previous training record."""
    config = ctx.config.optimizer
    lr = config.lr * lr_multiplier(state.step - 1, ctx.n_steps, config)
    record = metrics_header("train", ctx, state) | compute_metrics(state.sums) | {"lr": lr, "seconds": state.seconds}
    state.sums = [0.0] * NUM_SUMS
    if run:
        run.log(record)
    display.show_training(record)
    return record


def validate(ctx: TrainContext, state: TrainState, run: RunDirectory | None, display: Display) -> dict[str, Any]:
    """Evaluate on the validation set, with the averaged weights if there are any, and log the metrics."""
    with ctx.ema.average_parameters() if ctx.ema else nullcontext():
        result = evaluate_examples(ctx, ctx.data.validation)
    check_finite_weights(math.isfinite(result["loss"]), state.step)
    is_best = state.update_best(ctx.objective.score(result))
    record = metrics_header("validation", ctx, state) | result | {"seconds": state.seconds}
    if run:
        run.log(record)
    display.show_evaluation(record, "  best so far" if is_best else "")
    return record


def evaluate_examples(ctx: TrainContext, examples: Examples, tta: TTA = "none") -> dict[str, float]:
    batch_size = ctx.config.training.eval_batch_size
    return evaluate(ctx.model, ctx.objective, examples, ctx.data.normalize, ctx.ranks, batch_size=batch_size, tta=tta)


def save_checkpoint(ctx: TrainContext, state: TrainState, run: RunDirectory | None) -> None:
    captured = capture_state(ctx, state)
    if run and captured:
        constants = checkpoint.infinite_buffers(captured.state)
        weights = [tensor for name, tensor in captured.model.items() if name not in constants]
        tensors = [*weights, *captured.optimizer.values()]
        check_finite_weights(all(bool(tensor.isfinite().all()) for tensor in tensors), state.step)
        run.save(captured, ctx.config.training.keep_checkpoints)
        if state.best_step == state.step:
            run.mark_best(state.step)


def test_best_checkpoint(
    ctx: TrainContext, state: TrainState, run: RunDirectory | None, display: Display
) -> dict[str, Any]:
    """Evaluate the best checkpoint on the test set, unless the run already has the result of this step."""
    records = [record for record in run.iter_records() if record.get("step") == state.step] if run else []
    tests = [record for record in records if record.get("kind") == "test"]
    if known := ctx.ranks.broadcast_json(tests[-1] if tests else None):
        return dict(known)
    best = run.best_checkpoint() if run else None
    load_eval_weights(ctx, best)
    tta = ctx.config.training.tta
    result = evaluate_examples(ctx, ctx.data.test, tta)
    if not math.isfinite(result["loss"]):
        raise DivergedError(
            f"the test loss is {result['loss']}: the weights are finite, but too large to compute with; {REMEDY}",
            state.step,
        )
    best_step = ctx.ranks.broadcast_json(best and best.step)
    record = metrics_header("test", ctx, state) | {"best_step": best_step} | result
    record |= {"tta": tta, "seconds": state.seconds}
    if run:
        run.log(record)
    name = "best" if best_step == state.best_step else "last"
    display.show_evaluation(record, tta_note(tta), f"test of the {name} checkpoint (step {best_step})")
    if ctx.callbacks and (error := call_callbacks(ctx.callbacks, [record], ctx.model, ctx.ranks)):
        raise error
    return record


def metrics_header(kind: str, ctx: TrainContext, state: TrainState) -> dict[str, Any]:
    return {"kind": kind, "step": state.step, "epoch": state.step / ctx.batches.steps_per_epoch}


def check_finite(loss: float, norm: float, step: int) -> None:
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise DivergedError(
            f"loss and gradient norm must be finite, got loss {loss} and norm {norm} at step {step}, which was not "
            f"saved; {REMEDY}",
            step,
        )


def check_finite_weights(are_finite: bool, step: int) -> None:
    """The loss of a step is computed before its update, which may have made the weights infinite."""
    if not are_finite:
        raise DivergedError(
            f"weights, optimizer state or validation loss are not finite after step {step}, which was not saved; "
            f"{REMEDY}",
            step,
        )


def check_latest_matches(run: RunDirectory, config: RunConfig) -> None:
    """Refuse a config.json that does not match the latest checkpoint, before building a model that may not fit into
    memory."""
    if found := RunDirectory(run.path, run.config, report=lambda message: None).latest_checkpoint():
        check_config_matches(run.path, config, found)


def with_recorded_precision(config: RunConfig, folder: Path, ranks: Ranks) -> RunConfig:
    """The config with precision "auto" replaced by what the run in this folder, if there is one, has resolved it to."""
    if config.training.precision != "auto":
        return config
    recorded = None
    if ranks.is_main and has_run(folder):
        recorded = RunConfig.from_dict(RunDirectory.open(folder).config).training.precision
    precision = ranks.broadcast_json(recorded) or config.training.precision
    return replace(config, training=replace(config.training, precision=precision))


def test_note(result: TrainResult) -> str:
    if result.test is None:
        return ""
    return f": test {loss_and_accuracy(result.test)}{tta_note(result.test['tta'])}"


def announce(ctx: TrainContext, display: Display, *, is_new: bool) -> None:
    """Print data, model, device and length. Before the first step, also check the masks of models of sequences, and
    print how much of the batches is padding."""
    training, data, ranks = ctx.config.training, ctx.data, ctx.ranks
    threads, n_parameters = torch.get_num_threads(), sum(weight.numel() for weight in ctx.model.parameters())
    reason = f" (auto: {ctx.precision_reason})" if ctx.precision_reason else ""
    processes = f"{ranks.world_size} processes, " if ranks.world_size > 1 else ""
    epochs = ctx.n_steps / ctx.batches.steps_per_epoch
    length = count(round(epochs, 2), "epoch") if epochs >= 0.01 else "less than 0.01 epochs"
    for line in data.notes if is_new and data.notes else (f"data       {ctx.config.task.describe(data)}",):
        display.info(line)
    display.info(f"model      {type(ctx.model).__name__}, {n_parameters:,} parameters")
    display.info(f"device     {ranks.device.type}, {processes}{count(threads, 'thread')}, {training.precision}{reason}")
    display.info(f"training   {count(ctx.n_steps, 'step')} ({length}), batch size {training.batch_size}")
    if ranks.device.type == "cpu" and (hint := oversubscription_hint(threads, ranks.world_size)):
        display.info(hint)
    if is_new and check_masks(ctx):
        display.info("masks      checked: no output depends on later tokens or on padding")
    if is_new and (padding := ctx.batches.padding()) is not None:
        display.info(f"padding    {padding_summary(*padding)}")
