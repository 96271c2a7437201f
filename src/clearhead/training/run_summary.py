"""The state of a run at a glance: recipe, step, accuracy, and whether it is running, finished, interrupted or diverged.

Nothing is written, and torch is not imported.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from clearhead.files import MAX_JSON_BYTES, check_tree, from_json, read_regular
from clearhead.training.checkpoint import saved_steps
from clearhead.training.config import RunConfig
from clearhead.training.metrics_log import Record, read
from clearhead.training.run_directory import CONFIG, METRICS, is_locked

State = Literal["running", "finished", "interrupted", "diverged", "no checkpoint yet", "unreadable"]

UNFINISHED = {"running": "is still training", "interrupted": "was interrupted", "diverged": "diverged"}
"""states of a run whose training has not finished, as they are worded in warnings"""


@dataclass(frozen=True)
class RunSummary:
    name: str
    path: str
    state: State
    changed: float
    """time of the last record, in seconds since 1970"""
    recipe: str | None = None
    step: int = 0
    total_steps: int | None = None
    """None while the length of an epoch is unknown"""
    epochs: int | None = None
    """length of the run, if it was set in epochs"""
    best_validation_accuracy: float | None = None
    test_accuracy: float | None = None
    problem: str | None = None
    """why it is unreadable"""

    @property
    def unfinished(self) -> str:
        """Why the training has not finished, and at which step; "" if it has."""
        if self.state not in UNFINISHED:
            return ""
        end = f" of {self.total_steps:,}" if self.total_steps else ""
        return f"{UNFINISHED[self.state]} at step {self.step:,}{end}"


def summarize(folder: Path) -> RunSummary:
    """The summary of a run; a damaged one is "unreadable", with the reason."""
    summary = RunSummary(folder.name, str(folder), "unreadable", last_change(folder))
    try:
        check_tree(folder, for_writing=False)
        config = RunConfig.from_dict(from_json(read_regular(folder / CONFIG, MAX_JSON_BYTES)))
        records = read(folder / METRICS)
        summary = replace(summary, recipe=config.recipe, **progress_of(config, records))
        summary = replace(summary, step=max([summary.step, *saved_steps(folder)]))  # not every step has a record
        return replace(summary, state=state_of(folder, config, records, summary))
    except Exception as error:  # one broken folder must not hide the others
        return replace(summary, problem=" ".join(error_text(error).split()) or type(error).__name__)


def error_text(error: Exception) -> str:
    return f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.strerror else str(error)


def progress_of(config: RunConfig, records: Sequence[Record]) -> dict[str, Any]:
    """Fields of a RunSummary: steps, length and accuracies."""
    training = config.training
    last = max((record for record in records if record.get("epoch")), key=lambda r: r["step"], default=None)
    per_epoch = round(last["step"] / last["epoch"]) if last else 0
    accuracies = {
        kind: [record["accuracy"] for record in records if record.get("kind") == kind and "accuracy" in record]
        for kind in ("validation", "test")
    }
    return {
        "step": last["step"] if last else 0,
        "total_steps": training.n_steps(per_epoch) or None,
        "epochs": training.epochs or None,
        "best_validation_accuracy": max(accuracies["validation"], default=None),
        "test_accuracy": accuracies["test"][-1] if accuracies["test"] else None,
    }


def state_of(folder: Path, config: RunConfig, records: Sequence[Record], summary: RunSummary) -> State:
    """The state of a readable run, from its lock, its records and its checkpoints."""
    if is_locked(folder):
        return "running"
    last = records[-1] if records else {}
    if last.get("kind") == "diverged":
        return "diverged"
    has_ended = summary.total_steps is not None and summary.step >= summary.total_steps
    # a run that was tested and then extended has not ended
    if last.get("kind") == "test" and (has_ended or ran_out_of_patience(config, records)):
        return "finished"
    if has_ended and not config.task.has_test:
        return "finished"
    return "interrupted" if saved_steps(folder) else "no checkpoint yet"


def ran_out_of_patience(config: RunConfig, records: Sequence[Record]) -> bool:
    """Whether none of the last `patience` evaluations improved on the best before them."""
    scores = [(r["accuracy"], -r["loss"]) for r in records if r.get("kind") == "validation" and "accuracy" in r]
    n = config.training.patience
    return 0 < n < len(scores) and max(scores[-n:]) <= max(scores[:-n])


def last_change(folder: Path) -> float:
    """The modification time of metrics.jsonl, else of config.json, in seconds since 1970; 0 without both."""
    for name in (METRICS, CONFIG):
        try:
            return (folder / name).lstat().st_mtime
        except OSError:
            continue
    return 0.0
