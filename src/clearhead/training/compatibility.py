"""Check that a config matches a checkpoint, before memory is allocated for tensors.

A checkpoint holds the config that it was saved with, protected by its manifest; config.json is a plain file that
anybody may edit or damage. Where the two differ in a setting that determines the model's outputs, training is refused,
and inference uses the checkpoint's config.
"""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.files import sha256
from clearhead.models.config import ModelConfig, ModuleConfig, Seq2SeqConfig, build_model
from clearhead.training.checkpoint import SMALL, Checkpoint
from clearhead.training.config import CHANGED_BY_RESUME, RunConfig, changes_since_saved
from clearhead.training.distributed import check_same_shapes
from clearhead.training.run_directory import RunDirectory
from clearhead.training.snapshots import safetensors_header

AFFECT_OUTPUTS = ("model.", "data.", "seed", "training.tta")
"""prefixes of settings that determine the outputs or their evaluation"""
TRAINING_ONLY = ("dropout", "drop_path")
"""suffixes of model settings that have no effect in inference"""
MAX_COPIES = 4
"""the largest allowed ratio of optimizer state to weights: two moments, a moving average, and one in reserve"""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
Changes = dict[str, tuple[Any, Any]]
"""{"training.steps": (value in the checkpoint, value in config.json)}"""


def config_for_inference(run: RunDirectory, checkpoint: Checkpoint) -> RunConfig:
    """The run's config. If it differs from the checkpoint's in a setting that determines the outputs, the checkpoint's
    config, with the paths of config.json. Differences are reported."""
    config = RunConfig.from_dict(run.config)
    changes = changes_in(config, checkpoint)
    if conflicts := {name: change for name, change in changes.items() if affects_outputs(name)}:
        run.report(
            f"{run.path / 'config.json'} does not match the checkpoint of step {checkpoint.step}; using the "
            f"checkpoint's own config: {describe_changes(conflicts)}"
        )
        saved = RunConfig.from_dict(checkpoint.state["config"])
        if type(saved.data) is type(config.data):
            paths = {name: getattr(config.data, name) for name in config.task.file_fields}
            saved = replace(saved, data=replace(saved.data, **paths))
        config = saved
        changes = {}
    check_model_matches(config.model, checkpoint.model)
    if other_changes := {name: change for name, change in changes.items() if name not in CHANGED_BY_RESUME}:
        run.report(
            f"{run.path / 'config.json'} has changed since the checkpoint of step {checkpoint.step} was saved, "
            f"without effect on the outputs: {describe_changes(other_changes)}"
        )
    return config


def check_config_matches(run: Path, config: RunConfig, checkpoint: Checkpoint) -> Changes:
    """ValueError if config and checkpoint differ in a setting that determines the outputs, or in the shapes of the
    weights. Returns the other differences, without paths."""
    changes = changes_in(config, checkpoint)
    if conflicts := {name: change for name, change in changes.items() if affects_outputs(name)}:
        raise ValueError(
            f"{run / 'config.json'} does not match the checkpoint of step {checkpoint.step}: "
            f"{describe_changes(conflicts)}; restore config.json: the checkpoint's state.json contains a copy"
        )
    check_model_matches(config.model, checkpoint.model)
    return changes


def changes_in(config: RunConfig, checkpoint: Checkpoint) -> Changes:
    """Settings that differ from those in the checkpoint, without paths: files may be moved, and their contents are
    compared by digest."""
    changes = changes_since_saved(checkpoint.state.get("config"), config)
    paths = [f"data.{name}" for name in config.task.file_fields]
    return {name: change for name, change in changes.items() if name not in paths}


def affects_outputs(name: str) -> bool:
    is_training_only = name.endswith(TRAINING_ONLY) or name.startswith("data.augmentation.")
    return name.startswith(AFFECT_OUTPUTS) and not is_training_only


def announce_changes(
    saved: Any, config: RunConfig, report: Callable[[str], None], requested: Collection[str] = ()
) -> None:
    """Report settings in config.json that differ from the checkpoint's, except the `requested` changes."""
    changes = changes_since_saved(saved, config)
    if unexpected := {name: change for name, change in changes.items() if name not in requested}:
        report(f"config.json has changed since the checkpoint was saved: {describe_changes(unexpected)}")


def describe_changes(changes: Mapping[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"{name} was {before}, is {after}" for name, (before, after) in changes.items())


def check_tensor_files(model: Path, optimizer: Path, config: Any) -> None:
    """ValueError unless these files are as large as those of the model that the config describes.

    Only headers are read, because a sparse file with a valid digest may claim to be of any size.
    """
    tensors = {name: meta_tensor(name, *entry) for name, entry in safetensors_header(model).items()}
    check_model_matches(RunConfig.from_dict(config).model, tensors)
    weights = sum(tensor.nbytes for tensor in tensors.values())
    if (size := os.lstat(optimizer).st_size) > MAX_COPIES * weights + SMALL:
        raise ValueError(f"{optimizer.name} has {size:,} bytes for {weights:,} bytes of weights")


def meta_tensor(name: str, dtype: str, shape: list[int]) -> Tensor:
    if dtype not in DTYPES:
        raise ValueError(f"{name!r:.60} has the unknown type {dtype!r:.20}")
    return torch.empty(shape, dtype=DTYPES[dtype], device="meta")


def state_digest(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of the names, types and shapes of a model's state, in alphabetical order."""
    lines = [f"{name} {tensor.dtype} {tuple(tensor.shape)}\n" for name, tensor in sorted(tensors.items())]
    return sha256("".join(lines).encode())


def check_model_matches(config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """ValueError unless a model built from this config has exactly these parameters and buffers.

    The model is built on the meta device, so a config that describes an enormous model costs nothing. A user's own
    model cannot be built; the digest of its names and shapes is compared.
    """
    if isinstance(config, ModuleConfig):
        if state_digest(tensors) != config.sha256:
            raise ValueError(f"the weights in the checkpoint are not those of the {config.name} in config.json")
        return
    blocks = config.depth + (config.decoder_blocks if isinstance(config, Seq2SeqConfig) else 0)
    if blocks > len(tensors):  # each block has parameters: do not build a billion of them to find that out
        raise ValueError(
            f"config.json does not match the checkpoint: it describes {blocks} blocks, but the checkpoint contains "
            f"{len(tensors)} tensors; restore config.json"
        )
    try:
        with torch.device("meta"):
            expected = build_model(config).state_dict()
    except (RuntimeError, OverflowError) as error:  # more elements than a 64-bit number can count
        raise ValueError(f"config.json describes a model that cannot be built: {error}; restore config.json") from None
    check_same_shapes(tensors, expected)
    if wrong := [name for name, tensor in tensors.items() if tensor.dtype != expected[name].dtype]:
        raise ValueError(f"{wrong[0]} is {tensors[wrong[0]].dtype} in the checkpoint, not {expected[wrong[0]].dtype}")
