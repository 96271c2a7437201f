"""Attention snapshots: the maps of a few fixed inputs, saved every few steps. Importing this does not import torch.

RUN/snapshots/step-00000040.safetensors holds the maps (N,H,Q,K) of each layer by its name, in float16, for the weights
of that step, without averaging. Taking a snapshot changes nothing: a run with snapshots equals one without, bit for
bit. Shapes: N inputs, H heads, Q queries, K keys, T steps.
"""

import hashlib
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, deserialize

from clearhead.files import (
    check_folder,
    check_stored,
    from_json,
    make_folder,
    opened_regular,
    read_at,
    read_regular,
    write_atomic,
)
from clearhead.training.checkpoint import SMALL, parse_step, step_name
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
"""limit for all snapshots of a run; reading them takes about three times as much memory"""
MAX_HEADER_BYTES = 16 * 2**20
"""limit for the header of a safetensors file"""
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
"""bytes per element, by the dtype names of safetensors"""


def save_snapshot(ctx: "TrainContext", step: int, run: RunDirectory | None) -> None:
    """Take a snapshot. All ranks compute, because sharded weights are gathered by all of them; rank 0 writes."""
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
    """ValueError, at the first snapshot of a run, if all snapshots together will be too large to read."""
    limit = min(MAX_FILE_BYTES, MAX_RUN_BYTES // n_snapshots)
    if size > limit:
        raise ValueError(
            f"attention snapshots may take {MAX_FILE_BYTES >> 20} MiB per step and {MAX_RUN_BYTES >> 20} MiB in all, "
            f"got {size >> 20} MiB for {inputs} inputs, {n_snapshots} times; "
            f"try --snapshots {max(1, inputs * limit // size)} or a larger --snapshots.every"
        )


def snapshot_inputs(ctx: "TrainContext") -> "Batch":
    """The first validation examples; without a validation set, the first training examples."""
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
    if size > SMALL:
        check_stored(files.values())
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
    """The contents of a snapshot; ValueError or OSError if its size or header is invalid."""
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
    """Whether the maps match the digest in the header; files of earlier versions have none."""
    header = from_json(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return (header.get("__metadata__") or {}).get(DIGEST) in (None, snapshot_digest(content))


def damaged(path: Path, reason: str) -> ValueError:
    return ValueError(f"{path} is not an intact attention snapshot ({reason}); delete it")


def safetensors_header(path: Path) -> dict[str, tuple[str, list[int]]]:
    """The dtype and shape of each tensor, from the header alone. ValueError unless the tensors fill the file exactly.

    A safetensors file starts with the length of its header (8 bytes), followed by the header: JSON with the dtype,
    shape and offsets of each tensor.
    """
    with opened_regular(path, os.O_RDONLY) as file:
        size = os.fstat(file).st_size
        length = int.from_bytes(os.read(file, 8), "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"the header of {path.name} must have at most {MAX_HEADER_BYTES:,} bytes, got {length:,}")
        header = from_json(read_at(file, length, 8))
    if not isinstance(header, dict):
        raise ValueError(f"the header of {path.name} must be a JSON object")
    tensors: dict[str, tuple[str, list[int]]] = {}
    expected = 8 + length
    for name, entry in header.items():
        match entry:
            case _ if name == "__metadata__":
                continue
            case {"dtype": str(dtype), "shape": list(shape)} if dtype in DTYPE_BYTES and is_shape(shape):
                tensors[name] = dtype, shape
                expected += DTYPE_BYTES[dtype] * math.prod(shape)
            case _:
                raise ValueError(f"{name!r:.60} in {path.name} must have a dtype and a shape, got {entry!r:.60}")
    if expected != size:
        raise ValueError(f"{path.name} has {size:,} bytes, but its header declares {expected:,}")
    return tensors


def is_shape(shape: list[Any]) -> bool:
    return all(type(n) is int and n >= 0 for n in shape) and math.prod(shape) < 2**48
