"""All parts of a run, built from its config: the same in every process and each time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from clearhead.data import datasets
from clearhead.data.batches import Batches
from clearhead.data.dataset import DataSet, lengths_of
from clearhead.data.draws import key_of
from clearhead.models.config import LanguageConfig, Seq2SeqConfig, VisionConfig
from clearhead.models.factory import build_model
from clearhead.training import sharding
from clearhead.training.config import Precision, RunConfig
from clearhead.training.distributed import Processes, random_put_back, replicated
from clearhead.training.ema import WeightAverage
from clearhead.training.memory import kept_memory
from clearhead.training.objective import OBJECTIVES, Objective, portions, to_device
from clearhead.training.optim import Optimizers
from clearhead.training.precision import autocast, compiled, faster_precision


@dataclass(frozen=True)
class Setup:
    config: RunConfig
    processes: Processes
    data: DataSet
    batches: Batches
    model: nn.Module
    """the weights, under their own names"""
    forward: Callable[..., Tensor]
    """the model as training calls it: perhaps compiled, perhaps one of many"""
    optimizers: Optimizers
    average: WeightAverage | None
    is_sharded: bool
    is_compiled: bool
    precision_reason: str = ""
    """why "auto" chose the precision that the config has; "" where the user did"""

    @property
    def objective(self) -> Objective:
        return OBJECTIVES[self.config.objective]

    @property
    def n_steps(self) -> int:
        return self.config.training.n_steps(self.batches.steps_per_epoch)

    @property
    def evaluate_every(self) -> int:
        return self.config.training.evaluate_every or self.batches.steps_per_epoch

    @property
    def checkpoint_every(self) -> int:
        return self.config.training.checkpoint_every or self.evaluate_every

    def made_with(self) -> dict[str, str | int | bool]:
        """What the numbers depend on beside the config: their last bits, or with another precision more."""
        return {
            "precision": self.config.training.precision,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "processes": self.processes.world,
            "sharded": self.is_sharded,
            "compiled": self.is_compiled,
            "device": torch.cuda.get_device_name() if self.processes.device.type == "cuda" else "cpu",
        }


def set_up(config: RunConfig, processes: Processes, *, shard: bool, report: Callable[[str], None]) -> Setup:
    check_portions(config, processes.world)
    data = datasets.load(config.data, config.seed)
    if config.training.patience and not len(data.validation):
        report("patience has nothing to go by: no examples are set apart to validate on (--data.validation)")
    check_classes(config, data)
    check_symbols(config, data)
    check_lengths(config, data)
    batches = Batches(data, config.data, config.training.batch_size, config.seed)
    torch.manual_seed(config.seed)  # every process begins with the same weights
    model = build_model(config.model).to(processes.device)
    fast: Callable[..., Tensor] = model
    is_sharded = shard and processes.world > 1
    if shard and not is_sharded:
        report("--shard splits weights over the processes of torchrun, and there is one: nothing is split")
    if is_sharded:
        sharding.shard(model)
    else:
        fast = compiled(model, config.training.compile, rehearsal(config, batches, processes), report)
    forward = model if is_sharded else replicated(fast, processes)
    config, reason = with_precision(config, model, forward, batches, processes)
    # on a GPU, bf16 serves Muon's matrix products too
    in_bf16 = config.training.precision == "bf16" and processes.device.type == "cuda"
    optimizers = Optimizers(model, config.optimizer, torch.bfloat16 if in_bf16 else torch.float32)
    average = WeightAverage(model, config.training.ema) if config.training.ema else None
    torch.manual_seed(key_of(config.seed, "dropout", processes.rank))  # and drops something else
    return Setup(
        config=config,
        processes=processes,
        data=data,
        batches=batches,
        model=model,
        forward=forward,
        optimizers=optimizers,
        average=average,
        is_sharded=is_sharded,
        is_compiled=fast is not model,
        precision_reason=reason,
    )


def with_precision(
    config: RunConfig, model: nn.Module, forward: Callable[..., Tensor], batches: Batches, processes: Processes
) -> tuple[RunConfig, str]:
    """The config with "auto" resolved to the faster precision, and the reason; all processes choose the same."""
    training = config.training
    if training.precision != "auto":
        return config, ""
    batch = to_device(batches.at(0, processes.rank, processes.world), processes.device)
    first, objective = portions(batch, training.accumulate)[0], OBJECTIVES[config.objective]

    def step(precision: Precision) -> None:
        with autocast(precision, processes.device):
            outputs = objective.ask(forward, first)
        loss = objective.loss(outputs, first, training.label_smoothing)
        loss.backward()
        loss.item()  # waits for a GPU
        model.zero_grad(set_to_none=True)

    with random_put_back():
        precision, reason = processes.share(faster_precision(step, processes.device))
    return replace(config, training=replace(training, precision=precision)), reason


def rehearsal(config: RunConfig, batches: Batches, processes: Processes) -> Callable[[Callable[..., Tensor]], Tensor]:
    """From a model to what it answers to the first batch."""

    def first_answers(forward: Callable[..., Tensor]) -> Tensor:
        batch = to_device(batches.at(0, processes.rank, processes.world), processes.device)
        return OBJECTIVES[config.objective].ask(forward, batch)

    return first_answers


def check_portions(config: RunConfig, world: int) -> None:
    training = config.training
    if training.batch_size // world < training.accumulate:
        raise ValueError(
            f"each of {world} processes needs an example for each of {training.accumulate} portions, "
            f"got batch_size={training.batch_size}; try batch_size={world * training.accumulate} or more"
        )


def check_symbols(config: RunConfig, data: DataSet) -> None:
    """Where ids stand for symbols, the model must know as many."""
    wanted = {}
    if isinstance(config.model, Seq2SeqConfig):
        wanted = {"n_source": len(data.symbols), "n_target": len(data.classes)}
    if isinstance(config.model, LanguageConfig):
        wanted = {"n_tokens": len(data.symbols)}
    for name, n in wanted.items():
        if n and getattr(config.model, name) != n:
            raise ValueError(
                f"the model must have as many symbols as {config.data.name}, {n}, got "
                f"{name}={getattr(config.model, name)}; set --model.{name.replace('_', '-')} {n}"
            )


def check_lengths(config: RunConfig, data: DataSet) -> None:
    """A table of places must have a row for each token: better found out now than at the first long word."""
    if not isinstance(config.model, Seq2SeqConfig | LanguageConfig) or config.model.positions != "learned":
        return
    found = [lengths_of(part) for part in (data.train, data.validation, data.test) if len(part)]
    longest = max((int(lengths.max()) for lengths in found if lengths is not None), default=0)
    if longest > config.model.context:
        raise ValueError(
            f"learned positions must reach over the longest example of {config.data.name}, {longest} tokens, got "
            f"context={config.model.context}; set --model.context {longest}"
        )


def check_classes(config: RunConfig, data: DataSet) -> None:
    if isinstance(config.model, VisionConfig) and data.classes and len(data.classes) != config.model.n_classes:
        raise ValueError(
            f"the model must have as many classes as {config.data.name}, {len(data.classes)}, got "
            f"n_classes={config.model.n_classes}; set --model.n-classes {len(data.classes)}"
        )


@contextmanager
def own_surroundings(threads: int) -> Iterator[None]:
    """Random state and number of threads are the caller's again afterwards, and freed memory goes back."""
    before = torch.get_num_threads()
    with random_put_back(), kept_memory():
        torch.set_num_threads(threads or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)
