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
class Outcome:
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


def train(config: RunConfig, folder: str | Path, *, shard: bool = False, quiet: bool = False) -> Outcome:
    """Trains a new run in a new folder. `shard` splits the weights over the processes (FSDP2)."""
    with current_ranks() as team, isolated_torch_state(config.training.threads):
        display = Display(quiet=quiet) if team.is_main else Silence()
        setup = build_context(
            config, team, shard=shard, report=display.warn
        )  # first: a config that fails leaves no folder
        run = RunDirectory.create(folder, setup.config.to_dict(), display.warn) if team.is_main else None
        return fit(setup, run, display)


def resume(folder: str | Path, *, shard: bool = False, quiet: bool = False) -> Outcome:
    """Continues a run after its newest checkpoint, to its end."""
    with current_ranks() as team:
        display = Display(quiet=quiet) if team.is_main else Silence()
        run = RunDirectory.open(folder, display.warn) if team.is_main else None
        config = RunConfig.from_dict(team.broadcast_json(with_precision_of_checkpoint(run) if run else None))
        if run:
            check_newest_matches(run, config)
        with isolated_torch_state(config.training.threads):
            with changed_file_messages(run, config):
                setup = build_context(config, team, shard=shard, report=display.warn)
            outcome = fit(setup, run, display)
            if outcome.reason != "stopped":
                display.say(f"{run.path if run else folder} is trained{reached(outcome)}")
            return outcome


def check_newest_matches(run: RunDirectory, config: RunConfig) -> None:
    """Refuses a config.json that does not match the newest checkpoint: the run would continue with another model or
    other data. Before the model is built, which may not fit into memory."""
    if found := RunDirectory(run.path, run.config, report=lambda message: None).newest():
        check_config_matches(run, config, found)


def with_precision_of_checkpoint(run: RunDirectory) -> dict[str, Any]:
    """The run's config. Where it says "auto", as configs did before they recorded the choice, it is what the newest
    checkpoint was trained in."""
    training = run.config.get("training", {})
    if isinstance(training, dict) and training.get("precision") == "auto" and (found := run.newest()):
        return run.config | {"training": training | {"precision": found.state["made_with"]["precision"]}}
    return run.config


def reached(outcome: Outcome) -> str:
    if outcome.test is None:
        return ""
    return f": {outcome.test['accuracy']:.2%} on the test set{tta_note(outcome.test['tta'])}"


def fit(setup: TrainContext, run: RunDirectory | None, display: Display) -> Outcome:
    """From wherever the run is to its end. Only the first process has a run directory."""
    with run.lock() if run else nullcontext(), stopping_on_signals() as request:
        standing = restore(setup, run.newest() if run else None, display.warn)
        if run:
            run.drop_after(standing.step)
            if standing.best_step in checkpoint.steps(run.path):  # a kill may have come between saving and marking
                run.mark_best(standing.best_step)
        announce(setup, display, is_new=standing.step == 0)
        if standing.step == 0:
            announce_sequences(setup, display)
        with display.training(setup.n_steps, standing.step, setup.config.training.batch_size):
            try:
                reason = train_on(setup, standing, run, request, display)
            except DivergedError as error:
                if run:  # resuming drops this record: it lies after the newest checkpoint
                    run.log({"kind": "diverged", "step": error.step})
                raise
        test = None
        if reason != "stopped" and len(setup.data.test):
            try:
                with request.met_at_once():
                    test = test_once(setup, standing, run, display)
            except StoppedError:
                reason = "stopped"
    if reason == "stopped" and run:
        display.say(f"stopped after step {standing.step}; go on with: clearhead resume {run.path}")
    return Outcome(reason, standing.step, standing.best_step, test)


