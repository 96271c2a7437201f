"""All parts of a run, built from its config: the same in every process and each time."""

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.data import datasets
from clearhead.data.batches import Batches
from clearhead.data.dataset import Dataset, lengths_of
from clearhead.data.prng import fold_in
from clearhead.data.vocab import PAD
from clearhead.insight.leaks import Leak, future_leak, padding_leak
from clearhead.models.config import LanguageConfig, Seq2SeqConfig, VisionConfig, build_model
from clearhead.nn.blocks import eval_mode
from clearhead.training import distributed
from clearhead.training.config import Compile, Precision, RunConfig
from clearhead.training.distributed import Ranks, preserved_rng, replicated
from clearhead.training.objectives import OBJECTIVES, Objective, microbatches, shift_right, to_device
from clearhead.training.optim import Optimizers, WeightEMA


@dataclass(frozen=True)
class TrainContext:
    config: RunConfig
    ranks: Ranks
    data: Dataset
    batches: Batches
    model: nn.Module
    """the weights, under their own names"""
    forward: Callable[..., Tensor]
    """the model as training calls it: perhaps compiled, perhaps one of many"""
    optimizers: Optimizers
    ema: WeightEMA | None
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

    def is_snapshot_due(self, step: int) -> bool:
        return self.config.snapshots.is_due(step, self.n_steps)

    def environment(self) -> dict[str, str | int | bool]:
        """What the numbers depend on beside the config: their last bits, or with another precision more."""
        return {
            "precision": self.config.training.precision,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "world_size": self.ranks.world_size,
            "sharded": self.is_sharded,
            "compiled": self.is_compiled,
            "device": torch.cuda.get_device_name() if self.ranks.device.type == "cuda" else "cpu",
        }


def build_context(config: RunConfig, ranks: Ranks, *, shard: bool, report: Callable[[str], None]) -> TrainContext:
    check_microbatches(config, ranks.world_size)
    data = datasets.load_dataset(config.data, config.seed)
    if config.training.patience and not len(data.validation):
        report("patience has nothing to go by: no examples are set apart to validate on (--data.validation)")
    check_classes(config, data)
    check_symbols(config, data)
    check_lengths(config, data)
    batches = Batches(data, config.data, config.training.batch_size, config.seed)
    torch.manual_seed(config.seed)  # every process begins with the same weights
    model = build_model(config.model).to(ranks.device)
    fast: Callable[..., Tensor] = model
    is_sharded = shard and ranks.world_size > 1
    if shard and not is_sharded:
        report("--shard splits weights over the processes of torchrun, and there is one: nothing is split")
    if is_sharded:
        distributed.shard(model)
    else:
        fast = compiled(model, config.training.compile, warmup_batch(config, batches, ranks), report)
    forward = model if is_sharded else replicated(fast, ranks)
    config, reason = with_precision(config, model, forward, batches, ranks)
    # on a GPU, bf16 serves Muon's matrix products too
    in_bf16 = config.training.precision == "bf16" and ranks.device.type == "cuda"
    optimizers = Optimizers(model, config.optimizer, torch.bfloat16 if in_bf16 else torch.float32)
    ema = WeightEMA(model, config.training.ema) if config.training.ema else None
    torch.manual_seed(fold_in(config.seed, "dropout", ranks.rank))  # and drops something else
    return TrainContext(
        config=config,
        ranks=ranks,
        data=data,
        batches=batches,
        model=model,
        forward=forward,
        optimizers=optimizers,
        ema=ema,
        is_sharded=is_sharded,
        is_compiled=fast is not model,
        precision_reason=reason,
    )


def with_precision(
    config: RunConfig, model: nn.Module, forward: Callable[..., Tensor], batches: Batches, ranks: Ranks
) -> tuple[RunConfig, str]:
    """The config with "auto" resolved to the faster precision, and the reason; all processes choose the same."""
    training = config.training
    if training.precision != "auto":
        return config, ""
    batch = to_device(batches.at(0, ranks.rank, ranks.world_size), ranks.device)
    first, objective = microbatches(batch, training.grad_accum_steps)[0], OBJECTIVES[config.objective]

    def step(precision: Precision) -> None:
        with autocast(precision, ranks.device):
            outputs = objective.compute_outputs(forward, first)
        loss = objective.loss(outputs, first, training.label_smoothing)
        loss.backward()
        loss.item()  # waits for a GPU
        model.zero_grad(set_to_none=True)

    with preserved_rng():
        precision, reason = ranks.broadcast_json(faster_precision(step, ranks.device))
    return replace(config, training=replace(training, precision=precision)), reason


