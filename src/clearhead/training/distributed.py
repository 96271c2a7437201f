"""Many processes, or one: the same calls. Under torchrun there are as many as it was told; otherwise there is one."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clearhead.training.signals import stopping_with_launcher

CPU = torch.device("cpu")
PATIENCE = timedelta(minutes=5)
"""how long a process waits for another that is silent; one that has ended is noticed at once"""


@dataclass(frozen=True)
class Processes:
    """This process among all of them."""

    rank: int = 0
    world: int = 1
    device: torch.device = CPU

    @property
    def is_first(self) -> bool:
        """The one that writes files and talks."""
        return self.rank == 0

    def add(self, numbers: Tensor) -> Tensor:
        """The sum over all processes, known to all."""
        if self.world > 1:
            dist.all_reduce(numbers)
        return numbers

    def gather(self, bytes_of_each: Tensor) -> list[Tensor]:
        """Every process's bytes, equally many, in the order of their ranks."""
        if self.world == 1:
            return [bytes_of_each]
        all_bytes = [torch.empty_like(bytes_of_each) for _ in range(self.world)]
        dist.all_gather(all_bytes, bytes_of_each)
        return all_bytes

    def share(self, value: Any) -> Any:
        """What the first process has, told to all as JSON."""
        if self.world == 1:
            return value
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        size = torch.tensor([len(text)])
        dist.broadcast(size, src=0)
        if not self.is_first:
            text = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(text, src=0)
        return json.loads(bytes(text.tolist()))

    def share_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors that the first process has, told to all."""
        if self.world == 1:
            return tensors
        kinds = {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()}
        received = {}
        for name, (dtype, shape) in self.share(kinds).items():
            tensor = tensors[name] if self.is_first else torch.empty(shape, dtype=getattr(torch, dtype))
            received[name] = tensor = tensor.contiguous()
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=0)
        return received


ALONE = Processes()


@contextmanager
def processes() -> Iterator[Processes]:
    """All processes of this run, connected; with gloo on processors, with NCCL on GPUs."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if has_gpu else CPU
    if has_gpu:
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield Processes(device=device)
        return
    # processor memory travels by gloo even beside GPUs: random states and checkpoints
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo", timeout=PATIENCE)
    try:
        with stopping_with_launcher() if dist.is_torchelastic_launched() else nullcontext():
            yield Processes(dist.get_rank(), dist.get_world_size(), device)
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
def random_put_back() -> Iterator[None]:
    """Random state, the processor's and that of this process's GPU, is the caller's again afterwards. To look at the
    other GPUs would take memory on each."""
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        yield


def replicated(forward: Callable[..., Tensor], processes: Processes) -> Callable[..., Tensor]:
    """The model with gradients that are the mean over all processes (DDP); itself where there is one process."""
    if processes.world == 1 or not isinstance(forward, nn.Module):
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
