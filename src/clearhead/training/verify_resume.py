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

MIN_STEPS = 4
PACKAGE_ROOT = Path(__file__).parents[2]
"""the folder from which this package was imported"""

CHILD_CODE = """
import json, sys
folder, package_root = sys.argv[1:]
sys.path.insert(0, package_root)
import clearhead
sys.path.remove(package_root)
from clearhead.training.config import RunConfig
from clearhead.training.loop import train
train(RunConfig.from_dict(json.load(sys.stdin)), folder, quiet=True)
"""
"""code of the process to be killed: imports this package, and nothing else, from PACKAGE_ROOT"""


@dataclass(frozen=True)
class Verification:
    """The result of `verify_resume`."""

    steps: int
    """length of both runs"""
    killed_at: int
    """the last logged step when the process was killed"""
    resumed_from: int
    """the step of the latest checkpoint at that time; 0 without one"""
    differences: tuple[str, ...]
    """names of the tensors and other parts in which the two runs differ"""

    @property
    def is_exact(self) -> bool:
        return not self.differences


def verify_resume(config: RunConfig, folder: str | Path, report: Report = lambda line: None) -> Verification:
    """Compare an uninterrupted run with one that is killed halfway (SIGKILL) and resumed, bit for bit.

    The runs are saved in folder/uninterrupted and folder/killed. `report` is called before each phase.
    """
    folder = Path(folder)
    threads = config.training.threads or torch.get_num_threads()
    config = replace(config, training=replace(config.training, threads=threads, log_every=1))
    report("training without interruption ...")
    n_steps = final_step(train(config, folder / "uninterrupted", quiet=True))
    config = RunConfig.from_dict(RunDirectory.open(folder / "uninterrupted").config)  # with precision "auto" resolved
    if n_steps < MIN_STEPS:
        raise ValueError(f"verify-resume needs at least {MIN_STEPS} steps to kill a run halfway, got {n_steps}")
    report(f"trained {n_steps} steps; training again in a process that is killed halfway ...")
    killed_at = train_and_kill(config, folder / "killed", n_steps // 2)
    checkpoint = RunDirectory.open(folder / "killed").latest_checkpoint()
    resumed_from = checkpoint.step if checkpoint else 0
    report(f"killed at step {killed_at}; resuming from step {resumed_from} ...")
    final_step(resume(folder / "killed", quiet=True))
    report("resumed and finished; comparing the two runs ...")
    differences = tuple(compare(folder / "uninterrupted", folder / "killed"))
    return Verification(n_steps, killed_at, resumed_from, differences)


def final_step(result: TrainResult) -> int:
    """The last step of a finished run; KeyboardInterrupt if a signal has stopped it, to end the verification too."""
    if result.reason == "stopped":
        raise KeyboardInterrupt
    return result.step


def train_and_kill(config: RunConfig, folder: Path, step: int) -> int:
    """Train in a subprocess, kill it as soon as `step` is logged, and return the last logged step."""
    child = subprocess.Popen(  # -P: do not import a torch.py from the current folder
        [sys.executable, "-P", "-c", CHILD_CODE, str(folder), str(PACKAGE_ROOT)],
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
        raise ValueError(f"training failed before step {step}, at which it was to be killed: {errors.splitlines()[-1]}")
    if child.returncode == 0:
        raise ValueError(f"training ended before it could be killed at step {step}; try more --training.steps")
    return last_step(folder)


def last_step(folder: Path) -> int:
    if not (folder / "metrics.jsonl").exists():
        return 0
    return max((record["step"] for record in RunDirectory.open(folder).records()), default=0)


def compare(folder_a: Path, folder_b: Path) -> list[str]:
    """The differences between the records and the latest checkpoints of two runs, except for times."""
    run_a, run_b = RunDirectory.open(folder_a), RunDirectory.open(folder_b)
    differences = []
    if [without_times(record) for record in run_a.records()] != [without_times(record) for record in run_b.records()]:
        differences.append("the records of metrics.jsonl")
    a, b = run_a.latest_checkpoint(), run_b.latest_checkpoint()
    if a is None or b is None or a.step != b.step:
        return [*differences, "the step of the latest checkpoint"]
    if without_times(a.state["train_state"]) != without_times(b.state["train_state"]):
        differences.append("the training state")
    for tensors_a, tensors_b in ((a.model, b.model), (a.optimizer, b.optimizer)):
        names = sorted(tensors_a.keys() | tensors_b.keys())
        differences += [name for name in names if not bitwise_equal(tensors_a.get(name), tensors_b.get(name))]
    return differences


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "seconds"}


def bitwise_equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
