"""Attention while it is learnt: the maps of a few fixed inputs, kept every few steps in the run directory.

RUN/probe/step-00000040.safetensors holds the maps (N,H,Q,K) of each layer by its address, in float16, for the model as
it is at that step, without averaging. Looking changes nothing: a run with a probe is the run without it.
Dims: N inputs, H heads, Q queries, K keys, T steps.
"""

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from clearhead.data.batches import Batch, evaluation_batches
from clearhead.data.dataset import Part
from clearhead.files import write_atomic
from clearhead.insight.look import look
from clearhead.insight.seen import Seen
from clearhead.nn.stage import testing_stage
from clearhead.training.objective import to_device
from clearhead.training.run import PROBE, RunDirectory
from clearhead.training.setup import Setup

TIMES = 40
"""how often a run is probed unless said"""


def is_due(setup: Setup, step: int) -> bool:
    """At the start, at the end, and every few steps."""
    probe = setup.config.probe
    every = probe.every or max(1, setup.n_steps // TIMES)
    return probe.inputs > 0 and (step % every == 0 or step == setup.n_steps)


def keep_maps(setup: Setup, step: int, run: RunDirectory | None) -> None:
    """All processes look, because split weights must meet in step; the first one writes."""
    batch = probed(setup)
    seen: list[Seen] = []

    def looked(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(look(setup.model, *args, **kwargs))
        return seen[0].output

    with testing_stage(setup.model), torch.no_grad():
        setup.objective.ask(looked, batch)
        maps = {address: seen[0][address].weights().half().cpu().contiguous() for address in seen[0]}
    if run:
        folder = run.path / PROBE
        folder.mkdir(exist_ok=True)
        write_atomic(folder / f"step-{step:08d}.safetensors", save(maps))


def probed(setup: Setup) -> Batch:
    """The first validation examples, or training examples where there are no others."""
    examples = setup.data.validation if len(setup.data.validation) else setup.data.train
    n = min(setup.config.probe.inputs, len(examples))
    batch = next(evaluation_batches(Part(examples, torch.arange(n)), setup.data.normalise, n))
    return to_device(batch, setup.processes.device)


def read_maps(run: Path) -> tuple[list[int], dict[str, Tensor]]:
    """The steps (T,), and by address the weights (T,N,H,Q,K)."""
    found = sorted((run / PROBE).glob("step-[0-9]*.safetensors"))
    if not found:
        raise LookupError(f"{run} has no maps of its training; train it with a probe: clearhead train RECIPE --probe 4")
    steps = [int(number) for path in found for number in re.findall(r"step-(\d+)", path.name)]
    each = [maps_in(path) for path in found]
    return steps, {address: torch.stack([maps[address] for maps in each]).float() for address in each[0]}


def maps_in(path: Path) -> dict[str, Tensor]:
    try:
        return load(path.read_bytes())
    except SafetensorError as error:
        raise ValueError(
            f"{path} must be the maps that a probe wrote, got a damaged file ({error}); delete it"
        ) from None
