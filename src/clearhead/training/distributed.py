"""Distributed training: process ranks, collectives, replicated weights (DDP) and sharded weights (FSDP2).

All functions also work in a single process, without torchrun, where they do nothing.
"""

import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clearhead.nn.blocks import DecoderBlock, EncoderBlock
from clearhead.training.progress import stopping_with_launcher

CPU = torch.device("cpu")
DEVICE = "CLEARHEAD_DEVICE"
TIMEOUT = timedelta(minutes=5)
"""of collectives, if another process hangs; one that has exited is noticed immediately"""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, the number of processes, and the collectives among them."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the files and the output."""
        return self.rank == 0

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which must have the same shape, in the order of the ranks."""
        if self.world_size == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor)
        return gathered

    def broadcast_json(self, value: Any) -> Any:
        """The value of rank 0, sent to all ranks as JSON."""
        if self.world_size == 1:
            return value
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        size = torch.tensor([len(text)])
        dist.broadcast(size, src=0)
        if not self.is_main:
            text = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(text, src=0)
        return json.loads(bytes(text.tolist()))

    def broadcast_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of rank 0, sent to all ranks."""
        if self.world_size == 1:
            return tensors
        specs = {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()}
        received = {}
        for name, (dtype, shape) in self.broadcast_json(specs).items():
            tensor = tensors[name] if self.is_main else torch.empty(shape, dtype=getattr(torch, dtype))
            received[name] = tensor = tensor.contiguous()
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=0)
        return received


SINGLE_PROCESS = Ranks()


def choose_device(world_size: int = 1, local_rank: int = 0) -> torch.device:
    """CUDA, else MPS (the GPU of a Mac), else the CPU; or the device that CLEARHEAD_DEVICE names.

    Several processes do not use MPS: they would share one GPU, and gloo cannot send its tensors.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available() and world_size == 1}
    choices = [*(name for name, is_available in available.items() if is_available), "cpu"]
    name = os.environ.get(DEVICE) or choices[0]
    if name not in choices:
        raise ValueError(f"{DEVICE} must be available here ({', '.join(choices)}), got {name!r}")
    return torch.device("cuda", local_rank) if name == "cuda" else torch.device(name)


def has_float64(device: torch.device) -> bool:
    return device.type != "mps"


@contextmanager
def current_ranks() -> Iterator[Ranks]:
    """The ranks of this run, connected by NCCL on GPUs and by gloo on CPUs."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    device = choose_device(world_size, int(os.environ.get("LOCAL_RANK", 0)))
    has_gpu = device.type == "cuda"
    if has_gpu:
        torch.cuda.set_device(device)
    if world_size == 1:
        yield Ranks(device=device)
        return
    # CPU tensors (random states, checkpoints) use gloo even if there are GPUs
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo", timeout=TIMEOUT)
    try:
        with stopping_with_launcher() if dist.is_torchelastic_launched() else nullcontext():
            yield Ranks(dist.get_rank(), dist.get_world_size(), device)
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            message = (
                "another process of this run has exited or does not respond; restart all of them to resume the run"
            )
            raise ConnectionError(message) from error
        raise
    finally:
        # Destroying the group joins its threads while holding the GIL, and a thread that still has to release a tensor
        # waits for the GIL: a deadlock. Sleeping lets such a thread finish first.
        time.sleep(0.1)
        dist.destroy_process_group()


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the random state of the CPU and of this process's GPU on exit.

    Reading the state of the other GPUs would allocate memory on each of them.
    """
    mps_state = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
            yield
    finally:
        if mps_state is not None:
            torch.mps.set_rng_state(mps_state)


def replicated(
    forward: Callable[..., Tensor], ranks: Ranks, *, find_unused_parameters: bool = False
) -> Callable[..., Tensor]:
    """The model wrapped in DDP, which averages gradients over all ranks; the model itself in a single process."""
    if ranks.world_size == 1 or not isinstance(forward, nn.Module):
        return forward
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(forward, gradient_as_bucket_view=True, find_unused_parameters=find_unused_parameters)


def gradient_sync(forward: Any, is_last: bool) -> AbstractContextManager[None]:
    """The context of one microbatch. Ranks synchronize gradients only in the last one of a batch."""
    if hasattr(forward, "set_requires_gradient_sync"):  # FSDP2
        forward.set_requires_gradient_sync(is_last)
    elif not is_last and hasattr(forward, "no_sync"):  # DDP
        no_sync: AbstractContextManager[None] = forward.no_sync()
        return no_sync
    return nullcontext()


def shard(model: nn.Module) -> None:
    """Shard the weights over all ranks (FSDP2). The weights of a block are gathered just before they are used."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    # harmless: no loss modifies the model's outputs in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for block in blocks_of(model):
        fully_shard(block)
    # gathered weights must not outlive the forward pass: an evaluation may use averaged weights (WeightEMA)
    fully_shard(model, reshard_after_forward=True)
    for name in ("encode", "decode"):  # these methods are called directly, and need gathered weights too
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of our models; of any other model, the elements of each nn.ModuleList, and of each nn.Sequential of
    equal modules, that have submodules. Blocks inside blocks do not count."""
    ours: list[nn.Module] = [m for m in model.modules() if isinstance(m, EncoderBlock | DecoderBlock)]
    if ours:
        return ours
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for container in model.modules():
        children = list(container.children())
        is_stack = isinstance(container, nn.Sequential) and len({type(child) for child in children}) == 1
        if container in inside or not (is_stack or isinstance(container, nn.ModuleList)):
            continue
        blocks = [child for child in children if next(child.children(), None) is not None]
        found += blocks
        inside.update(module for block in blocks for module in block.modules())
    return found


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")  # a DTensor; importing that class for isinstance takes a second


def to_local(tensor: Tensor) -> Tensor:
    """This rank's shard, which shares memory with the sharded tensor; any other tensor is returned unchanged."""
    sharded: Any = tensor
    return sharded.to_local() if is_sharded(tensor) else tensor