def announce(setup: TrainContext, display: Display, *, is_new: bool) -> None:
    """What is trained, on which data and how; with a hint where the machine has too little time for it. Data that has
    more to say of itself than its split does so once, before the first step."""
    training, data, team = setup.config.training, setup.data, setup.processes
    threads, n_parameters = torch.get_num_threads(), sum(weight.numel() for weight in setup.model.parameters())
    parts = {"training": data.train, "validation": data.validation, "test": data.test}
    split = ", ".join(f"{len(part):,} {name}" for name, part in parts.items())
    reason = f" (auto: {setup.precision_reason})" if setup.precision_reason else ""
    processes = f"{team.world} processes, " if team.world > 1 else ""
    n_steps, epochs = setup.n_steps, setup.n_steps / setup.batches.steps_per_epoch
    length = count(round(epochs, 2), "epoch") if epochs >= 0.01 else "less than 0.01 epochs"
    split_line = f"data       {setup.config.data.name}: {split} examples"
    for line in data.notes if is_new and data.notes else (split_line,):
        display.say(line)
    display.say(f"model      {type(setup.model).__name__}, {n_parameters:,} parameters")
    display.say(f"device     {team.device.type}, {processes}{count(threads, 'thread')}, {training.precision}{reason}")
    display.say(f"training   {count(n_steps, 'step')} ({length}), batch size {training.batch_size}")
    if team.device.type == "cpu" and (hint := busy_hint(threads, team.world)):
        display.say(hint)


def announce_sequences(setup: TrainContext, display: Display) -> None:
    """Before the first step: that no mask leaks, which is checked, and how much of the batches is padding."""
    if check_masks(setup):
        display.say("masks checked: no output sees what comes after it, or padding")
    if (padding := setup.batches.padding()) is not None:
        display.say(f"padding: {padding_line(*padding)}")


def train_on(
    setup: TrainContext, standing: TrainState, run: RunDirectory | None, request: StopRequest, display: Display
) -> Reason:
    patience = setup.config.training.patience
    setup.model.train()
    if standing.step == 0 and is_due(setup, 0):
        save_snapshot(setup, 0, run)
    while standing.step < setup.n_steps and not (patience and standing.stale >= patience):
        must_stop = update(setup, standing, request)
        step, is_last = standing.step, standing.step == setup.n_steps
        display.advance(step)

        if step % setup.config.training.log_every == 0 or is_last:
            log_training(setup, standing, run, display)

        if is_due(setup, step):
            save_snapshot(setup, step, run)

        is_best = False
        if (step % setup.evaluate_every == 0 or is_last) and len(setup.data.validation):
            is_best = validate(setup, standing, run, display)

        is_over = is_last or must_stop or (patience > 0 and standing.stale >= patience)
        if step % setup.checkpoint_every == 0 or is_best or is_over:
            save(setup, standing, run)
        if must_stop and (not is_last or len(setup.data.test)):
            return "stopped"
    return "finished" if standing.step == setup.n_steps else "patience"


def update(setup: TrainContext, standing: TrainState, request: StopRequest) -> bool:
    """One step: forward, backward, clip, update. Returns whether any process wants to stop after it."""
    config, team, step = setup.config, setup.processes, standing.step
    batch = to_device(setup.batches.at(step, team.rank, team.world), team.device)
    sums = torch.zeros(N_COUNTS, dtype=torch.float64, device=team.device)
    parts = microbatches(batch, config.training.grad_accum_steps)
    for i, part in enumerate(parts):
        with exchanging(setup.forward, is_last=i == len(parts) - 1):
            with autocast(config.training.precision, team.device):
                outputs = setup.objective.ask(setup.forward, part)
            loss = setup.objective.loss(outputs, part, config.training.label_smoothing)
            # processes average their gradients: times world, over the examples of all, is the mean over all examples
            (loss * (team.world / batch.n_global)).backward()
        sums += counts(loss, setup.objective.right(outputs.detach(), part), setup.objective.asked(part))

    # one message for all that processes have to agree on, and one wait for the GPU
    extra = torch.stack([setup.optimizers.squared_norm(), sums.new_full((), request.wanted)])
    *totals, squared_norm, n_stops = team.add(torch.cat([sums, extra])).tolist()
    norm = math.sqrt(squared_norm if setup.is_sharded else squared_norm / team.world)
    check_finite(totals[0] / batch.n_global, norm, step + 1)
    if config.optimizer.grad_clip and norm > config.optimizer.grad_clip:
        setup.optimizers.shorten(config.optimizer.grad_clip / norm)
    setup.optimizers.step(lr_multiplier(step, setup.n_steps, config.optimizer))
    setup.optimizers.zero_grad()
    if setup.average is not None:
        setup.average.update(step)

    standing.step += 1
    standing.sums = [before + now for before, now in zip(standing.sums, totals, strict=True)]
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


