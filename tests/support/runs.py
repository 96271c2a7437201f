"""Checkpoints and runs to save, load and compare: shared by the tests of checkpoints, run directories and the loop."""

from dataclasses import replace

import torch

from clearhead.training import checkpoint
from clearhead.training.checkpoint import Checkpoint
from clearhead.training.run_directory import RunDirectory

RUN_CONFIG = {"recipe": "reverse", "seed": 7, "optimizer": {"lr": 0.1 + 0.2}}


def make_checkpoint(step: int, value: float | None = None) -> Checkpoint:
    weight = torch.full((2,), float(step if value is None else value))
    return Checkpoint(step, {"w": weight}, {"m": torch.tensor(step)}, {"loss": 0.1 + 0.2})


def equal_tensors(a: dict, b: dict) -> bool:
    """Whether two dicts of tensors are equal bit for bit, NaN included."""
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype
        and a[k].shape == b[k].shape
        and a[k].contiguous().reshape(-1).view(torch.uint8).equal(b[k].contiguous().reshape(-1).view(torch.uint8))
        for k in a
    )


def equal_checkpoints(a: Checkpoint, b: Checkpoint) -> bool:
    return (
        a.step == b.step
        and a.state == b.state
        and equal_tensors(a.model, b.model)
        and equal_tensors(a.optimizer, b.optimizer)
    )


def fail_on_report(message: str) -> None:
    raise AssertionError(f"unexpected report: {message}")


def make_record(step: int) -> dict:
    return {"kind": "train", "step": step, "loss": 1 / (step + 1)}


def without_times(record: dict) -> dict:
    return {name: value for name, value in record.items() if name != "seconds"}


def records_of(folder) -> list[dict]:
    return [without_times(record) for record in RunDirectory.open(folder).records()]


def assert_identical(folder, other) -> None:
    """Compares weights, optimizer, averages, RNG state, train state and records at all common steps."""
    assert records_of(folder) == records_of(other)
    common = set(checkpoint.saved_steps(folder)) & set(checkpoint.saved_steps(other))
    assert max(checkpoint.saved_steps(folder)) in common
    for step in common:
        mine, theirs = (checkpoint.load(path / "checkpoints" / checkpoint.step_name(step)) for path in (folder, other))
        assert without_times(mine.state["train_state"]) == without_times(theirs.state["train_state"])
        for tensors, others in ((mine.model, theirs.model), (mine.optimizer, theirs.optimizer)):
            assert tensors.keys() == others.keys()
            for name in tensors:
                assert torch.equal(tensors[name], others[name]), (step, name)


def with_training(config, **changes):
    return replace(config, training=replace(config.training, **changes))
