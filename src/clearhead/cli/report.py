"""`clearhead report`: a report of one or more runs in a single file."""

import sys
from collections.abc import Sequence
from pathlib import Path

from clearhead.cli.curves import parse_epochs
from clearhead.cli.options import Parser, reader
from clearhead.messages import printable

DETAILS = """\
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


def report(argv: Sequence[str]) -> None:
    options = Parser(
        "clearhead report",
        "Write a report of one or more runs: settings, curves, results and attention in a single file.",
        usage="clearhead report RUN... [options]",
        examples=("clearhead report mine", "clearhead report short long --out compared.html"),
        details=DETAILS,
    )
    options.add_argument("runs", metavar="RUN", nargs="+", help="path of a run, or its name in runs/")
    options.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        default=Path("report.html"),
        help="a .html or .md file (default: report.html)",
    )
    options.add_argument(
        "--epochs",
        metavar="N",
        nargs="+",
        type=parse_epochs,
        default=(),
        help="for each N, draw learning curves from epoch 0 to N (default: all epochs)",
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

    from clearhead.cli.options import say
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
