"""What a run will take, from a few real steps that leave nothing behind: parameters, memory, seconds."""

import time
from dataclasses import dataclass
from datetime import datetime, timedelta

import torch
from torch import Tensor

from clearhead.data.batches import evaluation_batches
from clearhead.data.config import N_VIEWS
from clearhead.messages import duration, round_count
from clearhead.nn.stage import testing_stage
from clearhead.training.config import RunConfig
from clearhead.training.distributed import Processes
from clearhead.training.evaluate import BATCH_SIZE
from clearhead.training.loop import update
from clearhead.training.objective import to_device
from clearhead.training.progress import Display, padding_line
from clearhead.training.setup import Setup, own_surroundings, set_up
from clearhead.training.signals import StopRequest
from clearhead.training.state import Standing

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
    with own_surroundings(config.training.threads):
        setup = set_up(config, Processes(device=device), shard=False, report=display.warn)
        memory = memory_of(setup)
        per_step = time_steps(setup)
        per_answer = time_answer(setup)
    validation, n_views = len(setup.data.validation), N_VIEWS[config.training.views]
    return Estimate(
        parameters=sum(weight.numel() for weight in setup.model.parameters()),
        memory=memory,
        examples=len(setup.data.train),
        steps=setup.n_steps,
        steps_per_epoch=setup.batches.steps_per_epoch,
        seconds_per_step=per_step,
        seconds_per_evaluation=validation * per_answer,
        evaluations=-(-setup.n_steps // setup.evaluate_every) if validation else 0,
        evaluations_per_epoch=setup.batches.steps_per_epoch / setup.evaluate_every if validation else 0.0,
        seconds_per_test=len(setup.data.test) * n_views * per_answer,
        padding=setup.batches.padding(),
        notes=setup.data.notes,
    )


def memory_of(setup: Setup) -> int:
    """Of the first step: whatever lasts, and every tensor that is kept between its way forth and back."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        update(setup, Standing(), StopRequest())
    weights = {weight.untyped_storage().data_ptr(): size_of(weight) for weight in setup.model.parameters()}
    lasting = 2 * sum(weights.values())  # and a gradient for each
    lasting += sum(map(size_of, setup.optimizers.state_tensors().values()))
    lasting += sum(map(size_of, setup.average.averages.values())) if setup.average else 0
    portion = sum(size for place, size in kept.items() if place not in weights)
    return lasting + portion // setup.config.training.accumulate


def size_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def time_steps(setup: Setup) -> float:
    """Seconds for one step."""
    standing, request = Standing(), StopRequest()
    setup.model.train()
    for _ in range(WARM_UP):
        update(setup, standing, request)
    start, n = time.perf_counter(), 0
    while n < TIMED and time.perf_counter() - start < SECONDS:
        update(setup, standing, request)
        n += 1
    return (time.perf_counter() - start) / n


def time_answer(setup: Setup) -> float:
    """Seconds for one view of one example, from a batch of those that validate, or else of those for the test."""
    examples = setup.data.validation if len(setup.data.validation) else setup.data.test
    if not len(examples):
        return 0.0
    start = time.perf_counter()
    batch = next(evaluation_batches(examples, setup.data.normalise, BATCH_SIZE))
    with testing_stage(setup.model), torch.inference_mode():
        setup.objective.ask(setup.model, to_device(batch, setup.processes.device)).cpu()
    return (time.perf_counter() - start) / len(batch.inputs)
