"""Weights split over processes (FSDP2): each keeps a part of every tensor. Other tensors pass through."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.nn.blocks import DecoderBlock, EncoderBlock


def shard(model: nn.Module) -> None:
    """Splits the model's weights over all processes; each block's are put together just before they are needed."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    # of no harm: a loss does not change the model's answer in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for module in model.modules():
        if isinstance(module, EncoderBlock | DecoderBlock):
            fully_shard(module)
    # what was put together must not outlive the pass: an evaluation may be of other weights (ema.py) than the next step
    fully_shard(model, reshard_after_forward=True)
    for name in ("encode", "decode"):  # other ways into a model than forward: the weights must be there too
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)


def is_split(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")  # torch's DTensor, without the second that importing it takes


def local(tensor: Tensor) -> Tensor:
    """This process's part of a split tensor; changing it changes the tensor."""
    split: Any = tensor
    return split.to_local() if is_split(tensor) else tensor


def whole(part: Tensor, like: Tensor) -> Tensor:
    """The tensor that the processes' parts are of, split as `like` is. All processes must ask."""
    if not is_split(like):
        return part
    from torch.distributed.tensor import DTensor

    split: Any = like
    parts = DTensor.from_local(
        part, split.device_mesh, split.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return parts.full_tensor()


def own_part(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's part of a tensor that all have, split as `like` is."""
    return local(split_like(tensor, like))


def split_like(tensor: Tensor, like: Tensor) -> Tensor:
    if not is_split(like):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    split: Any = like
    everywhere = [Replicate()] * split.device_mesh.ndim
    same = DTensor.from_local(tensor, split.device_mesh, everywhere, run_check=False)
    return same.redistribute(placements=split.placements)


def gathered(tensors: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Whole tensors in main memory, one after the other. All processes must ask; those that don't keep get {}."""
    found = {}
    for name, tensor in tensors.items():
        complete = whole(local(tensor.detach()), tensor)
        if keep:
            found[name] = complete.cpu()
    return found


def check_same_shapes(tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """ValueError unless the tensors of a checkpoint have the names and shapes of the model's."""
    found, expected = ({name: tuple(t.shape) for name, t in each.items()} for each in (tensors, targets))
    if others := sorted(name for name in found | expected if found.get(name) != expected.get(name)):
        name = others[0]
        there, here = (str(shapes[name]) if name in shapes else "missing" for shapes in (found, expected))
        raise ValueError(
            f"config.json does not match the checkpoint: {name} is {there} in the checkpoint and {here} in the model "
            "that config.json describes; restore config.json"
        )


@torch.no_grad()
def fill(targets: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Writes whole tensors into targets of the same names, which may be split; ValueError if they are others."""
    check_same_shapes(tensors, targets)
    for name, target in targets.items():
        local(target).copy_(own_part(tensors[name].to(target.device), target))