def warmup_batch(config: RunConfig, batches: Batches, ranks: Ranks) -> Callable[[Callable[..., Tensor]], Tensor]:
    """From a model to what it answers to the first batch."""

    def first_answers(forward: Callable[..., Tensor]) -> Tensor:
        batch = to_device(batches.at(0, ranks.rank, ranks.world_size), ranks.device)
        return OBJECTIVES[config.objective].compute_outputs(forward, batch)

    return first_answers


def check_microbatches(config: RunConfig, world_size: int) -> None:
    training = config.training
    if training.batch_size // world_size < training.grad_accum_steps:
        raise ValueError(
            f"each of {world_size} processes needs an example for each of {training.grad_accum_steps} portions, "
            f"got batch_size={training.batch_size}; try batch_size={world_size * training.grad_accum_steps} or more"
        )


def check_symbols(config: RunConfig, data: Dataset) -> None:
    """Where ids stand for symbols, the model must know as many."""
    wanted = {}
    if isinstance(config.model, Seq2SeqConfig):
        wanted = {"src_vocab_size": len(data.vocab), "tgt_vocab_size": len(data.classes)}
    if isinstance(config.model, LanguageConfig):
        wanted = {"vocab_size": len(data.vocab)}
    for name, n in wanted.items():
        if n and getattr(config.model, name) != n:
            raise ValueError(
                f"the model must have as many symbols as {config.data.name}, {n}, got "
                f"{name}={getattr(config.model, name)}; set --model.{name.replace('_', '-')} {n}"
            )


def check_lengths(config: RunConfig, data: Dataset) -> None:
    """A table of places must have a row for each token: better found out now than at the first long word."""
    if not isinstance(config.model, Seq2SeqConfig | LanguageConfig) or config.model.pos_embed != "learned":
        return
    found = [lengths_of(part) for part in (data.train, data.validation, data.test) if len(part)]
    longest = max((int(lengths.max()) for lengths in found if lengths is not None), default=0)
    if longest > config.model.context_length:
        raise ValueError(
            f"learned positions must reach over the longest example of {config.data.name}, {longest} tokens, got "
            f"context_length={config.model.context_length}; set --model.context-length {longest}"
        )


def check_classes(config: RunConfig, data: Dataset) -> None:
    if isinstance(config.model, VisionConfig) and data.classes and len(data.classes) != config.model.num_classes:
        raise ValueError(
            f"the model must have as many classes as {config.data.name}, {len(data.classes)}, got "
            f"num_classes={config.model.num_classes}; set --model.num-classes {len(data.classes)}"
        )


@contextmanager
def isolated_torch_state(threads: int) -> Iterator[None]:
    """Random state and number of threads are the caller's again afterwards, and freed memory goes back."""
    before = torch.get_num_threads()
    with preserved_rng(), malloc_tuning():
        torch.set_num_threads(threads or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)


# The arithmetic of training: float32, or bf16 autocast where it was chosen or measured to be faster; torch.compile.
#
# A run's precision is part of its config and never of the machine: "auto" is resolved once, before the first step, by
# timing both, and the run records the choice. Evaluation is always float32.


WARM_UP, TIMED = 1, 7
"""steps in each precision before and while the clock runs"""
MIN_SPEEDUP = 1.15
"""what bf16 must gain in these passes: the optimizer, which stays in float32, dilutes the gain, and clocks are noisy"""


