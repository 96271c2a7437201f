"""Many processes, or one: the same calls. Under torchrun there are as many as it was told; otherwise there is one."""

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
PATIENCE = timedelta(minutes=5)
"""how long a process waits for another that is silent; one that has ended is noticed at once"""


@dataclass(frozen=True)
class Ranks:
    """This process among all of them."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU

    @property
    def is_main(self) -> bool:
        """The one that writes files and talks."""
        return self.rank == 0

    def all_reduce_sum(self, numbers: Tensor) -> Tensor:
        """The sum over all processes, known to all."""
        if self.world_size > 1:
            dist.all_reduce(numbers)
        return numbers

    def all_gather(self, bytes_of_each: Tensor) -> list[Tensor]:
        """Every process's bytes, equally many, in the order of their ranks."""
        if self.world_size == 1:
            return [bytes_of_each]
        all_bytes = [torch.empty_like(bytes_of_each) for _ in range(self.world_size)]
        dist.all_gather(all_bytes, bytes_of_each)
        return all_bytes

    def broadcast_json(self, value: Any) -> Any:
        """What the first process has, told to all as JSON."""
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
        """The tensors that the first process has, told to all."""
        if self.world_size == 1:
            return tensors
        kinds = {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()}
        received = {}
        for name, (dtype, shape) in self.broadcast_json(kinds).items():
            tensor = tensors[name] if self.is_main else torch.empty(shape, dtype=getattr(torch, dtype))
            received[name] = tensor = tensor.contiguous()
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=0)
        return received


ALONE = Ranks()


@contextmanager
def current_ranks() -> Iterator[Ranks]:
    """All processes of this run, connected; with gloo on processors, with NCCL on GPUs."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if has_gpu else CPU
    if has_gpu:
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield Ranks(device=device)
        return
    # processor memory travels by gloo even beside GPUs: random states and checkpoints
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo", timeout=PATIENCE)
    try:
        with stopping_with_launcher() if dist.is_torchelastic_launched() else nullcontext():
            yield Ranks(dist.get_rank(), dist.get_world_size(), device)
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            message = "processes of a run must all live, and one has ended or is silent; resume the run with all"
            raise ConnectionError(message) from error
        raise
    finally:
        # The group ends when its last owner does, and waits for its threads while it keeps Python's lock; a thread that
        # has yet to drop a tensor waits for that lock. So they get it first.
        time.sleep(0.1)
        dist.destroy_process_group()


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Random state, the processor's and that of this process's GPU, is the caller's again afterwards. To look at the
    other GPUs would take memory on each."""
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        yield


def replicated(forward: Callable[..., Tensor], ranks: Ranks) -> Callable[..., Tensor]:
    """The model with gradients that are the mean over all processes (DDP); itself where there is one process."""
    if ranks.world_size == 1 or not isinstance(forward, nn.Module):
        return forward
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(forward, gradient_as_bucket_view=True)


def exchanging(forward: Any, is_last: bool) -> AbstractContextManager[None]:
    """Around one portion of a batch: processes exchange gradients at the last one only."""
    if hasattr(forward, "set_requires_gradient_sync"):  # FSDP2
        forward.set_requires_gradient_sync(is_last)
    elif not is_last and hasattr(forward, "no_sync"):  # DDP
        silent: AbstractContextManager[None] = forward.no_sync()
        return silent
    return nullcontext()


# Weights split over processes (FSDP2): each keeps a part of every tensor. Other tensors pass through.


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


def full_tensor(part: Tensor, like: Tensor) -> Tensor:
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


def gather_full(tensors: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Whole tensors in main memory, one after the other. All processes must ask; those that don't keep get {}."""
    found = {}
    for name, tensor in tensors.items():
        complete = full_tensor(local(tensor.detach()), tensor)
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
def load_tensors(targets: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Writes whole tensors into targets of the same names, which may be split; ValueError if they are others."""
    check_same_shapes(tensors, targets)
    for name, target in targets.items():
        local(target).copy_(own_part(tensors[name].to(target.device), target))
