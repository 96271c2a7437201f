"""Trial runs: estimate the time and memory of a recipe from a few real steps, and verify that resuming it is exact.

`estimate` trains in memory, without writing files. `verify_resume` checks on this machine that a run that was killed
and resumed equals an uninterrupted one, bit for bit.
"""

import json
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.data import N_VIEWS
from clearhead.data.batches import evaluation_batches
from clearhead.messages import duration, round_count
from clearhead.nn.blocks import eval_mode
from clearhead.training.config import RunConfig
from clearhead.training.context import TrainContext, build_context, isolated_torch_state
from clearhead.training.distributed import Ranks, choose_device
from clearhead.training.evaluation import to_device
from clearhead.training.loop import TrainResult, resume, train, train_step
from clearhead.training.progress import Display, StopRequest, padding_summary
from clearhead.training.run_directory import Report, RunDirectory
from clearhead.training.state import TrainState

WARMUP_STEPS, TIMED_STEPS, MAX_SECONDS = 2, 20, 5.0
"""untimed steps; timed steps, and the time after which no further step is timed"""
CENTURY = 100 * 365 * 24 * 3600.0
"""seconds"""
MIN_STEPS = 4
PACKAGE_ROOT = Path(__file__).parents[2]
"""the folder from which this package was imported"""

CHILD_CODE = """
import json, sys
folder, package_root = sys.argv[1:]
sys.path.insert(0, package_root)
import clearhead
sys.path.remove(package_root)
from clearhead.training.config import RunConfig
from clearhead.training.loop import train
train(RunConfig.from_dict(json.load(sys.stdin)), folder, quiet=True)
"""
"""code of the process to be killed: imports this package, and nothing else, from PACKAGE_ROOT"""


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


@dataclass(frozen=True)
class Verification:
    """The result of `verify_resume`."""

    steps: int
    """length of both runs"""
    killed_at: int
    """the last logged step when the process was killed"""
    resumed_from: int
    """the step of the latest checkpoint at that time; 0 without one"""
    differences: tuple[str, ...]
    """names of the tensors and other parts in which the two runs differ"""

    @property
    def is_exact(self) -> bool:
        return not self.differences


def verify_resume(config: RunConfig, folder: str | Path, report: Report = lambda line: None) -> Verification:
    """Compare an uninterrupted run with one that is killed halfway (SIGKILL) and resumed, bit for bit.

    The runs are saved in folder/uninterrupted and folder/killed. `report` is called before each phase.
    """
    folder = Path(folder)
    threads = config.training.threads or torch.get_num_threads()
    config = replace(config, training=replace(config.training, threads=threads, log_every=1))
    report("training without interruption ...")
    n_steps = final_step(train(config, folder / "uninterrupted", quiet=True))
    config = RunConfig.from_dict(RunDirectory.open(folder / "uninterrupted").config)  # with precision "auto" resolved
    if n_steps < MIN_STEPS:
        raise ValueError(f"verify-resume needs at least {MIN_STEPS} steps to kill a run halfway, got {n_steps}")
    report(f"trained {n_steps} steps; training again in a process that is killed halfway ...")
    killed_at = train_and_kill(config, folder / "killed", n_steps // 2)
    checkpoint = RunDirectory.open(folder / "killed").latest_checkpoint()
    resumed_from = checkpoint.step if checkpoint else 0
    report(f"killed at step {killed_at}; resuming from step {resumed_from} ...")
    final_step(resume(folder / "killed", quiet=True))
    report("resumed and finished; comparing the two runs ...")
    differences = tuple(compare(folder / "uninterrupted", folder / "killed"))
    return Verification(n_steps, killed_at, resumed_from, differences)


def final_step(result: TrainResult) -> int:
    """The last step of a finished run; KeyboardInterrupt if a signal has stopped it, to end the verification too."""
    if result.reason == "stopped":
        raise KeyboardInterrupt
    return result.step


def train_and_kill(config: RunConfig, folder: Path, step: int) -> int:
    """Train in a subprocess, kill it as soon as `step` is logged, and return the last logged step."""
    child = subprocess.Popen(  # -P: do not import a torch.py from the current folder
        [sys.executable, "-P", "-c", CHILD_CODE, str(folder), str(PACKAGE_ROOT)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stderr is not None
    try:
        child.stdin.write(json.dumps(config.to_dict()))
        child.stdin.close()
        while child.poll() is None and last_step(folder) < step:
            time.sleep(0.002)
    finally:
        child.kill()
        child.wait()
        errors = child.stderr.read().strip()
        child.stderr.close()
    if child.returncode > 0:
        raise ValueError(f"training failed before step {step}, at which it was to be killed: {errors.splitlines()[-1]}")
    if child.returncode == 0:
        raise ValueError(f"training ended before it could be killed at step {step}; try more --training.steps")
    return last_step(folder)


def last_step(folder: Path) -> int:
    if not (folder / "metrics.jsonl").exists():
        return 0
    return max((record["step"] for record in RunDirectory.open(folder).records()), default=0)


def compare(folder_a: Path, folder_b: Path) -> list[str]:
    """The differences between the records and the latest checkpoints of two runs, except for times."""
    run_a, run_b = RunDirectory.open(folder_a), RunDirectory.open(folder_b)
    differences = []
    if [without_times(record) for record in run_a.records()] != [without_times(record) for record in run_b.records()]:
        differences.append("the records of metrics.jsonl")
    a, b = run_a.latest_checkpoint(), run_b.latest_checkpoint()
    if a is None or b is None or a.step != b.step:
        return [*differences, "the step of the latest checkpoint"]
    if without_times(a.state["train_state"]) != without_times(b.state["train_state"]):
        differences.append("the training state")
    for tensors_a, tensors_b in ((a.model, b.model), (a.optimizer, b.optimizer)):
        names = sorted(tensors_a.keys() | tensors_b.keys())
        differences += [name for name in names if not bitwise_equal(tensors_a.get(name), tensors_b.get(name))]
    return differences


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "seconds"}


def bitwise_equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
