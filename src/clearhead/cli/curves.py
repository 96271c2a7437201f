"""`clearhead curves`: from the names of runs to a picture."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from clearhead.cli.parser import Parser

ABOUT = """\
Loss and accuracy against epochs, in training and validation, of one or more
runs in one picture. It may be drawn while a run is still being trained."""

EXAMPLES = """\
examples
  clearhead curves runs/mine
  clearhead curves runs/mine --epochs 10 20 30
  clearhead curves runs/short runs/long --out compared.pdf"""


def run(argv: Sequence[str]) -> None:
    options = Parser("clearhead curves", ABOUT)
    options.usage = "clearhead curves RUN... [options]"
    options.epilog = EXAMPLES
    options.add_argument("runs", metavar="RUN", nargs="+", help="the folder of a run, such as runs/mine")
    options.add_argument(
        "--epochs", metavar="N", nargs="+", type=read_epochs, default=(), help="a row of panels up to each of these"
    )
    options.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="a .png, .svg or .pdf (now figures/curves.png in the run's folder; curves.png here for several)",
    )
    args = options.parse(argv)

    from clearhead.drawing import check_suffix, save_figure
    from clearhead.training.curves import draw_curves, read_curves

    folders = [Path(run) for run in args.runs]
    out = args.out or (folders[0] / "figures/curves.png" if len(folders) == 1 else Path("curves.png"))
    check_suffix(out)
    print(save_figure(draw_curves([read_curves(folder) for folder in folders], args.epochs), out))


def read_epochs(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) == 0:
        raise argparse.ArgumentTypeError(
            f"must be a number of epochs, from 1 to 999999999, got {text!r:.60}; runs come before it"
        )
    return int(text)
