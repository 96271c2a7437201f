"""`clearhead curves`: plot the learning curves of runs, or export their records as CSV."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clearhead.cli.options import Parser

if TYPE_CHECKING:
    from clearhead.training.curves import Curves

DETAILS = """\
Training and validation curves of all runs are drawn in one figure. A run may
still be training. RUN is the path of a run or its name in runs/, a folder that
contains a metrics.jsonl, or such a file.

More examples:
  clearhead curves mine --log --smooth 0.5
  clearhead curves short long --panels --out compared.pdf
  clearhead curves short long --csv records.csv"""

STDOUT = Path("-")


def curves(argv: Sequence[str]) -> None:
    args = parser().parse(argv)

    from clearhead.cli.options import say, warn
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


def parser() -> Parser:
    options = Parser(
        "clearhead curves",
        "Plot loss and accuracy of one or more runs against epochs.",
        usage="clearhead curves RUN... [options]",
        examples=("clearhead curves mine", "clearhead curves runs/mine --epochs 10 20 30"),
        details=DETAILS,
    )
    options.add_argument("runs", metavar="RUN", nargs="+", help="path of a run, or its name in runs/")
    options.add_argument(
        "--epochs",
        metavar="N",
        nargs="+",
        type=parse_epochs,
        default=(),
        help="for each N, draw a row of panels from epoch 0 to N (default: all epochs)",
    )
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
