"""`clearhead steps`: the example's matrices, or the user's own."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clearhead.cli.overrides import reader
from clearhead.cli.parser import Parser
from clearhead.messages import did_you_mean, json_text, printable

ABOUT = """\
Self-attention in five steps, with the numbers of each: project, score, scale
and softargmax, weight the values, sum. Without a file it takes three tokens,
small enough to follow on paper."""

EPILOG = """\
a file
  .json {"x": [[1, 0], [0, 1]], "w_q": [[1, 0], [0, 1]], "w_k": ..., "w_v": ...}
        or "q", "k", "v" instead; optionally "w_o", "heads": 2, "beta": 1, and
        "mask": "causal" or rows of 0 and 1
  .npz  numpy.savez("my.npz", x=..., w_q=..., w_k=..., w_v=...)

examples
  clearhead steps
  clearhead steps --mask causal --beta inf
  clearhead steps --heads 2 --figure steps.png
  clearhead steps --file my.json --mask mymask.txt --json
  clearhead steps --latex > steps.tex"""


def run(argv: Sequence[str]) -> None:
    args = parser().parse(argv)
    if args.figure is not None:
        from clearhead.drawing import check_suffix

        check_suffix(args.figure)

    from clearhead.models.steps import five_steps

    steps = five_steps(**given(args))
    if args.figure is not None:
        from clearhead.drawing import save_figure
        from clearhead.models.matrix_figures import draw_steps

        save_figure(draw_steps(steps), args.figure)
    if args.json:
        print(json_text({"steps": [step.to_dict() for step in steps]}))
        return
    if args.latex:
        from clearhead.models.steps_latex import steps_latex

        print(steps_latex(steps), end="")
        return
    from clearhead.cli.terminal import console, show
    from clearhead.models.steps_text import steps_text

    show(steps_text(steps, console().width))
    if args.figure is not None:
        print(f"\nFigure: {printable(args.figure)}")


def parser() -> Parser:
    options = Parser("clearhead steps", ABOUT)
    options.epilog = EPILOG
    options.add_argument("--file", metavar="PATH", help="your own matrices, from a .json or .npz file")
    options.add_argument("--heads", type=reader(int), metavar="N", help="number of heads (default: 1)")
    options.add_argument(
        "--mask", metavar="MASK", help="causal, or your own mask: .txt, .csv or .npy (see clearhead mask --help)"
    )
    options.add_argument("--causal", action="store_true", help="short for --mask causal")
    options.add_argument(
        "--beta", type=read_beta, metavar="X", help="inverse temperature, inf allowed (default: 1/sqrt(head width))"
    )
    options.add_argument("--figure", type=Path, metavar="PATH", help="also draw the steps: .png, .svg or .pdf")
    output = options.add_mutually_exclusive_group()
    output.add_argument("--latex", action="store_true", help="print a LaTeX document instead")
    output.add_argument("--json", action="store_true", help="machine-readable output, with all numbers in full")
    return options


def given(args: argparse.Namespace) -> dict[str, Any]:
    """What five_steps takes: the file's matrices or an example's, and what the options change."""
    from clearhead.models.mask_file import SUFFIXES, read_mask
    from clearhead.models.steps import EXAMPLE, EXAMPLE_HEADS
    from clearhead.models.steps_file import read_steps_file

    example = EXAMPLE if args.heads in (None, 1) else EXAMPLE_HEADS
    chosen: dict[str, Any] = dict(example) if args.file is None else read_steps_file(args.file)
    if args.causal or args.mask == "causal":
        chosen["causal"] = True
    elif args.mask is not None and not args.mask.lower().endswith(SUFFIXES):
        hint = did_you_mean(args.mask, ["causal"]) or f"; use causal or a file ({', '.join(SUFFIXES)})"
        raise LookupError(f"unknown mask {args.mask!r}{hint}")
    if args.mask not in (None, "causal"):
        chosen["mask"] = read_mask(args.mask)[0]
    changes = {"heads": args.heads, "beta": args.beta}
    return chosen | {name: value for name, value in changes.items() if value is not None}


def read_beta(text: str) -> float:
    try:
        beta = float(text)
    except ValueError:
        beta = math.nan
    if math.isnan(beta):
        raise argparse.ArgumentTypeError(f"must be a number or inf, got {text!r}")
    return beta
