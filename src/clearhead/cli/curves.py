"""`clearhead curves`: from the names of runs to a picture, or to a table of their numbers."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clearhead.cli.options import Parser

if TYPE_CHECKING:
    from clearhead.training.curves import Curves

ABOUT = """\
Plots loss and accuracy against epochs, for training and validation, of one or
more runs in one picture, also while a run is being trained. A RUN is the path of
a run or its name in runs/, a folder that holds a metrics.jsonl, or such a file."""

EXAMPLES = """\
examples
  clearhead curves mine
  clearhead curves runs/mine --epochs 10 20 30
  clearhead curves short long --panels --out compared.pdf
  clearhead curves mine --log --smooth 0.5
  clearhead curves short long --csv numbers.csv"""

PRINT = Path("-")
"""the standard output"""


def curves(argv: Sequence[str]) -> None:
    args = parser().parse(argv)

    from clearhead.cli.options import say, warn
    from clearhead.drawing import check_suffix, save_figure
    from clearhead.files import write_atomic
    from clearhead.training.curves import draw_curves, read_curves, to_csv, windows_of

    if args.out:
        check_suffix(args.out)
    runs = [read_curves(run) for run in args.runs]
    if note := cut_note(runs, args.epochs):
        warn(note)
    if args.csv:
        text = to_csv(runs, max(windows_of(runs, args.epochs)) if args.epochs else math.inf)
        if args.csv == PRINT:
            sys.stdout.write(text)
        else:
            args.csv.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(args.csv, text.encode())
            say(args.csv)
    if args.out or not args.csv:
        figure = draw_curves(runs, args.epochs, log=args.log, smooth=args.smooth, panels=args.panels)
        say(save_figure(figure, args.out or default_path(args.runs)))


def parser() -> Parser:
    options = Parser("clearhead curves", ABOUT)
    options.usage = "clearhead curves RUN... [options]"
    options.epilog = EXAMPLES
    options.add_argument("runs", metavar="RUN", nargs="+", help="a run, such as runs/mine or mine")
    options.add_argument(
        "--epochs", metavar="N", nargs="+", type=read_epochs, default=(), help="a row of panels up to each epoch N"
    )
    options.add_argument("--panels", action="store_true", help="add a row for each run, up to its own last epoch")
    options.add_argument("--log", action="store_true", help="logarithmic axis for the loss")
    options.add_argument(
        "--smooth",
        metavar="N",
        type=read_width,
        default=0.0,
        help="running mean over N epochs, such as 0.5; the records are drawn faintly behind it",
    )
    options.add_argument(
        "--csv",
        metavar="FILE",
        type=read_csv_path,
        help="write the numbers as CSV instead of a picture; - prints them",
    )
    options.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="a .png, .svg or .pdf (default: figures/curves.png in the run's folder, and ./curves.png for several runs "
        "or a metrics.jsonl without a run)",
    )
    return options


def default_path(runs: Sequence[str]) -> Path:
    """Among the figures of the run; here, where there are several, or where records are kept without their run."""
    from clearhead.training.run_directory import CONFIG, find_records, find_run

    folder = find_records(runs[0]).parent
    return (
        find_run(folder) / "figures/curves.png"
        if len(runs) == 1 and (folder / CONFIG).is_file()
        else Path("curves.png")
    )


def cut_note(runs: "Sequence[Curves]", epochs: Sequence[int]) -> str:
    """What becomes of windows that reach beyond the end of the longest run."""
    from clearhead.messages import round_count
    from clearhead.training.curves import windows_of

    too_long = [str(window) for window in epochs if window not in windows_of(runs, epochs)]
    if not too_long:
        return ""
    end = round_count(max(run.length for run in runs))
    longest = "the run has" if len(runs) == 1 else "the longest run has"
    unit = "epoch" if end == "1" else "epochs"
    return f"{longest} {end} {unit} so far: the window up to {', '.join(too_long)} is cut there"


def read_csv_path(text: str) -> Path:
    """Nothing but a .csv file is written: a run that follows the option must not be overwritten."""
    if text != "-" and not text.lower().endswith(".csv"):
        raise argparse.ArgumentTypeError(f"must be a .csv file, or - to print, got {text!r:.60}")
    return Path(text)


def read_epochs(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) == 0:
        raise argparse.ArgumentTypeError(
            f"must be a number of epochs, from 1 to 999999999, got {text!r:.60}; runs come before it"
        )
    return int(text)


def read_width(text: str) -> float:
    try:
        width = float(text)
    except ValueError:
        width = math.nan
    if not 0 < width < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of epochs above 0, got {text!r:.60}; runs come before it")
    return width
