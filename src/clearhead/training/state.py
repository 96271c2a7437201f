"""What a run is besides its config: to a checkpoint and back, bit for bit, over any number of processes."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from clearhead.data.dataset import DataSet
from clearhead.data.datasets import changed_files, digests
from clearhead.data.draws import key_of
from clearhead.files import from_json, to_json
from clearhead.training.checkpoint import Snapshot
from clearhead.training.config import RunConfig, flat
from clearhead.training.ema import weights_to_use
from clearhead.training.metrics import N_COUNTS
from clearhead.training.run import RunDirectory
from clearhead.training.setup import Setup
from clearhead.training.sharding import fill, gathered


@dataclass
class Standing:
    """How far a run is. Equal in all processes."""

    step: int = 0
    """updates made"""
    sums: list[float] = field(default_factory=lambda: [0.0] * N_COUNTS)
    """counts since the last training record: see metrics.counts"""
    best_step: int = 0
    best_score: list[float] = field(default_factory=list)
    """see Objective.score; [] before the first evaluation"""
    stale: int = 0
    """evaluations since the best one"""
    began: float = field(default_factory=time.monotonic)
    """when the run would have begun, had it never been interrupted"""

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self.began, 3)

    def judge(self, score: list[float]) -> bool:
        """Whether this evaluation is the best so far, which is remembered."""
        if self.best_score and score <= self.best_score:
            self.stale += 1
            return False
        self.best_step, self.best_score, self.stale = self.step, score, 0
        return True

    def to_json(self) -> dict[str, Any]:
        values = {name: value for name, value in vars(self).items() if name != "began"}
        return values | {"seconds": self.seconds}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Standing":
        values = dict(values)
        return cls(began=time.monotonic() - values.pop("seconds"), **values)


def snapshot(setup: Setup, standing: Standing) -> Snapshot | None:
    """The run as it is; None in all processes but the first, which must ask too."""
    keep = setup.processes.is_first
    averages = {} if setup.average is None else setup.average.averages
    others = {f"optim.{name}": tensor for name, tensor in setup.optimizers.state_tensors().items()}
    others |= {f"ema.{name}": tensor for name, tensor in averages.items()}
    model, optimizer = gathered(setup.model.state_dict(), keep), gathered(others, keep)
    for kind, generator in random_states(setup.processes.device).items():
        for rank, bytes_of_rank in enumerate(setup.processes.gather(generator)):
            optimizer[f"random.rank{rank}{kind}"] = bytes_of_rank
    state = {"standing": standing.to_json(), "made_with": setup.made_with(), "data": about_data(setup.data)}
    state["config"] = from_json(to_json(setup.config.to_dict()))  # with lists instead of tuples
    return Snapshot(standing.step, model, optimizer, state) if keep else None


def about_data(data: DataSet) -> dict[str, Any]:
    """What is needed to ask the trained model something and to read its answer, where the data itself is not there."""
    normalise = {"mean": list(data.normalise.mean), "std": list(data.normalise.std)} if data.normalise else None
    known = {"classes": list(data.classes), "symbols": list(data.symbols), "normalise": normalise}
    return known | {"files": dict(data.files), "skipped": list(data.skipped)}


def restore(setup: Setup, found: Snapshot | None, report: Callable[[str], None]) -> Standing:
    """Brings all processes to where the first one's checkpoint is; to the beginning without one."""
    processes = setup.processes
    state = processes.share(None if found is None else found.state)
    if state is None:
        return Standing()
    check_files(state, setup.data.files)
    standing = Standing.from_json(state["standing"])
    fill(setup.model.state_dict(), processes.share_tensors(found.model if found else {}))
    optimizer = processes.share_tensors(found.optimizer if found else {})
    setup.optimizers.load_state_tensors(starting_with("optim.", optimizer))
    if setup.average is not None:
        fill(setup.average.averages, starting_with("ema.", optimizer))
    restore_random(setup, starting_with("random.", optimizer), standing.step)
    announce_changes(state.get("config"), setup.config, report)
    announce(state["made_with"], setup.made_with(), report)
    return standing


def check_files(state: dict[str, Any], now: Mapping[str, str]) -> None:
    """With other words in a file, or other pictures in a folder, others would validate, some of them learnt already."""
    if changed := changed_files(state["data"].get("files", {}), now):  # runs of before have none
        raise ValueError(
            f"a run goes on with the data that it began with, got other bytes in {', '.join(changed)}; "
            "put the old ones back, or train anew"
        )


@contextmanager
def told_of_changed_files(run: RunDirectory | None, config: RunConfig) -> Iterator[None]:
    """What data of other bytes may break inside (too few words, other letters) is told as that."""
    try:
        yield
    except (ValueError, LookupError):
        if run and (found := run.newest()):
            check_files(found.state, digests(config.data))
        raise


def use_weights(setup: Setup, found: Snapshot | None) -> None:
    """Gives the model the weights that were evaluated when this checkpoint was made."""
    weights = weights_to_use(found.model, found.optimizer) if found else {}
    fill(setup.model.state_dict(), setup.processes.share_tensors(weights))


def random_states(device: torch.device) -> dict[str, Tensor]:
    """The generators that dropout draws from."""
    states = {"": torch.get_rng_state()}
    return states | ({".cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def restore_random(setup: Setup, states: dict[str, Tensor], step: int) -> None:
    """This process's generators; a process that the checkpoint does not know starts a stream of its own."""
    rank, device = setup.processes.rank, setup.processes.device
    torch.manual_seed(key_of(setup.config.seed, "dropout", rank, step))
    if f"rank{rank}" in states:
        torch.set_rng_state(states[f"rank{rank}"])
    if f"rank{rank}.cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states[f"rank{rank}.cuda"], device)


def announce_changes(before: dict[str, Any] | None, now: RunConfig, report: Callable[[str], None]) -> None:
    """Whoever edits a run's config.json learns what that did."""
    then = flat(before or {})  # runs of before have none, or have not all fields
    is_now = flat(from_json(to_json(now.to_dict())))
    changes = [
        f"{name} was {then[name]}, is {is_now[name]}" for name in then.keys() & is_now if then[name] != is_now[name]
    ]
    if changes:
        report(f"this is no longer the run that it began as: {'; '.join(sorted(changes))}")


def announce(before: dict[str, Any], now: dict[str, Any], report: Callable[[str], None]) -> None:
    changes = {name: value for name, value in now.items() if before.get(name, value) != value}
    if changes:
        how = "will differ" if "precision" in changes else "may differ in their last digits"
        told = "; ".join(f"{name} was {before[name]}, is {value}" for name, value in changes.items())
        report(f"numbers {how} from an uninterrupted run: {told}")


def starting_with(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
