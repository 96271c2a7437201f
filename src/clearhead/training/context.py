"""Everything a training run needs, built deterministically from its config: data, model, optimizers, precision, masks.

The precision of a run is part of its config and does not depend on the machine: "auto" is resolved once, before the
first step, by timing float32 against bf16 autocast, and the run records the choice. Evaluation is always in float32.
"""

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.data.batches import Batches
from clearhead.data.dataset import Dataset, Tree, fold_in, lengths_of, tensors_in
from clearhead.data.vocab import PAD
from clearhead.insight.leaks import Leak, future_leak, padding_leak
from clearhead.models.config import LanguageConfig, ModuleConfig, Seq2SeqConfig, build_model
from clearhead.nn.blocks import eval_mode
from clearhead.tasks.objectives import Objective, shift_right
from clearhead.training import distributed
from clearhead.training.config import Compile, Precision, RunConfig
from clearhead.training.distributed import Ranks, preserved_rng, replicated
from clearhead.training.evaluation import Callback, microbatches, to_device
from clearhead.training.optim import Optimizers, UserOptimizer, WeightEMA

WARMUP_STEPS, TIMED_STEPS = 1, 7
"""in each precision, to choose the faster one"""
MIN_SPEEDUP = 1.15
"""of a forward and backward pass in bf16: the optimizer stays in float32, and timings are noisy"""
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4
"""parameters of mallopt(3)"""
TUNED_MALLOC = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1, M_TOP_PAD: 64 << 20}
DEFAULT_MALLOC = {M_MMAP_MAX: 1 << 16, M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: 64 << 20, M_TOP_PAD: 128 << 10}
"""the values that glibc's dynamic thresholds reach in a process that frees large blocks; setting them fixes them"""
CHECKED_EXAMPLES, CHECKED_TOKENS, MIN_PADDING = 8, 64, 2
"""of the mask check: examples, tokens of each, and padding tokens that are appended to a source"""


@dataclass(frozen=True)
class TrainContext:
    """The parts of a run. `build_context` creates them."""

    config: RunConfig
    ranks: Ranks
    data: Dataset
    batches: Batches
    objective: Objective
    model: nn.Module
    """the plain model, whose parameter names are those of the checkpoints"""
    forward: Callable[..., Tensor]
    """the model that training calls: compiled or wrapped in DDP, depending on the config"""
    optimizers: Optimizers
    ema: WeightEMA | None
    is_sharded: bool
    is_compiled: bool
    precision_reason: str = ""
    """why "auto" chose this precision; "" if the config named one"""
    callbacks: tuple[Callback, ...] = ()
    """the user's functions, called by rank 0 after each record"""

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
        """What results depend on besides the config. A change alters their last digits; another precision, more."""
        return {
            "precision": self.config.training.precision,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "world_size": self.ranks.world_size,
            "sharded": self.is_sharded,
            "compiled": self.is_compiled,
            "device": torch.cuda.get_device_name() if self.ranks.device.type == "cuda" else self.ranks.device.type,
        }


def build_context(config: RunConfig, ranks: Ranks, *, shard: bool, report: Callable[[str], None]) -> TrainContext:
    """Build all parts of a run. `report` receives warnings; ValueError if the config does not match the data."""
    check_microbatches(config, ranks.world_size)
    data, objective = config.task.load(config.seed), config.task.objective
    if config.training.patience and not len(data.validation):
        report("patience has no effect without validation examples; set --data.validation")
    check_labels(config, data)
    check_lengths(config, data)
    batches = config.task.batches(data, config.training.batch_size, config.seed)
    torch.manual_seed(config.seed)  # all ranks start with the same weights
    assert not isinstance(config.model, ModuleConfig), "the model of clearhead.fit is not built from a config"
    model = build_model(config.model)
    return assemble_context(config, ranks, data, batches, objective, model, shard=shard, report=report)


