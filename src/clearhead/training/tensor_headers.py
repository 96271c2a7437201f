"""What a safetensors file declares, compared with the model that it should hold before any of its data is read.

A file starts with the length of its header (8 bytes), then the header: JSON with the type, shape and offsets of each
tensor. A sparse file of any size costs its sender nothing, and its digest in a manifest can be right.
"""

import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.files import from_json, opened_regular
from clearhead.models.config import ModelConfig, Seq2SeqConfig
from clearhead.models.factory import build_model
from clearhead.training.config import RunConfig
from clearhead.training.distributed import check_same_shapes

SMALL = 64 * 2**20
"""bytes of tensors that are read without a comparison"""
LARGEST_HEADER = 16 * 2**20
MOST_COPIES = 4
"""tensors beside the weights, at most, for each weight: two moments, an average, and one to spare"""
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


def check_tensor_files(model: Path, optimizer: Path, config: Any) -> None:
    """ValueError unless these files are as large as those of the model that a run's config describes."""
    tensors = declared_tensors(model)
    check_model_matches(RunConfig.from_dict(config).model, tensors)
    weights = sum(tensor.nbytes for tensor in tensors.values())
    if (size := os.lstat(optimizer).st_size) > MOST_COPIES * weights + SMALL:
        raise ValueError(f"{optimizer.name} has {size:,} bytes for {weights:,} bytes of weights")


def declared_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, on the meta device; ValueError if they do not fill the file exactly."""
    with opened_regular(path, os.O_RDONLY) as file:
        size = os.fstat(file).st_size
        length = int.from_bytes(os.read(file, 8), "little")
        if length > min(LARGEST_HEADER, size - 8):
            raise ValueError(f"the header of {path.name} must have at most {LARGEST_HEADER:,} bytes, got {length:,}")
        header = from_json(os.pread(file, length, 8))
    if not isinstance(header, dict):
        raise ValueError(f"the header of {path.name} must be a JSON object")
    found = {name: declared_tensor(name, entry) for name, entry in header.items() if name != "__metadata__"}
    if (expected := 8 + length + sum(tensor.nbytes for tensor in found.values())) != size:
        raise ValueError(f"{path.name} has {size:,} bytes, and its header declares {expected:,}")
    return found


def declared_tensor(name: str, entry: Any) -> Tensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape)} if dtype in DTYPES:
            if all(type(n) is int and n >= 0 for n in shape) and prod(shape) < 2**48:
                return torch.empty(shape, dtype=DTYPES[dtype], device="meta")
    raise ValueError(f"{name!r:.60} must have a type and a shape, got {entry!r:.60}")


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
