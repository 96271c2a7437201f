"""Estimate the training time and memory of a run from a few real steps, without writing files."""

import time
from dataclasses import dataclass
from datetime import datetime, timedelta

import torch
from torch import Tensor

from clearhead.data.batches import evaluation_batches
from clearhead.data.options import N_VIEWS
from clearhead.messages import duration, round_count
from clearhead.nn.blocks import eval_mode
from clearhead.training.config import RunConfig
from clearhead.training.context import TrainContext, build_context, isolated_torch_state
from clearhead.training.distributed import Ranks, choose_device
from clearhead.training.evaluation import to_device
from clearhead.training.loop import train_step
from clearhead.training.progress import Display, StopRequest, padding_summary
from clearhead.training.state import TrainState

WARMUP_STEPS, TIMED_STEPS, MAX_SECONDS = 2, 20, 5.0
"""untimed steps; timed steps, and the time after which no further step is timed"""
CENTURY = 100 * 365 * 24 * 3600.0
"""seconds"""


@dataclass(frozen=True)
class Estimate:
    parameters: int
    memory: int
    """bytes of weights, gradients, optimizer state, EMA and saved activations, without torch itself and the data"""
    examples: int
    """number of training examples"""
    steps: int
    steps_per_epoch: int
    seconds_per_step: float
    seconds_per_evaluation: float
    evaluations: int
    evaluations_per_epoch: float
    seconds_per_test: float
    """0 if there is no test set"""
    padding: tuple[float, float] | None
    """see Batches.padding"""
    notes: tuple[str, ...] = ()
    """see Dataset.notes"""

    @property
    def seconds_per_epoch(self) -> float:
        """Training and validation time of a full epoch, even if the run is shorter."""
        evaluating = self.evaluations_per_epoch * self.seconds_per_evaluation
        return self.steps_per_epoch * self.seconds_per_step + evaluating

    @property
    def seconds(self) -> float:
        evaluating = self.evaluations * self.seconds_per_evaluation + self.seconds_per_test
        return self.steps * self.seconds_per_step + evaluating

    @property
    def end(self) -> str:
        if self.seconds > CENTURY:
            return "more than a century from now"
        return f"if started now, it ends at {datetime.now() + timedelta(seconds=self.seconds):%H:%M on %d %B}"

    def __str__(self) -> str:
        epochs = self.steps / self.steps_per_epoch
        tested = ", including the test" if self.seconds_per_test else ""
        return "\n".join(
            [
                *self.notes,
                f"parameters         {self.parameters:,}",
                f"memory             {self.memory / 2**20:,.0f} MB for weights, optimizer and one step",
                f"training examples  {self.examples:,}",
                *([f"padding            {padding_summary(*self.padding)}"] if self.padding else []),
                f"steps              {self.steps:,} ({round_count(epochs)} epoch{'' if epochs == 1 else 's'})",
                f"time per step      {duration(self.seconds_per_step)}",
                f"time per epoch     {duration(self.seconds_per_epoch)}, including validation",
                f"total time         {duration(self.seconds)}{tested}; {self.end}",
            ]
        )


def estimate(config: RunConfig) -> Estimate:
    """Train for a few steps in memory and measure them."""
    display = Display(quiet=True)
    with isolated_torch_state(config.training.threads):
        ctx = build_context(config, Ranks(device=choose_device()), shard=False, report=display.warn)
        memory = measure_memory(ctx)
        per_step = time_steps(ctx)
        per_example = time_example(ctx)
    validation, n_views = len(ctx.data.validation), N_VIEWS[config.training.tta]
    return Estimate(
        parameters=sum(weight.numel() for weight in ctx.model.parameters()),
        memory=memory,
        examples=len(ctx.data.train),
        steps=ctx.n_steps,
        steps_per_epoch=ctx.batches.steps_per_epoch,
        seconds_per_step=per_step,
        seconds_per_evaluation=validation * per_example,
        evaluations=-(-ctx.n_steps // ctx.evaluate_every) if validation else 0,
        evaluations_per_epoch=ctx.batches.steps_per_epoch / ctx.evaluate_every if validation else 0.0,
        seconds_per_test=len(ctx.data.test) * n_views * per_example,
        padding=ctx.batches.padding(),
        notes=ctx.data.notes,
    )


def measure_memory(ctx: TrainContext) -> int:
    """Bytes that persist between steps, and of the activations that the first step saves for its backward pass."""
    saved: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        train_step(ctx, TrainState(), StopRequest())
    weights = {weight.untyped_storage().data_ptr(): size_of(weight) for weight in ctx.model.parameters()}
    persistent = 2 * sum(weights.values())  # weights and gradients
    persistent += sum(map(size_of, ctx.optimizers.state_tensors().values()))
    persistent += sum(map(size_of, ctx.ema.averages.values())) if ctx.ema else 0
    activations = sum(size for pointer, size in saved.items() if pointer not in weights)
    return persistent + activations // ctx.config.training.grad_accum_steps


def size_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def time_steps(ctx: TrainContext) -> float:
    """Seconds per step."""
    state, request = TrainState(), StopRequest()
    ctx.model.train()
    for _ in range(WARMUP_STEPS):
        train_step(ctx, state, request)
    start, n = time.perf_counter(), 0
    while n < TIMED_STEPS and time.perf_counter() - start < MAX_SECONDS:
        train_step(ctx, state, request)
        n += 1
    return (time.perf_counter() - start) / n


def time_example(ctx: TrainContext) -> float:
    """Seconds to evaluate one view of one example, measured on a validation batch, or a test batch if there is none."""
    examples = ctx.data.validation if len(ctx.data.validation) else ctx.data.test
    if not len(examples):
        return 0.0
    start = time.perf_counter()
    batch = next(evaluation_batches(examples, ctx.data.normalize, ctx.config.training.eval_batch_size))
    with eval_mode(ctx.model), torch.inference_mode():
        ctx.objective.compute_outputs(ctx.model, to_device(batch, ctx.ranks.device)).cpu()
    return (time.perf_counter() - start) / len(batch.inputs)
