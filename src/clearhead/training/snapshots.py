"""Attention snapshots: the maps of a few fixed inputs, saved every few steps. Importing this does not import torch.

RUN/snapshots/step-00000040.safetensors holds the maps (N,H,Q,K) of each layer by its name, in float16, for the weights
of that step, without averaging. Taking a snapshot changes nothing: a run with snapshots equals one without, bit for
bit. Shapes: N inputs, H heads, Q queries, K keys, T steps.
"""

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, deserialize

from clearhead.files import check_folder, from_json, make_folder, read_regular, safetensors_header, write_atomic
from clearhead.training.checkpoint import parse_step, step_name
from clearhead.training.run_directory import SNAPSHOTS, RunDirectory

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from clearhead.data.batches import Batch
    from clearhead.insight.trace import AttentionTrace
    from clearhead.training.context import TrainContext

SUFFIX = ".safetensors"
DIGEST = "sha256"
"""key of `snapshot_digest` in the metadata of a file"""
MAX_FILE_BYTES = 256 * 2**20
MAX_RUN_BYTES = 2**30
"""of all snapshots of a run: reading them takes about three times as much memory"""


def save_snapshot(ctx: "TrainContext", step: int, run: RunDirectory | None) -> None:
    """All ranks compute, because sharded weights are gathered by all of them; rank 0 writes."""
    import torch
    from safetensors.torch import save

    from clearhead.insight.trace import look
    from clearhead.nn.blocks import eval_mode

    batch = snapshot_inputs(ctx)
    traces: list[AttentionTrace] = []

    def forward(*args: Any, **kwargs: Any) -> "Tensor":
        traces.append(look(ctx.model, *args, **kwargs))
        return traces[0].output

    with eval_mode(ctx.model), torch.no_grad():
        ctx.objective.compute_outputs(forward, batch)
        maps = {name: traces[0][name].weights().half().cpu().contiguous() for name in traces[0]}
    content = save(maps, {DIGEST: snapshot_digest(save(maps))})
    config = ctx.config.snapshots
    check_snapshot_size(len(content), config.inputs, ctx.n_steps // config.interval(ctx.n_steps) + 2)
    if run:
        folder = run.path / SNAPSHOTS
        make_folder(folder)
        write_atomic(folder / f"{step_name(step)}{SUFFIX}", content)


def check_snapshot_size(size: int, inputs: int, n_snapshots: int) -> None:
    """ValueError, at the first snapshot of a run, if all of them together could not be read again."""
    most = min(MAX_FILE_BYTES, MAX_RUN_BYTES // n_snapshots)
    if size > most:
        raise ValueError(
            f"attention snapshots may take {MAX_FILE_BYTES >> 20} MiB per step and {MAX_RUN_BYTES >> 20} MiB in all, "
            f"got {size >> 20} MiB for {inputs} inputs, {n_snapshots} times; "
            f"try --snapshots {max(1, inputs * most // size)} or a larger --snapshots.every"
        )


def snapshot_inputs(ctx: "TrainContext") -> "Batch":
    """The first validation examples; training examples if there are none."""
    import torch

    from clearhead.data.batches import OwnBatches, evaluation_batches
    from clearhead.data.dataset import Subset
    from clearhead.training.evaluation import to_device

    examples = ctx.data.validation if len(ctx.data.validation) else ctx.data.train
    n = ctx.config.snapshots.inputs
    n = n if isinstance(examples, OwnBatches) else min(n, len(examples))
    batch = next(evaluation_batches(Subset(examples, torch.arange(n)), ctx.data.normalize, n))
    return to_device(batch, ctx.ranks.device)


def snapshot_files(run: Path) -> dict[int, Path]:
    """The snapshots of a run by step, in order."""
    folder = run / SNAPSHOTS
    check_folder(folder)
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    files = {parse_step(name.removesuffix(SUFFIX)): folder / name for name in names if name.endswith(SUFFIX)}
    return {step: files[step] for step in sorted(step for step in files if step is not None)}


def read_snapshots(run: Path) -> "tuple[list[int], dict[str, Tensor]]":
    """The steps (T,), and the weights (T,N,H,Q,K) of each layer by its name."""
    import torch

    files = snapshot_files(run)
    if not files:
        raise LookupError(f"{run} has no attention snapshots; take them with: clearhead train RECIPE --snapshots 4")
    if (size := sum(os.lstat(path).st_size for path in files.values())) > MAX_RUN_BYTES:
        raise ValueError(f"the snapshots of {run} must have at most {MAX_RUN_BYTES:,} bytes in all, got {size:,}")
    maps = {path: read_snapshot(path) for path in files.values()}
    first, layers = next(iter(maps.items()))
    for path, others in maps.items():
        if shapes(others) != shapes(layers):
            raise ValueError(
                f"all snapshots of a run must have the same layers and shapes, but {path} and {first} differ"
            )
    return list(files), {name: torch.stack([one[name] for one in maps.values()]).float() for name in layers}


def shapes(maps: "dict[str, Tensor]") -> "dict[str, torch.Size]":
    return {name: weights.shape for name, weights in maps.items()}


def read_snapshot(path: Path) -> "dict[str, Tensor]":
    """The maps (N,H,Q,K) in one file; ValueError if it is damaged."""
    import torch
    from safetensors.torch import load

    try:
        content = read_snapshot_bytes(path)
        maps, is_intact = load(content), matches_digest(content)
    except (ValueError, LookupError, TypeError, RuntimeError, SafetensorError) as error:
        raise damaged(path, str(error)) from None
    for name, weights in maps.items():
        if weights.ndim != 4 or weights.dtype != torch.float16 or not weights.numel():
            raise damaged(path, f"{name!r:.60} is {weights.dtype} of shape {tuple(weights.shape)}")
    if not maps:
        raise damaged(path, "no layers")
    if not is_intact:
        raise damaged(path, "its contents do not match the digest in its header")
    return maps


def read_snapshot_bytes(path: Path) -> bytes:
    """The file, after a check of its size and header; ValueError or OSError if they are wrong."""
    safetensors_header(path)
    return read_regular(path, MAX_FILE_BYTES)


def snapshot_digest(content: bytes) -> str:
    """The SHA-256 of names, types, shapes and values; SafetensorError if it is not a safetensors file."""
    digest = hashlib.sha256()
    for name, maps in sorted(deserialize(content), key=lambda entry: entry[0]):
        digest.update(f"{name} {maps['dtype']} {maps['shape']}\n".encode())
        digest.update(maps["data"])
    return digest.hexdigest()


def matches_digest(content: bytes) -> bool:
    """Whether the maps have the digest that the header records; files of earlier versions record none."""
    header = from_json(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return (header.get("__metadata__") or {}).get(DIGEST) in (None, snapshot_digest(content))


def damaged(path: Path, reason: str) -> ValueError:
    return ValueError(f"{path} is not an intact attention snapshot ({reason}); delete it")
