"""`clearhead runs` lists runs; `clearhead verify` checks the files of a run. Neither writes files or imports torch."""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from clearhead.cli.options import Parser
from clearhead.files import MAX_JSON_BYTES, check_tree, from_json, read_regular
from clearhead.messages import duration, json_text, printable, safe_console
from clearhead.training.checkpoint import saved_steps
from clearhead.training.config import RunConfig
from clearhead.training.metrics_log import Record, read
from clearhead.training.run_directory import CONFIG, METRICS, RUNS, is_locked

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.training.audit import Audit

RUNS_DETAILS = """\
The newest run comes first. The columns are recipe, step, best validation
accuracy, test accuracy and state:

  running            a process is training it
  finished           training and test are complete
  interrupted        stopped or killed; clearhead resume NAME continues it
  diverged           loss, gradients or weights were not finite
  no checkpoint yet  stopped before its first checkpoint; clearhead resume NAME
                     restarts it
  unreadable         a file in its folder is damaged"""

VERIFY_DETAILS = """\
Checkpoints are compared with their manifests (size and SHA-256), metrics.jsonl
and config.json with the latest intact checkpoint, and attention snapshots with
the digest in their header. Figures are not checked. Nothing is written.

  missing     a file or a record has been deleted
  changed     a file differs from the version that was saved
  unexpected  a file does not belong to a run
  leftover    a killed process left an unfinished file
  unsafe      a link or a special file; other commands refuse the run
  unreadable  the operating system cannot read a file

The exit code is 0 if the run is intact, and 1 if it is not."""

NOT_INTACT = 1

State = Literal["running", "finished", "interrupted", "diverged", "no checkpoint yet", "unreadable"]


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


def runs(argv: Sequence[str]) -> None:
    options = Parser(
        "clearhead runs",
        "List the runs in a folder with their recipe, step, accuracy and state.",
        usage="clearhead runs [FOLDER] [options]",
        examples=("clearhead runs", "clearhead runs other/runs --json"),
        details=RUNS_DETAILS,
    )
    options.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, help="folder of runs (default: runs)")
    options.add_argument("--json", action="store_true", help="machine-readable output")
    args = options.parse(argv)
    if args.folder is not None and not args.folder.is_dir():
        raise LookupError(f"no such folder: {args.folder}")
    folder = args.folder or RUNS
    listed = summaries(folder)
    if args.json:
        print(json_text([asdict(summary) for summary in listed]))
    elif not listed:
        print(f"No runs in {printable(folder)}. Start one with: clearhead train reverse")
    else:
        from clearhead.cli.options import show

        show(runs_table(listed))


def summaries(folder: Path) -> list[RunSummary]:
    """Summaries of all runs in a folder, newest first, or of the folder itself if it is a run."""
    if os.path.lexists(folder / CONFIG):
        return [summarize(folder)]
    names = [name for name in (os.listdir(folder) if folder.is_dir() else []) if not name.startswith(".")]
    unsorted = [summarize(folder / name) for name in names if os.path.lexists(folder / name / CONFIG)]
    return sorted(unsorted, key=lambda summary: (-summary.changed, summary.name))


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


def runs_table(summaries: Sequence[RunSummary], *, with_time: bool = True) -> "Table":
    """The time of the last change is omitted if the terminal is too narrow for all columns."""
    from rich.table import Table

    from clearhead.cli.options import console

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("run", "recipe"):
        table.add_column(title, overflow="fold")
    for title in ("step", "validation", "test"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("state", min_width=max(len(summary.state) for summary in summaries))
    if with_time:
        table.add_column("last change", justify="right", no_wrap=True)
    now = time.time()
    for summary in summaries:
        table.add_row(
            printable(summary.name),
            printable(summary.recipe or ""),
            steps(summary),
            percent(summary.best_validation_accuracy),
            percent(summary.test_accuracy),
            f"{summary.state}: {printable(summary.problem)}" if summary.problem else summary.state,
            *([f"{duration(max(1.0, now - summary.changed))} ago"] if with_time else []),
        )
    if with_time and safe_console(width=1000).measure(table).maximum > console().width:
        return runs_table(summaries, with_time=False)
    return table


def steps(summary: RunSummary) -> str:
    if summary.state == "unreadable":
        return ""
    total = f"{summary.total_steps:,}" if summary.total_steps else f"{summary.epochs} epochs"
    return f"{summary.step:,} / {total}"


def percent(accuracy: float | None) -> str:
    return "" if accuracy is None else f"{accuracy:.2%}"


def verify(argv: Sequence[str]) -> int:
    options = Parser(
        "clearhead verify",
        "Check every file of a run and report those that are missing, changed or unexpected.",
        usage="clearhead verify RUN [options]",
        examples=("clearhead verify runs/mine", "clearhead verify runs/mine --json"),
        details=VERIFY_DETAILS,
    )
    options.add_run()
    options.add_argument("--json", action="store_true", help="machine-readable output")
    args = options.parse(argv)

    from clearhead.training.audit import audit
    from clearhead.training.run_directory import find_run

    report = audit(find_run(args.run, checked=False))
    if args.json:
        print(json_text({"is_intact": report.is_intact} | asdict(report)))
    else:
        show_audit(report)
    return 0 if report.is_intact else NOT_INTACT


def show_audit(report: "Audit") -> None:
    from clearhead.cli.options import show

    n = len(report.findings)
    state = "is intact" if report.is_intact else f"is not intact: {n} {'problem' if n == 1 else 'problems'}"
    print(f"{printable(report.run)} {state}{' (a process is training it)' if report.is_running else ''}")
    if report.findings:
        print()
        show(findings_table(report))
        print()
    steps = ", ".join(map(str, report.checkpoints)) or "none"
    print(f"intact checkpoints: {steps}; records: {report.records:,}; files: {report.files:,}")


def findings_table(report: "Audit") -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("file", overflow="fold")
    table.add_column("finding", no_wrap=True)
    table.add_column("problem", overflow="fold")
    for finding in report.findings:
        table.add_row(printable(finding.path), finding.kind, printable(finding.problem))
    return table
