"""Commands about runs: `clearhead runs` lists them, `verify` checks their files, `curves` and `report` show results.

`runs` and `verify` neither write files nor import torch.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from clearhead.cli.options import Parser, console, reader, say, show, warn
from clearhead.messages import duration, json_text, printable, safe_console
from clearhead.training.run_directory import CONFIG, RUNS
from clearhead.training.run_summary import RunSummary, summarize

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.training.audit import Audit
    from clearhead.training.curves import Curves

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

CURVES_DETAILS = """\
Training and validation curves of all runs are drawn in one figure. A run may
still be training. RUN is the path of a run or its name in runs/, a folder that
contains a metrics.jsonl, or such a file.

More examples:
  clearhead curves mine --log --smooth 0.5
  clearhead curves short long --panels --out compared.pdf
  clearhead curves short long --csv records.csv"""

REPORT_DETAILS = """\
The report contains the command that reproduces the run, its data with sizes and
digests, its settings (those that differ from the recipe first), the shapes and
parameters of the model, training time and environment, learning curves, test
metrics, the confusion matrix, the most confident mistakes, attention maps and
masks. Several runs are compared, too. A run may still be training.

A .html file contains everything, for any browser, and prints well; it needs no
network and no script. A .md file has its figures in a folder beside it, or inside
with --embed.

More examples:
  clearhead report mine --samples 0 3 7 --epochs 5 10
  clearhead report mine --out report.md --embed"""

NOT_INTACT = 1
STDOUT = Path("-")


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


def curves(argv: Sequence[str]) -> None:
    args = curves_parser().parse(argv)

    from clearhead.drawing import check_suffix, save_figure
    from clearhead.files import write_atomic
    from clearhead.training.curves import draw_curves, read_curves, to_csv, windows_of

    if args.out:
        check_suffix(args.out)
    runs = [read_curves(run) for run in args.runs]
    if note := truncation_note(runs, args.epochs):
        warn(note)
    if args.csv:
        text = to_csv(runs, max(windows_of(runs, args.epochs)) if args.epochs else math.inf)
        if args.csv == STDOUT:
            sys.stdout.write(text)
        else:
            args.csv.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(args.csv, text.encode())
            say(args.csv)
    if args.out or not args.csv:
        figure = draw_curves(runs, args.epochs, log=args.log, smooth=args.smooth, panels=args.panels)
        say(save_figure(figure, args.out or default_path(args.runs)))


def curves_parser() -> Parser:
    options = Parser(
        "clearhead curves",
        "Plot loss and accuracy of one or more runs against epochs.",
        usage="clearhead curves RUN... [options]",
        examples=("clearhead curves mine", "clearhead curves runs/mine --epochs 10 20 30"),
        details=CURVES_DETAILS,
    )
    add_runs(options, "for each N, draw a row of panels from epoch 0 to N (default: all epochs)")
    options.add_argument("--panels", action="store_true", help="add a row of panels for each run")
    options.add_argument("--log", action="store_true", help="logarithmic axis for the loss")
    options.add_argument(
        "--smooth",
        metavar="N",
        type=parse_width,
        default=0.0,
        help="smooth by a running mean over N epochs, such as 0.5; the recorded values are drawn faintly behind it",
    )
    options.add_argument(
        "--csv",
        metavar="FILE",
        type=parse_csv_path,
        help="write the records as CSV instead of drawing a figure; - for stdout",
    )
    options.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="a .png, .svg or .pdf file (default: figures/curves.png in the run's folder; for several runs, or a "
        "metrics.jsonl without a run, ./curves.png)",
    )
    return options


def add_runs(options: Parser, epochs: str) -> None:
    """The runs to draw, and windows of epochs with the help text `epochs`."""
    options.add_argument("runs", metavar="RUN", nargs="+", help="path of a run, or its name in runs/")
    options.add_argument("--epochs", metavar="N", nargs="+", type=parse_epochs, default=(), help=epochs)


def default_path(runs: Sequence[str]) -> Path:
    """figures/curves.png in the run's folder; ./curves.png for several runs, or for records without a config.json."""
    from clearhead.training.run_directory import CONFIG, find_records, find_run

    folder = find_records(runs[0]).parent
    return (
        find_run(folder) / "figures/curves.png"
        if len(runs) == 1 and (folder / CONFIG).is_file()
        else Path("curves.png")
    )


def truncation_note(runs: "Sequence[Curves]", epochs: Sequence[int]) -> str:
    """A warning about windows that extend beyond the end of the longest run; "" if there are none."""
    from clearhead.messages import round_count
    from clearhead.training.curves import windows_of

    truncated = [str(window) for window in epochs if window not in windows_of(runs, epochs)]
    if not truncated:
        return ""
    end = round_count(max(run.length for run in runs))
    longest = "the run has" if len(runs) == 1 else "the longest run has"
    unit = "epoch" if end == "1" else "epochs"
    return f"{longest} {end} {unit} so far; panels up to epoch {', '.join(truncated)} end there"


def parse_csv_path(text: str) -> Path:
    """Only .csv files are written, so that a run named after the option by mistake is not overwritten."""
    if text != "-" and not text.lower().endswith(".csv"):
        raise argparse.ArgumentTypeError(f"must be a .csv file, or - for stdout, got {text!r:.60}")
    return Path(text)


def parse_epochs(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) == 0:
        raise argparse.ArgumentTypeError(
            f"must be a number of epochs, from 1 to 999999999, got {text!r:.60}; name the runs before --epochs"
        )
    return int(text)


def parse_width(text: str) -> float:
    try:
        width = float(text)
    except ValueError:
        width = math.nan
    if not 0 < width < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number of epochs, got {text!r:.60}")
    return width


def report(argv: Sequence[str]) -> None:
    options = Parser(
        "clearhead report",
        "Write a report of one or more runs: settings, curves, results and attention in a single file.",
        usage="clearhead report RUN... [options]",
        examples=("clearhead report mine", "clearhead report short long --out compared.html"),
        details=REPORT_DETAILS,
    )
    add_runs(options, "for each N, draw learning curves from epoch 0 to N (default: all epochs)")
    options.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        default=Path("report.html"),
        help="a .html or .md file (default: report.html)",
    )
    options.add_argument(
        "--samples",
        metavar="N",
        nargs="*",
        type=reader(int),
        default=[0],
        help="indices of test examples whose attention is drawn (default: 0); none if empty",
    )
    options.add_argument(
        "--mistakes",
        metavar="N",
        type=reader(int),
        default=16,
        help="number of the most confident mistakes (default: 16)",
    )
    options.add_argument("--embed", action="store_true", help="put the figures into the .md file")
    args = options.parse(argv)

    from clearhead.inference.report import report

    def announce(message: str) -> None:
        print(message, file=sys.stderr, flush=True)

    is_replaced = args.out.exists()
    path = report(
        args.runs,
        args.out,
        epochs=args.epochs,
        samples=args.samples,
        mistakes=args.mistakes,
        embed=args.embed,
        announce=announce,
    )
    if is_replaced:
        announce(f"replaced the existing file {printable(path)}")
    say(path)
