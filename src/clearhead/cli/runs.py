"""`clearhead runs` lists runs; `clearhead verify` checks the files of a run. Neither writes files or imports torch."""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from clearhead.cli.options import Parser
from clearhead.messages import duration, json_text, printable, safe_console
from clearhead.training.run_directory import CONFIG, RUNS
from clearhead.training.run_summary import RunSummary, summarize

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