def has_bf16(device: torch.device) -> bool:
    """Whether the hardware multiplies bf16 matrices natively; emulated bf16 is much slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """The context of a forward pass in the given precision; weights stay float32."""
    assert precision != "auto", "resolve it with faster_precision first"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def faster_precision(step: Callable[[Precision], None], device: torch.device) -> tuple[Precision, str]:
    """The precision in which `step(precision)` takes less time, and the reason in words.

    Both are timed in turns, so that a busy moment of the machine slows both. Every process makes the same number of
    steps: under DDP or FSDP they exchange gradients.
    """
    if not has_bf16(device):
        return "float32", f"this {'GPU' if device.type == 'cuda' else 'processor'} has no bf16 arithmetic"
    choices: tuple[Precision, Precision] = ("float32", "bf16")
    seconds: dict[Precision, list[float]] = {choice: [] for choice in choices}
    for i in range(WARM_UP + TIMED):
        for choice in choices:
            start = time.perf_counter()
            step(choice)
            if i >= WARM_UP:
                seconds[choice].append(time.perf_counter() - start)
    exact, rough = min(seconds["float32"]), min(seconds["bf16"])  # whatever else ran, slowed the others
    reason = f"a forward and backward pass takes {1e3 * exact:,.1f} ms in float32, {1e3 * rough:,.1f} ms in bf16"
    return ("bf16" if rough * MIN_SPEEDUP < exact else "float32"), reason


def compiled(
    model: nn.Module,
    choice: Compile,
    rehearse: Callable[[Callable[..., Tensor]], Tensor],
    report: Callable[[str], None],
) -> Callable[..., Tensor]:
    """The model, compiled if so chosen, after a rehearsal that asks it something; the model itself where that fails."""
    if choice == "off" or (choice == "auto" and not torch.cuda.is_available()):
        return model
    fast: Callable[..., Tensor] = torch.compile(model)
    try:
        with preserved_rng():
            rehearse(fast).float().sum().backward()
    except Exception as error:  # whatever a compiler, its cache or its linker may raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        report(f"torch.compile FAILED, training goes on without it, slower: {reason[0]}")
        return model
    finally:
        model.zero_grad(set_to_none=True)
    return fast


# Memory that a step gives back is kept for the next step.
#
# glibc hands large blocks back to the system as soon as they are free, and the system clears every page of them when
# they are taken again. A training step frees and takes the same hundreds of megabytes each time: a run of `mnist` had
# ten
# times as many page faults. No number changes. What it gains in time is in docs/lab-notes.md.


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4
"""names of mallopt(3)"""
KEPT = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1, M_TOP_PAD: 64 << 20}
USUAL = {M_MMAP_MAX: 1 << 16, M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: 64 << 20, M_TOP_PAD: 128 << 10}
"""where glibc's own thresholds end up in a process that frees large blocks; once set, they no longer move"""


@contextmanager
def malloc_tuning() -> Iterator[bool]:
    """For the time of the block, freed memory stays with the process; afterwards what is free goes back. Says whether
    it is so: not where malloc is not glibc's, nor where the environment has settled it."""
    if sys.platform != "linux" or is_settled() or not hasattr(libc := ctypes.CDLL(None), "mallopt"):
        yield False
        return
    for name, value in KEPT.items():
        libc.mallopt(name, value)
    try:
        yield True
    finally:
        for name, value in USUAL.items():
            libc.mallopt(name, value)
        libc.malloc_trim(0)


def is_settled() -> bool:
    """Whether who started this process chose how malloc works: what was chosen cannot be read back."""
    return "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") for name in os.environ
    )


# Does the model see what it must not? Asked before the first step of every run that writes token by token.
#
# A few training examples are changed where an output must not look, after its place and in the padding. A model that
# saw the answer would score well and learn nothing, so a leak ends the run.


EXAMPLES, LONGEST, PADDING = 8, 64, 2
"""how many are changed; tokens of each that are looked at; places of padding that a source gets at least"""


def check_masks(ctx: TrainContext) -> bool:
    """Whether there was something to check; a leak is an error. All processes look at the same examples."""
    model = ctx.config.model
    if not isinstance(model, Seq2SeqConfig | LanguageConfig):
        return False
    with eval_mode(ctx.model):
        leak = leak_of_pairs(ctx, model) if isinstance(model, Seq2SeqConfig) else leak_of_text(ctx, model)
    if leak is not None:
        raise ValueError(
            f"no output may depend on what comes after it, or on padding, got a model that leaks: {leak}; "
            "correct its masks before it is trained"
        )
    return True


def leak_of_text(ctx: TrainContext, model: LanguageConfig) -> Leak | None:
    ids = ctx.batches.at(0).inputs[:EXAMPLES, :LONGEST].to(ctx.ranks.device)
    return future_leak(ctx.model, ids, model.vocab_size)


def leak_of_pairs(ctx: TrainContext, model: Seq2SeqConfig) -> Leak | None:
    batch, device = ctx.batches.at(0), ctx.ranks.device
    source, target = (
        batch.inputs[:EXAMPLES, :LONGEST].to(device),
        shift_right(batch.targets)[:EXAMPLES, :LONGEST].to(device),
    )
    n_free = model.context_length - source.shape[1] if model.pos_embed == "learned" else PADDING
    source, lengths = F.pad(source, (0, min(PADDING, n_free)), value=PAD), (source != PAD).sum(1)
    leak = future_leak(lambda ids: ctx.model(source, ids, source_lengths=lengths), target, model.tgt_vocab_size)
    if leak is not None:
        return leak
    counted = lengths.new_full(lengths.shape, target.shape[1])
    return padding_leak(
        lambda ids: ctx.model(ids, target, source_lengths=lengths),
        source,
        lengths,
        model.src_vocab_size,
        output_lengths=counted,
    )