def log_training(setup: TrainContext, standing: TrainState, run: RunDirectory | None, display: Display) -> None:
    """The mean over the steps since the last such record."""
    config = setup.config.optimizer
    lr = config.lr * lr_multiplier(standing.step - 1, setup.n_steps, config)
    record = metrics_header("train", setup, standing) | summary(standing.sums) | {"lr": lr, "seconds": standing.seconds}
    standing.sums = [0.0] * N_COUNTS
    if run:
        run.log(record)
    display.trained(record)


def validate(setup: TrainContext, standing: TrainState, run: RunDirectory | None, display: Display) -> bool:
    """Evaluates the averaged weights if there are any; returns whether this is the best so far."""
    with setup.average.in_place() if setup.average else nullcontext():
        result = evaluate(setup.model, setup.objective, setup.data.validation, setup.data.normalize, setup.processes)
    check_finite_weights(math.isfinite(result["loss"]), standing.step)
    is_best = standing.judge(setup.objective.score(result))
    record = metrics_header("validation", setup, standing) | result | {"seconds": standing.seconds}
    if run:
        run.log(record)
    display.evaluated(record, "  best so far" if is_best else "")
    return is_best


def save(setup: TrainContext, standing: TrainState, run: RunDirectory | None) -> None:
    state = capture_state(setup, standing)
    if run and state:
        tensors = [*state.model.values(), *state.optimizer.values()]
        check_finite_weights(all(bool(tensor.isfinite().all()) for tensor in tensors), standing.step)
        run.save(state, setup.config.training.keep_checkpoints)
        if standing.best_step == standing.step:
            run.mark_best(standing.step)


def test_once(setup: TrainContext, standing: TrainState, run: RunDirectory | None, display: Display) -> dict[str, Any]:
    """The best checkpoint on the test set, unless that has been done before this run was resumed."""
    of_now = [record for record in run.iter_records() if record.get("step") == standing.step] if run else []
    tested = [record for record in of_now if record.get("kind") == "test"]
    if known := setup.processes.broadcast_json(tested[-1] if tested else None):
        return dict(known)
    found = run.best() if run else None
    use_weights(setup, found)
    tta = setup.config.training.tta
    result = evaluate(
        setup.model,
        setup.objective,
        setup.data.test,
        setup.data.normalize,
        setup.processes,
        tta=tta,
    )
    if not math.isfinite(result["loss"]):
        raise DivergedError(
            f"the test loss is {result['loss']}: the weights are finite, but too large to compute with; "
            "train again with a smaller learning rate, a longer warm-up or grad_clip=1",
            standing.step,
        )
    record = (
        metrics_header("test", setup, standing)
        | {"best_step": setup.processes.broadcast_json(found and found.step)}
        | result
    )
    record |= {"tta": tta, "seconds": standing.seconds}
    if run:
        run.log(record)
    which = "best" if record["best_step"] == standing.best_step else "last"
    display.evaluated(record, tta_note(tta), f"test of the {which} checkpoint (step {record['best_step']})")
    return record


def metrics_header(kind: str, setup: TrainContext, standing: TrainState) -> dict[str, Any]:
    return {"kind": kind, "step": standing.step, "epoch": standing.step / setup.batches.steps_per_epoch}


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
