"""`clearhead mask`: an attention mask as numbers, as a figure, in its additive form, or from the user's own file."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.cli.options import Parser, reader
from clearhead.messages import did_you_mean, json_text, printable, unknown_name

if TYPE_CHECKING:
    from torch import Tensor

    from clearhead.models.mask_view import MaskView

KINDS = {
    "causal": "no token attends to a later one",
    "padding": "no token attends to padding, which fills up sequences of --lengths",
    "window": "tokens attend at most --window N positions away, in both directions",
}
TOKENS, MOST_TOKENS = 5, 2048

ABOUT_MASK = """\
Shows which query may attend to which key, as numbers and as a figure. Rows are
queries, columns are keys; 1 (True) = may attend, 0 (False) = may not. Several
masks are combined with a logical and."""

EXAMPLES = """\
examples
  clearhead mask causal --tokens 5
  clearhead mask causal --tokens 5 --additive -10000 --figure causal.png
  clearhead mask causal window --window 2 --tokens 8
  clearhead mask causal padding --lengths 3 5
  clearhead mask --file mymask.csv --figure mymask.svg

a file
  .txt, .csv  a row for each query: 1 0 0 (or True False False), or additive:
              0 -inf -inf (or -10000)
  .npy        such an array, saved by numpy.save
"""


def mask(argv: Sequence[str]) -> None:
    kinds = [arg for arg in argv if arg in KINDS]  # they may stand anywhere
    options = mask_parser()
    args = options.parse([arg for arg in argv if arg not in KINDS])
    for word in args.unknown:
        raise unknown_name("mask", word, [*KINDS, "--file PATH"])
    kinds += [kind for kind, value in (("window", args.window), ("padding", args.lengths)) if value is not None]
    kinds = [kind for kind in KINDS if kind in kinds]
    if not kinds and args.file is None:
        options.print_help()
        return
    check(kinds, args)

    from clearhead.cli.options import console, show
    from clearhead.models.mask_view import mask_text

    view = build(kinds, args)
    if args.figure is not None:
        from clearhead.drawing import save_figure
        from clearhead.models.matrix_figures import draw_mask

        save_figure(draw_mask(view), args.figure)
    if args.json:
        print(json_text(view.to_dict(), indent=None if view.mask.numel() > 400 else 2))
        return
    show(mask_text(view, console().width))
    if args.figure is not None:
        print(f"\nFigure: {printable(args.figure)}")


def mask_parser() -> Parser:
    options = Parser("clearhead mask", ABOUT_MASK)
    options.usage = "clearhead mask {causal,padding,window} ... [options]"
    options.epilog = "\n".join(["masks", *(f"  {kind:8}  {what}" for kind, what in KINDS.items()), "", EXAMPLES])
    options.add_argument("unknown", nargs="*", help=argparse.SUPPRESS)
    count = reader(int)
    options.add_argument("--tokens", type=count, metavar="N", help=f"length of the sequence (default: {TOKENS})")
    options.add_argument(
        "--queries", type=count, metavar="N", help="only the last N tokens are queries, as with a key-value cache"
    )
    options.add_argument("--window", type=count, metavar="N", help="largest distance between query and key")
    options.add_argument("--lengths", type=count, nargs="+", metavar="N", help="real tokens of each padded sequence")
    options.add_argument("--file", type=Path, metavar="PATH", help="your own mask: .txt, .csv or .npy")
    options.add_argument(
        "--form",
        metavar="FORM",
        default="auto",
        help="how the file's values are meant: bool (1 = may attend), additive (0 = may attend), torch (1 = may NOT "
        "attend, as in torch.nn.MultiheadAttention); default: auto, inferred from the values",
    )
    options.add_argument(
        "--additive",
        nargs="?",
        type=low,
        const=-math.inf,
        metavar="VALUE",
        help="show the numbers to add to the scores: 0, and VALUE for hidden keys (default: -inf)",
    )
    options.add_argument("--figure", type=Path, metavar="PATH", help="also draw it: .png, .svg or .pdf")
    options.add_argument("--json", action="store_true", help="machine-readable output")
    return options


def low(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value < 0:
        raise argparse.ArgumentTypeError(f"must be a negative number or -inf, got {text!r}")
    return value


def check(kinds: Sequence[str], args: argparse.Namespace) -> None:
    """What does not fit together is refused before torch is loaded."""
    for kind, option, value in (("window", "--window 2", args.window), ("padding", "--lengths 3 5", args.lengths)):
        if kind in kinds and value is None:
            raise ValueError(f"the {kind} mask needs {option.split()[0]}, such as {option}")
    if args.figure is not None:
        from clearhead.drawing import check_suffix

        check_suffix(args.figure)
    for name, number in (("--tokens", args.tokens), ("--queries", args.queries)):
        if number is not None and not 1 <= number <= MOST_TOKENS:
            raise ValueError(f"{name} must be from 1 to {MOST_TOKENS}, got {number}")
    if args.window is not None and not 0 <= args.window <= MOST_TOKENS:
        raise ValueError(f"--window must be from 0 to {MOST_TOKENS}, got {args.window}")
    longest = max(args.lengths or [0])
    if min(args.lengths or [0]) < 0 or longest > (args.tokens or MOST_TOKENS):
        raise ValueError(f"--lengths must be from 0 to {args.tokens or MOST_TOKENS} tokens, got {args.lengths}")
    if args.file is not None and (args.tokens is not None or args.queries is not None):
        raise ValueError("--file gives the number of tokens; leave out --tokens and --queries")
    if args.file is None and args.form != "auto":
        raise ValueError("--form needs --file")


def build(kinds: Sequence[str], args: argparse.Namespace) -> "MaskView":
    """The conjunction of the named masks and of the file's, as (Q,K), or (B,Q,K) with padding."""
    from clearhead.models.mask_view import MaskView, read_mask
    from clearhead.nn import masks

    names = {"causal": "causal", "padding": "padding", "window": f"window({args.window})"}
    parts: list[tuple[str, Tensor]] = []
    labels: tuple[str, ...] = ()
    n_keys = args.tokens or max(args.lengths or [0]) or TOKENS
    n_queries = args.queries or n_keys
    if args.file is not None:
        mask, form = read_mask(args.file, args.form)
        n_queries, n_keys = mask.shape[-2:]
        parts.append((f"{args.file.name} (read as {form} mask)", mask))
    if n_queries > n_keys and (args.queries or kinds):
        raise ValueError(f"--queries must be at most the number of tokens, got {n_queries} queries for {n_keys} tokens")
    if "causal" in kinds:
        parts.append((names["causal"], masks.causal(n_queries, n_keys).dense()))
    if "window" in kinds:
        parts.append((names["window"], masks.window(n_queries, args.window, n_keys)))
    if "padding" in kinds:
        if (n := len(args.lengths) * n_queries * n_keys) > MOST_TOKENS**2:
            raise ValueError(f"a mask may have at most {MOST_TOKENS**2:,} values, got {n:,}; give fewer --lengths")
        real = masks.padding(args.lengths, n_keys)[:, 0].expand(-1, n_queries, -1)
        labels = tuple(f"sequence {i} (length {n})" for i, n in enumerate(args.lengths, 1))
        parts.append((names["padding"], real))
    together = parts[0][1]
    for name, part in parts[1:]:
        if name == "padding" and together.dim() > 2:
            raise ValueError(f"--lengths cannot be combined with a file of shape {tuple(together.shape)}")
        together = together & part
    title = " & ".join(name for name, _ in parts)
    title = f"{title[0].upper()}{title[1:]} mask" if args.file is None else title
    first = 1 if args.file is not None and not kinds else n_keys - n_queries + 1
    return MaskView(together, title, labels, first, args.additive)


# `clearhead steps`: the example's matrices, or the user's own.


ABOUT_STEPS = """\
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


def steps(argv: Sequence[str]) -> None:
    args = steps_parser().parse(argv)
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
        from clearhead.models.steps_render import steps_latex

        print(steps_latex(steps), end="")
        return
    from clearhead.cli.options import console, show
    from clearhead.models.steps_render import steps_text

    show(steps_text(steps, console().width))
    if args.figure is not None:
        print(f"\nFigure: {printable(args.figure)}")


def steps_parser() -> Parser:
    options = Parser("clearhead steps", ABOUT_STEPS)
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
    from clearhead.models.mask_view import SUFFIXES, read_mask
    from clearhead.models.steps import EXAMPLE, EXAMPLE_HEADS, read_steps_file

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
