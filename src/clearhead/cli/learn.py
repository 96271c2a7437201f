"""`clearhead ask` answers questions of the course, `steps` computes self-attention step by step, `mask` shows masks."""

import argparse
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from clearhead.cli.options import Parser, console, reader, show
from clearhead.messages import did_you_mean, json_text, printable, unknown_name

if TYPE_CHECKING:
    from rich.text import Text
    from torch import Tensor

    from clearhead.course import Answer, Block
    from clearhead.models.mask_view import MaskView

MAX_WIDTH = 88
"""columns of an answer; longer lines are hard to read"""
CODE_INDENT = "    "
INLINE = re.compile(r"`(?P<code>[^`]+)`|\*\*(?P<bold>[^*]+)\*\*|\*(?P<italic>[^*]+)\*")

KINDS = {
    "causal": "no attention to later tokens",
    "padding": "no attention to the padding of sequences with these --lengths",
    "window": "attention to tokens at most --window N positions away, before or after",
}
DEFAULT_TOKENS, MAX_TOKENS = 5, 2048

MASK_DETAILS = """\
Rows are queries, columns are keys; 1 (True) = may attend, 0 (False) = may not.
Several masks are combined with a logical and.

masks:
{kinds}

mask files:
  .txt, .csv  one row per query: 1 0 0 (or True False False), or additive values:
              0 -inf -inf (or -10000)
  .npy        an array of such values, saved by numpy.save

More examples:
  clearhead mask causal --tokens 5 --additive -10000 --figure causal.png
  clearhead mask causal window --window 2 --tokens 8
  clearhead mask --file mymask.csv --figure mymask.svg"""


def ask(argv: Sequence[str]) -> None:
    options = Parser(
        "clearhead ask",
        "Answer a question about attention, transformers and vision transformers: in words, as a formula, and with "
        "numbers that the lab has measured. Without a question, all questions are listed.",
        usage="clearhead ask [QUESTION] [options]",
        examples=("clearhead ask layer-norm", "clearhead ask 28", "clearhead ask --json"),
    )
    options.add_argument("question", metavar="QUESTION", nargs="*", help="name or number of a question")
    options.add_argument("--json", action="store_true", help="machine-readable output")
    args = options.parse(argv)

    from clearhead.course import answers, find

    chosen = find(" ".join(args.question)) if args.question else None
    if args.json:
        print(json_text([asdict(answer) for answer in ([chosen] if chosen else answers().values())]))
        return
    target = console()
    width = min(target.width, MAX_WIDTH)
    show(answer_text(chosen, width, target.is_terminal) if chosen else question_list(width))


def question_list(width: int) -> "Text":
    from rich.text import Text

    from clearhead.course import answers, topics

    size = max(map(len, answers()))
    text = Text()
    for topic in topics():
        text.append(f"{topic.title}\n", "bold")
        for answer in topic.answers:
            first, *others = wrap(f"{answer.number:2}. {answer.question}", width - size - 4, subsequent_indent="    ")
            text.append(f"  {answer.slug:{size}}", "cyan").append(f"  {first}\n")
            text.append("".join(f"{'':{size + 4}}{line}\n" for line in others))
        text.append("\n")
    return text.append("Print an answer: clearhead ask layer-norm")


def answer_text(answer: "Answer", width: int, is_terminal: bool) -> "Text":
    """The answer as styled text. Without styles, code keeps its backticks."""
    from rich.text import Text

    text = Text()
    for line in wrap(f"{answer.number}. {answer.question}", width):
        text.append(f"{line}\n", "bold")
    text.append(f"{answer.topic}\n", "dim")
    for lines in paragraphs(answer, width):
        text.append("\n")
        for line in lines:
            text.append_text(Text(line) if line.startswith(CODE_INDENT) else styled(line, is_terminal)).append("\n")
    text.append("\nSee for yourself\n", "bold")
    return text.append("\n".join(f"  {command}" for command in answer.commands), "cyan")