def full_tensor(local: Tensor, like: Tensor) -> Tensor:
    """Gather the full tensor from its local shards, with the placements of `like`. A collective: all ranks call it."""
    if not is_sharded(like):
        return local
    from torch.distributed.tensor import DTensor

    sharded: Any = like
    dtensor = DTensor.from_local(
        local, sharded.device_mesh, sharded.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return dtensor.full_tensor()


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a tensor that all ranks have in full, with the placements of `like`."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    sharded: Any = like
    everywhere = [Replicate()] * sharded.device_mesh.ndim
    dtensor = DTensor.from_local(tensor, sharded.device_mesh, everywhere, run_check=False)
    return dtensor.redistribute(placements=sharded.placements)


def local_shard(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a tensor that all ranks have in full, with the placements of `like`."""
    return to_local(shard_like(tensor, like))


def gather_full(tensors: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Full tensors in CPU memory, or {} without `keep`. A collective: all ranks call it."""
    gathered = {}
    for name, tensor in tensors.items():
        complete = full_tensor(to_local(tensor.detach()), tensor)
        if keep:
            gathered[name] = complete.cpu()
    return gathered


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """The model's state_dict, with tied weights only once."""
    named = (model.named_parameters, model.named_buffers)
    everything, unique = (
        {name for names in named for name, _ in names(remove_duplicate=once)} for once in (False, True)
    )
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in everything - unique}
    if others := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise ValueError(f"the state of a model must consist of tensors, got {others[0]} in its state_dict")
    return state


def check_same_shapes(tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """ValueError unless the tensors of a checkpoint have the names and shapes of the model's."""
    saved, expected = ({name: tuple(t.shape) for name, t in group.items()} for group in (tensors, targets))
    if differing := sorted(name for name in saved | expected if saved.get(name) != expected.get(name)):
        name = differing[0]
        saved_shape, model_shape = (str(shapes.get(name, "missing")) for shapes in (saved, expected))
        raise ValueError(
            f"config.json does not match the checkpoint: {name} is {saved_shape} in the checkpoint and "
            f"{model_shape} in the model that config.json describes; restore config.json"
        )


@torch.no_grad()
def load_tensors(targets: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Copy full tensors into targets of the same names, which may be sharded. ValueError if names or shapes differ."""
    check_same_shapes(tensors, targets)
    for name, target in targets.items():
        to_local(target).copy_(local_shard(tensors[name].to(target.device), target))
