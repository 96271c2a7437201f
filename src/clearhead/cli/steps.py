"""`clearhead steps`: the example's matrices, or the user's own."""

import argparse
import json
import math
from collections.abc import Sequence

from clearhead.cli.parser import Parser

ABOUT = """\
Self-attention in five steps, with the numbers of each: project, score, scale
and softargmax, weight the values, sum. Without a file it takes three tokens,
small enough to follow on paper."""

EPILOG = """\
a file
  .json {"x": [[1, 0], [0, 1]], "w_q": [[1, 0], [0, 1]], "w_k": ..., "w_v": ...}
        or "q", "k", "v" instead; "beta": 1 and "mask": "causal" if you like
  .npz  numpy.savez("my.npz", x=..., w_q=..., w_k=..., w_v=...)

examples
  clearhead steps
  clearhead steps --causal --beta inf
  clearhead steps --file my.json --json"""


def run(argv: Sequence[str]) -> None:
    options = Parser("clearhead steps", ABOUT)
    options.epilog = EPILOG
    options.add_argument("--file", metavar="PATH", help="your own matrices, from a .json or .npz file")
    options.add_argument("--causal", action="store_true", help="no token sees a later one")
    options.add_argument(
        "--beta", type=read_beta, metavar="X", help="inverse temperature, inf allowed (now 1/sqrt(query width))"
    )
    options.add_argument("--json", action="store_true", help="all numbers in full, for programs")
    args = options.parse(argv)

    from clearhead.models.steps import EXAMPLE, five_steps
    from clearhead.models.steps_file import read_steps_file

    given = dict(EXAMPLE) if args.file is None else read_steps_file(args.file)
    given |= {"causal": True} if args.causal else {}
    given |= {} if args.beta is None else {"beta": args.beta}
    steps = five_steps(**given)
    if args.json:
        print(json.dumps({"steps": [step.to_dict() for step in steps]}, indent=2))
        return
    from clearhead.cli.terminal import console, show
    from clearhead.models.steps_text import steps_text

    show(steps_text(steps, console().width))


def read_beta(text: str) -> float:
    try:
        beta = float(text)
    except ValueError:
        beta = math.nan
    if math.isnan(beta):
        raise argparse.ArgumentTypeError(f"must be a number or inf, got {text!r}")
    return beta
