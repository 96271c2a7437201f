"""Whether a checkpoint and a config belong together; checked before memory is allocated for tensors.

A checkpoint holds the config that it was saved with, protected by its manifest; config.json is a plain file that
anybody may edit or damage. Where the two differ in a setting that determines the model's outputs, training is refused,
and inference uses the checkpoint's config.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.files import safetensors_header
from clearhead.models.config import ModelConfig, Seq2SeqConfig, build_model
from clearhead.training.checkpoint import SMALL, Checkpoint
from clearhead.training.config import CHANGED_BY_RESUME, RunConfig, changes_since_saved
from clearhead.training.distributed import check_same_shapes
from clearhead.training.run_directory import RunDirectory

AFFECT_OUTPUTS = ("model.", "data.", "seed", "training.tta")
"""prefixes of settings that determine the outputs or their evaluation"""
ONLY_IN_TRAINING = ("dropout", "drop_path")
"""suffixes of model settings that have no effect in inference"""
MAX_COPIES = 4
"""optimizer tensors per weight, at most: two moments, an average and one to spare"""
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


def config_for_inference(run: RunDirectory, found: Checkpoint) -> RunConfig:
    """The run's config. If it differs from the checkpoint's in a setting that determines the outputs, the checkpoint's
    config, with the paths of config.json. Differences are reported."""
    config = RunConfig.from_dict(run.config)
    changes = changes_in(config, found)
    if fatal := {name: change for name, change in changes.items() if affects_outputs(name)}:
        run.report(
            f"{run.path / 'config.json'} does not match the checkpoint of step {found.step}, whose own config is used: "
            f"{described(fatal)}"
        )
        saved = RunConfig.from_dict(found.state["config"])
        if type(saved.data) is type(config.data):
            paths = {name: getattr(config.data, name) for name in config.task.file_fields}
            saved = replace(saved, data=replace(saved.data, **paths))
        config = saved
        changes = {}
    check_model_matches(config.model, found.model)
    if harmless := {name: change for name, change in changes.items() if name not in CHANGED_BY_RESUME}:
        run.report(
            f"{run.path / 'config.json'} has changed since the checkpoint of step {found.step} was saved, "
            f"without effect on the outputs: {described(harmless)}"
        )
    return config


def check_config_matches(run: Path, config: RunConfig, found: Checkpoint) -> Changes:
    """ValueError if config and checkpoint differ in a setting that determines the outputs, or in the shapes of the
    weights. Returns the other differences, without paths."""
    changes = changes_in(config, found)
    if fatal := {name: change for name, change in changes.items() if affects_outputs(name)}:
        raise ValueError(
            f"{run / 'config.json'} does not match the checkpoint of step {found.step}: {described(fatal)}; "
            "restore config.json: the checkpoint's state.json contains a copy"
        )
    check_model_matches(config.model, found.model)
    return changes


def changes_in(config: RunConfig, found: Checkpoint) -> Changes:
    """Settings that differ from those in the checkpoint, without paths: files may be moved, and their contents are
    compared by digest."""
    changes = changes_since_saved(found.state.get("config"), config)
    paths = [f"data.{name}" for name in config.task.file_fields]
    return {name: change for name, change in changes.items() if name not in paths}


def affects_outputs(name: str) -> bool:
    is_only_in_training = name.endswith(ONLY_IN_TRAINING) or name.startswith("data.augmentation.")
    return name.startswith(AFFECT_OUTPUTS) and not is_only_in_training


def announce_changes(saved: Any, config: RunConfig, report: Callable[[str], None]) -> None:
    """Report settings in config.json that differ from those that the checkpoint was saved with."""
    if changes := changes_since_saved(saved, config):
        report(f"config.json has changed since the checkpoint was saved: {described(changes)}")


def described(changes: Mapping[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"{name} was {before}, is {after}" for name, (before, after) in changes.items())


def check_tensor_files(model: Path, optimizer: Path, config: Any) -> None:
    """ValueError unless these files are as large as those of the model that the config describes.

    Only headers are read: a sparse file of any size costs its sender nothing, and its digest can be right.
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


def check_model_matches(config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """ValueError unless a model built from this config has exactly these parameters and buffers.

    The model is built on the meta device, so a config that describes an enormous model costs nothing.
    """
    blocks = config.depth + (config.decoder_blocks if isinstance(config, Seq2SeqConfig) else 0)
    if blocks > len(tensors):  # each block has parameters: do not build a billion of them to find that out
        raise ValueError(
            f"config.json does not match the checkpoint: it describes {blocks} blocks, and the checkpoint contains "
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
