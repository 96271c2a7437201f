"""Verify on this machine that a run that was killed and resumed equals an uninterrupted one, bit for bit."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.training.config import RunConfig
from clearhead.training.loop import TrainResult, resume, train
from clearhead.training.run_directory import Report, RunDirectory

FEWEST_STEPS = 4
HOME = Path(__file__).parents[2]
"""the folder from which this package was imported"""

CHILD = """
import json, sys
folder, home = sys.argv[1:]
sys.path.insert(0, home)
import clearhead
sys.path.remove(home)
from clearhead.training.config import RunConfig
from clearhead.training.loop import train
train(RunConfig.from_dict(json.load(sys.stdin)), folder, quiet=True)
"""
"""imports the package from the same folder as this process, and nothing else from there"""


@dataclass(frozen=True)
class Verification:
    steps: int
    killed_at: int
    """the last logged step when the process was killed"""
    resumed_from: int
    """the step of the latest checkpoint at that time; 0 without one"""
    differences: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        return not self.differences


def verify_resume(config: RunConfig, folder: str | Path, report: Report = lambda line: None) -> Verification:
    """Train in folder/whole; train again in folder/killed, with kill -9 halfway; resume that run; compare all bits.

    `report` is called before each phase, which may take long.
    """
    folder = Path(folder)
    threads = config.training.threads or torch.get_num_threads()
    config = replace(config, training=replace(config.training, threads=threads, log_every=1))
    report("training undisturbed ...")
    n_steps = steps_to_the_end(train(config, folder / "whole", quiet=True))
    config = RunConfig.from_dict(RunDirectory.open(folder / "whole").config)  # with precision "auto" resolved
    if n_steps < FEWEST_STEPS:
        raise ValueError(f"a run needs {FEWEST_STEPS} steps or more to be killed halfway, got {n_steps}; take more")
    report(f"trained {n_steps} steps; the same again, in a process to be killed halfway ...")
    killed_at = train_and_kill(config, folder / "killed", n_steps // 2)
    found = RunDirectory.open(folder / "killed").latest_checkpoint()
    resumed_from = found.step if found else 0
    report(f"killed at step {killed_at}; resuming from step {resumed_from} ...")
    steps_to_the_end(resume(folder / "killed", quiet=True))
    report("resumed to the end; comparing the two ...")
    differences = tuple(compare(folder / "whole", folder / "killed"))
    return Verification(n_steps, killed_at, resumed_from, differences)


def steps_to_the_end(outcome: TrainResult) -> int:
    """The steps of a finished run. A run that was stopped by a signal stops the verification too."""
    if outcome.reason == "stopped":
        raise KeyboardInterrupt
    return outcome.step


def train_and_kill(config: RunConfig, folder: Path, step: int) -> int:
    """Train in a subprocess and kill it as soon as this step is logged. Returns the last logged step."""
    child = subprocess.Popen(  # -P: do not import a torch.py from the current folder
        [sys.executable, "-P", "-c", CHILD, str(folder), str(HOME)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stderr is not None
    try:
        child.stdin.write(json.dumps(config.to_dict()))
        child.stdin.close()
        while child.poll() is None and last_step(folder) < step:
            time.sleep(0.002)
    finally:
        child.kill()
        child.wait()
        errors = child.stderr.read().strip()
        child.stderr.close()
    if child.returncode > 0:
        raise ValueError(f"the process to be killed must train until then, got an error: {errors.splitlines()[-1]}")
    if child.returncode == 0:
        raise ValueError(f"the process must be killed before it ends, got {step} steps too late; try more steps")
    return last_step(folder)


def last_step(folder: Path) -> int:
    if not (folder / "metrics.jsonl").exists():
        return 0
    return max((record["step"] for record in RunDirectory.open(folder).records()), default=0)


def compare(folder: Path, other: Path) -> list[str]:
    """The differences between the records and latest checkpoints of two runs, except for times."""
    mine, theirs = RunDirectory.open(folder), RunDirectory.open(other)
    differences = []
    if [timeless(r) for r in mine.records()] != [timeless(r) for r in theirs.records()]:
        differences.append("the records of metrics.jsonl")
    one, two = mine.latest_checkpoint(), theirs.latest_checkpoint()
    if one is None or two is None or one.step != two.step:
        return [*differences, "the step of the newest checkpoint"]
    if timeless(one.state["train_state"]) != timeless(two.state["train_state"]):
        differences.append("the training state")
    for tensors, others in ((one.model, two.model), (one.optimizer, two.optimizer)):
        names = sorted(tensors.keys() | others.keys())
        differences += [name for name in names if not same_bits(tensors.get(name), others.get(name))]
    return differences


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "seconds"}


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