def assemble_context(
    config: RunConfig,
    ranks: Ranks,
    data: Dataset,
    batches: Batches,
    objective: Objective,
    model: nn.Module,
    *,
    shard: bool,
    report: Callable[[str], None],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainContext:
    """Move the model to its device, compile, replicate or shard it, choose the precision, and make the optimizers."""
    model.to(ranks.device)
    fast: Callable[..., Tensor] = model
    is_sharded = shard and ranks.world_size > 1
    if shard and not is_sharded:
        report("--shard has no effect with one process; start several with torchrun")
    first_forward = warmup_forward(objective, batches, ranks)
    if is_sharded:
        distributed.shard(model)
    else:
        fast = compile_model(model, config.training.compile, first_forward, report)
    is_own = isinstance(config.model, ModuleConfig)
    has_unused = is_own and ranks.world_size > 1 and not is_sharded and has_unused_parameters(model, first_forward)
    forward = model if is_sharded else replicated(fast, ranks, find_unused_parameters=has_unused)
    config, reason = with_precision(config, objective, model, forward, batches, ranks)
    # on a GPU, Muon computes its matrix products in bf16 too
    muon_in_bf16 = config.training.precision == "bf16" and ranks.device.type == "cuda"
    optimizers = (
        Optimizers(model, config.optimizer, torch.bfloat16 if muon_in_bf16 else torch.float32)
        if optimizer is None
        else UserOptimizer(model, optimizer)
    )
    ema = WeightEMA(model, config.training.ema) if config.training.ema else None
    torch.manual_seed(fold_in(config.seed, "dropout", ranks.rank))  # but draw different dropout masks
    return TrainContext(
        config=config,
        ranks=ranks,
        data=data,
        batches=batches,
        objective=objective,
        model=model,
        forward=forward,
        optimizers=optimizers,
        ema=ema,
        is_sharded=is_sharded,
        is_compiled=fast is not model,
        precision_reason=reason,
        callbacks=tuple(callbacks),
    )


def has_unused_parameters(model: nn.Module, first_forward: Callable[[Callable[..., Tensor]], Any]) -> bool:
    """Whether the first batch gives some weights no gradient; DDP has to be told."""
    with preserved_rng(), preserved_buffers(model):
        total_of(first_forward(model)).backward()
    is_unused = any(weight.requires_grad and weight.grad is None for weight in model.parameters())
    model.zero_grad(set_to_none=True)
    return is_unused


def total_of(outputs: Tree) -> Tensor:
    """The sum of all floating-point numbers in the outputs of a model, to compute gradients of."""
    tensors = [tensor for tensor in tensors_in(outputs) if tensor.is_floating_point()]
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()


@contextmanager
def preserved_buffers(model: nn.Module) -> Iterator[None]:
    """Restore all buffers, such as the running means of batch norm, on exit."""
    saved = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, before in saved:
            buffer.copy_(before)


def with_precision(
    config: RunConfig,
    objective: Objective,
    model: nn.Module,
    forward: Callable[..., Tensor],
    batches: Batches,
    ranks: Ranks,
) -> tuple[RunConfig, str]:
    """The config with "auto" resolved to the faster precision, and the reason. All ranks choose the same."""
    training = config.training
    if training.precision != "auto":
        return config, ""
    batch = to_device(batches.at(0, ranks.rank, ranks.world_size), ranks.device)
    first = microbatches(batch, training.grad_accum_steps)[0]

    def step(precision: Precision) -> None:
        with autocast(precision, ranks.device):
            outputs = objective.compute_outputs(forward, first)
        loss = objective.loss(outputs, first, training.label_smoothing)
        loss.backward()
        loss.item()  # synchronizes with a GPU
        model.zero_grad(set_to_none=True)

    with preserved_rng(), preserved_buffers(model):
        precision, reason = ranks.broadcast_json(faster_precision(step, ranks.device))
    return replace(config, training=replace(training, precision=precision)), reason


def warmup_forward(objective: Objective, batches: Batches, ranks: Ranks) -> Callable[[Callable[..., Tensor]], Tensor]:
    """A function that calls a model with the first batch and returns its outputs."""

    def forward_first_batch(forward: Callable[..., Tensor]) -> Tensor:
        batch = to_device(batches.at(0, ranks.rank, ranks.world_size), ranks.device)
        return objective.compute_outputs(forward, batch)

    return forward_first_batch


def check_microbatches(config: RunConfig, world_size: int) -> None:
    training = config.training
    smallest = world_size * training.grad_accum_steps
    if training.batch_size // world_size < training.grad_accum_steps:
        raise ValueError(
            f"batch_size must be at least world_size * grad_accum_steps = {smallest}, got "
            f"batch_size={training.batch_size}, world_size={world_size}, grad_accum_steps={training.grad_accum_steps}"
        )


def check_labels(config: RunConfig, data: Dataset) -> None:
    """The model must have an output for each class, and an embedding for each token, that the data names."""
    for name, n in config.task.label_counts(config.model).items():
        if (size := len(getattr(data, name))) not in (0, n):
            raise ValueError(f"{config.data.name} has {size} {name}, got a model for {n}")


def check_lengths(config: RunConfig, data: Dataset) -> None:
    """Learned position embeddings must cover the longest example. Checked here rather than when its batch comes."""
    if not isinstance(config.model, Seq2SeqConfig | LanguageConfig) or config.model.pos_embed != "learned":
        return
    lengths = [lengths_of(part) for part in (data.train, data.validation, data.test) if len(part)]
    longest = max((int(part.max()) for part in lengths if part is not None), default=0)
    if longest > config.model.context_length:
        raise ValueError(
            f"context_length must be at least {longest}, the longest example of {config.data.name}, got "
            f"context_length={config.model.context_length}; set --model.context-length {longest}"
        )


def has_bf16(device: torch.device) -> bool:
    """Whether the hardware multiplies bf16 matrices natively; emulated bf16 is much slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """The context of a forward pass in this precision. Weights stay in float32."""
    assert precision != "auto", "resolve it with faster_precision first"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def faster_precision(step: Callable[[Precision], None], device: torch.device) -> tuple[Precision, str]:
    """The precision in which `step(precision)` is faster, and the reason as text.

    The two are timed alternately, so that other load on the machine slows both. All ranks make the same number of
    steps, because DDP and FSDP synchronize gradients.
    """
    if device.type == "mps":
        return "float32", "bf16 is not timed on MPS"
    if not has_bf16(device):
        return "float32", f"this {'GPU' if device.type == 'cuda' else 'CPU'} has no native bf16"
    choices: tuple[Precision, Precision] = ("float32", "bf16")
    seconds: dict[Precision, list[float]] = {choice: [] for choice in choices}
    for i in range(WARMUP_STEPS + TIMED_STEPS):
        for choice in choices:
            start = time.perf_counter()
            step(choice)
            if i >= WARMUP_STEPS:
                seconds[choice].append(time.perf_counter() - start)
    float32, bf16 = min(seconds["float32"]), min(seconds["bf16"])  # the minimum is least affected by other load
    reason = f"a forward and backward pass takes {1e3 * float32:,.1f} ms in float32, {1e3 * bf16:,.1f} ms in bf16"
    return ("bf16" if bf16 * MIN_SPEEDUP < float32 else "float32"), reason


def compile_model(
    model: nn.Module,
    choice: Compile,
    warmup: Callable[[Callable[..., Tensor]], Tensor],
    report: Callable[[str], None],
) -> Callable[..., Tensor]:
    """The model, compiled and warmed up by a forward and backward pass; uncompiled if `choice` or a failure says so."""
    if choice == "off" or (choice == "auto" and not torch.cuda.is_available()):
        return model
    fast: Callable[..., Tensor] = torch.compile(model)
    try:
        with preserved_rng(), preserved_buffers(model):
            total_of(warmup(fast)).backward()
    except Exception as error:  # a compiler, its cache or its linker may raise anything
        reason = str(error).strip().splitlines() or [type(error).__name__]
        report(f"torch.compile failed; training continues without it, more slowly: {reason[0]}")
        return model
    finally:
        model.zero_grad(set_to_none=True)
    return fast


@contextmanager
def isolated_torch_state(threads: int) -> Iterator[None]:
    """Set the number of threads (0: unchanged) and tune malloc; restore both, and the random state, on exit."""
    previous = torch.get_num_threads()
    with preserved_rng(), malloc_tuning():
        torch.set_num_threads(threads or previous)
        try:
            yield
        finally:
            torch.set_num_threads(previous)


@contextmanager
def malloc_tuning() -> Iterator[bool]:
    """Keep freed memory in the process inside this context, and return it to the system on exit.

    By default, glibc returns large blocks to the system as soon as they are freed, and the system zeroes their pages
    when they are allocated again, although each training step allocates the same blocks. Tuning avoids most of these
    page faults and changes no results; docs/lab-notes.md has measurements. Yields whether malloc was tuned: not without
    glibc, and not if environment variables already configure malloc.
    """
    if sys.platform != "linux" or is_malloc_configured() or not hasattr(libc := ctypes.CDLL(None), "mallopt"):
        yield False
        return
    for name, value in TUNED_MALLOC.items():
        libc.mallopt(name, value)
    try:
        yield True
    finally:
        for name, value in DEFAULT_MALLOC.items():
            libc.mallopt(name, value)
        libc.malloc_trim(0)


def is_malloc_configured() -> bool:
    """Whether environment variables configure malloc: such settings cannot be read, and hence not restored."""
    return "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") for name in os.environ
    )


def check_masks(ctx: TrainContext) -> bool:
    """Check, before the first step, that no output depends on later tokens or on padding. ValueError if one does.

    Such a leak would give good scores to a model that has learned nothing. The check changes later tokens and padding
    in a few training examples, the same on all ranks. Returns False if the model is not autoregressive.
    """
    model = ctx.config.model
    if not isinstance(model, Seq2SeqConfig | LanguageConfig):
        return False
    with eval_mode(ctx.model):
        leak = seq2seq_leak(ctx, model) if isinstance(model, Seq2SeqConfig) else language_model_leak(ctx, model)
    if leak is not None:
        raise ValueError(f"outputs must not depend on later tokens or on padding, got a model that leaks: {leak}")
    return True


def language_model_leak(ctx: TrainContext, model: LanguageConfig) -> Leak | None:
    ids = ctx.batches.at(0).inputs[:CHECKED_EXAMPLES, :CHECKED_TOKENS].to(ctx.ranks.device)
    return future_leak(ctx.model, ids, model.vocab_size)


def seq2seq_leak(ctx: TrainContext, model: Seq2SeqConfig) -> Leak | None:
    batch, device = ctx.batches.at(0), ctx.ranks.device
    source = batch.inputs[:CHECKED_EXAMPLES, :CHECKED_TOKENS].to(device)
    target = shift_right(batch.targets)[:CHECKED_EXAMPLES, :CHECKED_TOKENS].to(device)
    max_padding = model.context_length - source.shape[1] if model.pos_embed == "learned" else MIN_PADDING
    source, lengths = F.pad(source, (0, min(MIN_PADDING, max_padding)), value=PAD), (source != PAD).sum(1)
    leak = future_leak(lambda ids: ctx.model(source, ids, source_lengths=lengths), target, model.tgt_vocab_size)
    if leak is not None:
        return leak
    return padding_leak(
        lambda ids: ctx.model(ids, target, source_lengths=lengths),
        source,
        lengths,
        model.src_vocab_size,
        output_lengths=lengths.new_full(lengths.shape, target.shape[1]),
    )