def paragraphs(answer: "Answer", width: int) -> Iterator[list[str]]:
    """The wrapped lines of each part of an answer, without its figures."""
    for block in answer.body:
        if block.kind != "figure":
            yield block_lines(block, width)
    for evidence in answer.evidence:
        yield wrap_inline(f"**Lab:** `{evidence.claim}` {verdict_text(evidence.verdict)}. {evidence.text}", width)
    yield wrap_inline(f"**Misconception:** {answer.misconception}", width)


def verdict_text(verdict: str) -> str:
    """The verdict as a predicate: the claim holds, the claim is refuted."""
    return "holds" if verdict == "holds" else f"is {verdict}"


def block_lines(block: "Block", width: int) -> list[str]:
    match block.kind:
        case "formula" | "python":
            return [f"{CODE_INDENT}{line}".rstrip() for line in block.text.splitlines()]
        case "list":
            return [line for item in block.text.splitlines() for line in wrap_inline(f"- {item}", width, "  ")]
    return wrap_inline(block.text, width)


def wrap_inline(text: str, width: int, indent: str = "") -> list[str]:
    """Wraps Markdown text; a span of code or emphasis is not broken across lines."""
    glued = INLINE.sub(lambda match: match[0].replace(" ", "\0"), text)
    lines = wrap(glued, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def styled(line: str, is_terminal: bool) -> "Text":
    from rich.text import Text

    text, end = Text(), 0
    for match in INLINE.finditer(line):
        text.append(line[end : match.start()])
        if code := match["code"]:
            text.append(code if is_terminal else match[0], "cyan")
        else:
            text.append(match["bold"] or match["italic"], "bold" if match["bold"] else "italic")
        end = match.end()
    return text.append(line[end:])


def mask(argv: Sequence[str]) -> None:
    kinds = [arg for arg in argv if arg in KINDS]  # before, between or after options
    options = mask_parser()
    args = options.parse([arg for arg in argv if arg not in KINDS])
    if args.unknown:
        raise unknown_name("mask", args.unknown[0], [*KINDS, "--file PATH"])
    kinds += [kind for kind, value in (("window", args.window), ("padding", args.lengths)) if value is not None]
    kinds = [kind for kind in KINDS if kind in kinds]
    if not kinds and args.file is None:
        options.print_help()
        return
    check_mask_args(kinds, args)

    from clearhead.models.mask_view import mask_text

    view = build_mask(kinds, args)
    if args.figure is not None:
        from clearhead.drawing import save_figure
        from clearhead.models.mask_view import draw_mask

        save_figure(draw_mask(view), args.figure)
    if args.json:
        print(json_text(view.to_dict(), indent=None if view.mask.numel() > 400 else 2))
        return
    show(mask_text(view, console().width))
    if args.figure is not None:
        print(f"\nFigure: {printable(args.figure)}")


def mask_parser() -> Parser:
    kinds = "\n".join(f"  {kind:8}  {description}" for kind, description in KINDS.items())
    options = Parser(
        "clearhead mask",
        "Show which query may attend to which key, as numbers and as a figure.",
        usage="clearhead mask {causal,padding,window} ... [options]",
        examples=("clearhead mask causal --tokens 5", "clearhead mask causal padding --lengths 3 5"),
        details=MASK_DETAILS.format(kinds=kinds),
    )
    options.add_argument("unknown", nargs="*", help=argparse.SUPPRESS)
    integer = reader(int)
    options.add_argument("--tokens", type=integer, metavar="N", help=f"sequence length (default: {DEFAULT_TOKENS})")
    options.add_argument(
        "--queries", type=integer, metavar="N", help="use only the last N tokens as queries, as with a key-value cache"
    )
    options.add_argument("--window", type=integer, metavar="N", help="largest distance between query and key")
    options.add_argument("--lengths", type=integer, nargs="+", metavar="N", help="lengths of the padded sequences")
    options.add_argument("--file", type=Path, metavar="PATH", help="read a mask from a .txt, .csv or .npy file")
    options.add_argument(
        "--form",
        metavar="FORM",
        default="auto",
        help="meaning of the values in the file: bool (1 = may attend), additive (0 = may attend), torch (1 = may NOT "
        "attend, as in torch.nn.MultiheadAttention) or auto (default), which infers it from the values",
    )
    options.add_argument(
        "--additive",
        nargs="?",
        type=parse_mask_value,
        const=-math.inf,
        metavar="VALUE",
        help="show the values to add to the scores: 0, and VALUE for masked keys (default: -inf)",
    )
    options.add_argument("--figure", type=Path, metavar="PATH", help="save a figure as .png, .svg or .pdf")
    options.add_argument("--json", action="store_true", help="machine-readable output")
    return options


def parse_mask_value(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value < 0:
        raise argparse.ArgumentTypeError(f"must be a negative number or -inf, got {text!r}")
    return value


def check_mask_args(kinds: Sequence[str], args: argparse.Namespace) -> None:
    """Raises ValueError for arguments that are out of range or incompatible, before torch is imported."""
    for kind, option, value in (("window", "--window 2", args.window), ("padding", "--lengths 3 5", args.lengths)):
        if kind in kinds and value is None:
            raise ValueError(f"the {kind} mask needs {option.split()[0]}, such as {option}")
    if args.figure is not None:
        from clearhead.drawing import check_suffix

        check_suffix(args.figure)
    for name, number in (("--tokens", args.tokens), ("--queries", args.queries)):
        if number is not None and not 1 <= number <= MAX_TOKENS:
            raise ValueError(f"{name} must be from 1 to {MAX_TOKENS}, got {number}")
    if args.window is not None and not 0 <= args.window <= MAX_TOKENS:
        raise ValueError(f"--window must be from 0 to {MAX_TOKENS}, got {args.window}")
    longest = max(args.lengths or [0])
    if min(args.lengths or [0]) < 0 or longest > (args.tokens or MAX_TOKENS):
        raise ValueError(f"--lengths must be from 0 to {args.tokens or MAX_TOKENS} tokens, got {args.lengths}")
    if args.file is not None and (args.tokens is not None or args.queries is not None):
        raise ValueError("--file gives the number of tokens; leave out --tokens and --queries")
    if args.file is None and args.form != "auto":
        raise ValueError("--form needs --file")


def build_mask(kinds: Sequence[str], args: argparse.Namespace) -> "MaskView":
    """The logical and of the named masks and the mask in the file: (Q,K), or (B,Q,K) with padding."""
    from clearhead.models.mask_view import MaskView, read_mask
    from clearhead.nn import masks

    names = {"causal": "causal", "padding": "padding", "window": f"window({args.window})"}
    parts: list[tuple[str, Tensor]] = []
    labels: tuple[str, ...] = ()
    n_keys = args.tokens or max(args.lengths or [0]) or DEFAULT_TOKENS
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
        if (n := len(args.lengths) * n_queries * n_keys) > MAX_TOKENS**2:
            raise ValueError(f"a mask may have at most {MAX_TOKENS**2:,} values, got {n:,}; give fewer --lengths")
        padding = masks.padding(args.lengths, n_keys)[:, 0].expand(-1, n_queries, -1)
        labels = tuple(f"sequence {i} (length {n})" for i, n in enumerate(args.lengths, 1))
        parts.append((names["padding"], padding))
    combined = parts[0][1]
    for name, part in parts[1:]:
        if name == "padding" and combined.dim() > 2:
            raise ValueError(f"--lengths cannot be combined with a file of shape {tuple(combined.shape)}")
        combined = combined & part
    title = " & ".join(name for name, _ in parts)
    title = f"{title[0].upper()}{title[1:]} mask" if args.file is None else title
    first_query = 1 if args.file is not None and not kinds else n_keys - n_queries + 1
    return MaskView(combined, title, labels, first_query, args.additive)


# `clearhead steps`

STEPS_DETAILS = """\
The steps are: project, score, scale and softargmax, weight the values, sum.
Without --file, an example of three tokens is computed, small enough to be
checked by hand.

matrix files:
  .json {"x": [[1, 0], [0, 1]], "w_q": [[1, 0], [0, 1]], "w_k": ..., "w_v": ...}
        or "q", "k" and "v" instead of these; optionally "w_o", "heads": 2,
        "beta": 1, and "mask": "causal" or rows of 0 and 1
  .npz  numpy.savez("my.npz", x=..., w_q=..., w_k=..., w_v=...)

More examples:
  clearhead steps --heads 2 --figure steps.png
  clearhead steps --file my.json --mask mymask.txt --json
  clearhead steps --latex > steps.tex"""


def steps(argv: Sequence[str]) -> None:
    args = steps_parser().parse(argv)
    if args.figure is not None:
        from clearhead.drawing import check_suffix

        check_suffix(args.figure)

    from clearhead.models.steps import five_steps

    steps = five_steps(**steps_inputs(args))
    if args.figure is not None:
        from clearhead.drawing import save_figure
        from clearhead.models.steps_render import draw_steps

        save_figure(draw_steps(steps), args.figure)
    if args.json:
        print(json_text({"steps": [step.to_dict() for step in steps]}))
        return
    if args.latex:
        from clearhead.models.steps_render import steps_latex

        print(steps_latex(steps), end="")
        return
    from clearhead.models.steps_render import steps_text

    show(steps_text(steps, console().width))
    if args.figure is not None:
        print(f"\nFigure: {printable(args.figure)}")


def steps_parser() -> Parser:
    options = Parser(
        "clearhead steps",
        "Compute self-attention in five steps and print the numbers of each.",
        examples=("clearhead steps", "clearhead steps --mask causal --beta inf"),
        details=STEPS_DETAILS,
    )
    options.add_argument("--file", metavar="PATH", help="read the matrices from a .json or .npz file")
    options.add_argument("--heads", type=reader(int), metavar="N", help="number of heads (default: 1)")
    options.add_argument(
        "--mask", metavar="MASK", help="causal, or a mask in a .txt, .csv or .npy file (see clearhead mask --help)"
    )
    options.add_argument("--causal", action="store_true", help="short for --mask causal")
    options.add_argument(
        "--beta", type=parse_beta, metavar="X", help="inverse temperature; may be inf (default: 1/sqrt(head width))"
    )
    options.add_argument("--figure", type=Path, metavar="PATH", help="save a figure as .png, .svg or .pdf")
    output = options.add_mutually_exclusive_group()
    output.add_argument("--latex", action="store_true", help="print a LaTeX document")
    output.add_argument("--json", action="store_true", help="machine-readable output with unrounded numbers")
    return options


def steps_inputs(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `five_steps`: the matrices of the file or of the example, with the options applied."""
    from clearhead.models.mask_view import SUFFIXES, read_mask
    from clearhead.models.steps import EXAMPLE, EXAMPLE_HEADS, read_steps_file

    example = EXAMPLE if args.heads in (None, 1) else EXAMPLE_HEADS
    inputs: dict[str, Any] = dict(example) if args.file is None else read_steps_file(args.file)
    if args.causal or args.mask == "causal":
        inputs["causal"] = True
    elif args.mask is not None and not args.mask.lower().endswith(SUFFIXES):
        hint = did_you_mean(args.mask, ["causal"]) or f"; use causal or a file ({', '.join(SUFFIXES)})"
        raise LookupError(f"unknown mask {args.mask!r}{hint}")
    if args.mask not in (None, "causal"):
        inputs["mask"] = read_mask(args.mask)[0]
    overrides = {"heads": args.heads, "beta": args.beta}
    return inputs | {name: value for name, value in overrides.items() if value is not None}


def parse_beta(text: str) -> float:
    try:
        beta = float(text)
    except ValueError:
        beta = math.nan
    if math.isnan(beta):
        raise argparse.ArgumentTypeError(f"must be a number or inf, got {text!r}")
    return beta
