"""Attention while it is learnt: the maps of a few fixed inputs, kept every few steps in the run directory.

RUN/snapshots/step-00000040.safetensors holds the maps (N,H,Q,K) of each layer by its address, in float16, for the model
as it is at that step, without averaging. Looking changes nothing: a run with snapshots is the run without them.
Dims: N inputs, H heads, Q queries, K keys, T steps.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from clearhead.data.batches import Batch, evaluation_batches
from clearhead.data.dataset import Subset
from clearhead.files import make_folder, read_regular, write_atomic
from clearhead.insight.look import AttentionTrace, look
from clearhead.nn.eval_mode import eval_mode
from clearhead.training.context import TrainContext
from clearhead.training.layout import DIGEST, MAPS, SNAPSHOTS, maps_are_intact, maps_digest, snapshot_files, step_name
from clearhead.training.objectives import to_device
from clearhead.training.run_directory import RunDirectory

TIMES = 40
"""how often a run is probed unless said"""


def is_due(ctx: TrainContext, step: int) -> bool:
    """At the start, at the end, and every few steps."""
    probe = ctx.config.snapshots
    every = probe.every or max(1, ctx.n_steps // TIMES)
    return probe.inputs > 0 and (step % every == 0 or step == ctx.n_steps)


def save_snapshot(ctx: TrainContext, step: int, run: RunDirectory | None) -> None:
    """All processes look, because split weights must meet in step; the first one writes."""
    batch = snapshot_inputs(ctx)
    seen: list[AttentionTrace] = []

    def looked(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(look(ctx.model, *args, **kwargs))
        return seen[0].output

    with eval_mode(ctx.model), torch.no_grad():
        ctx.objective.compute_outputs(looked, batch)
        maps = {address: seen[0][address].weights().half().cpu().contiguous() for address in seen[0]}
    if run:
        folder = run.path / SNAPSHOTS
        make_folder(folder)
        write_atomic(folder / f"{step_name(step)}{MAPS}", save(maps, {DIGEST: maps_digest(save(maps))}))


def snapshot_inputs(ctx: TrainContext) -> Batch:
    """The first validation examples, or training examples where there are no others."""
    examples = ctx.data.validation if len(ctx.data.validation) else ctx.data.train
    n = min(ctx.config.snapshots.inputs, len(examples))
    batch = next(evaluation_batches(Subset(examples, torch.arange(n)), ctx.data.normalize, n))
    return to_device(batch, ctx.ranks.device)


def read_snapshots(run: Path) -> tuple[list[int], dict[str, Tensor]]:
    """The steps (T,), and by address the weights (T,N,H,Q,K)."""
    found = snapshot_files(run)
    if not found:
        raise LookupError(
            f"{run} has no maps of its training; train it with a probe: clearhead train RECIPE --snapshots 4"
        )
    each = {path: maps_in(path) for path in found.values()}
    first, maps = next(iter(each.items()))
    sizes = shapes(maps)
    for path, others in each.items():
        if shapes(others) != sizes:
            raise ValueError(
                f"all maps of a run must have the same layers and shapes, but those in {path} and {first} differ"
            )
    return list(found), {address: torch.stack([one[address] for one in each.values()]).float() for address in maps}


def shapes(maps: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {address: weights.shape for address, weights in maps.items()}


def maps_in(path: Path) -> dict[str, Tensor]:
    """The maps (N,H,Q,K) in one file; ValueError if they are none."""
    try:
        content = read_regular(path)
        maps, is_intact = load(content), maps_are_intact(content)
    except (ValueError, LookupError, TypeError, RuntimeError, SafetensorError) as error:
        raise damaged_maps(path, str(error)) from None
    for address, weights in maps.items():
        if weights.ndim != 4 or weights.dtype != torch.float16 or not weights.numel():
            raise damaged_maps(path, f"{address!r:.60} is {weights.dtype} of shape {tuple(weights.shape)}")
    if not maps:
        raise damaged_maps(path, "no layers")
    if not is_intact:
        raise damaged_maps(path, "its contents do not match the digest in its header")
    return maps


def damaged_maps(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} must be the maps that a probe wrote, got a damaged file ({why}); delete it")
