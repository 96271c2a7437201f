"""`clearhead shapes`: from the names and numbers on the command line to a config."""

import argparse
import json
from collections.abc import Callable, Sequence
from itertools import chain
from textwrap import wrap
from typing import Any

from clearhead.cli.overrides import add_overrides, overridden, reader
from clearhead.cli.parser import Parser
from clearhead.messages import unknown_name
from clearhead.models.config import AttentionConfig, Seq2SeqConfig, VisionConfig
from clearhead.models.presets import PRESETS


def attention() -> AttentionConfig:
    """One attention layer on its own."""
    return AttentionConfig(width=768)


NAMES: dict[str, Callable[[], Any]] = {"attention": attention, **PRESETS}

ABOUT = """\
Every tensor of a model in one forward pass: its shape with tokens as rows and
with tokens as columns, its parameters, and the multiply-adds it takes."""

EXAMPLES = """\
examples
  clearhead shapes attention --width 768 --heads 12 --tokens 5
  clearhead shapes attention --width 256 --key-width 64 --value-width 256
  clearhead shapes tiny_vit --width 256 --heads 4 --depth 8
  clearhead shapes gpt2_small --length 128 --batch 8 --json

clearhead shapes NAME --help lists what can be changed in a model."""


def run(argv: Sequence[str]) -> None:
    name, rest = split_name(argv)
    if name is None:
        parser("NAME").parse([arg for arg in rest if arg not in ("-h", "--help")])  # a mistake is one here too
        print(names_text())
        return
    config = NAMES[name]()
    options = parser(name)
    add_length(options, config)
    add_overrides(options, config, f"what you may change in {name}")
    args = options.parse(rest)
    config = overridden(config, args)

    from clearhead.models.shapes import shapes

    lengths = {key: value for key, value in vars(args).items() if key in ("length", "source_length")}
    seen = shapes(config, batch=args.batch, **lengths)
    if args.json:
        print(json.dumps({"name": name, **seen.to_dict()}, indent=2))
        return
    from clearhead.cli.terminal import console, show

    show(seen.table(args.conventions, every_block=args.every_block, width=console().width))


def split_name(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The model's name may stand anywhere: it is the first word that is one, or else the first word."""
    words = [i for i, arg in enumerate(argv) if not arg.startswith("-")]
    known = [i for i in words if argv[i].replace("-", "_") in NAMES]
    if not known and argv and not argv[0].startswith("-"):
        raise unknown_name("model", argv[0], NAMES)
    if not known:
        return None, list(argv)
    at = known[0]
    return argv[at].replace("-", "_"), [*argv[:at], *argv[at + 1 :]]


def parser(name: str) -> Parser:
    options = Parser(f"clearhead shapes {name}", ABOUT)
    options.add_argument("--batch", type=reader(int), default=1, metavar="N", help="examples (now 1)")
    sides = options.add_mutually_exclusive_group()
    for side, text in (("rows", "tokens as rows only"), ("columns", "tokens as columns only"), ("both", "both (now)")):
        sides.add_argument(f"--{side}", dest="conventions", action="store_const", const=side, default="both", help=text)
    options.add_argument("--every-block", action="store_true", help="blocks that equal the one before, too")
    options.add_argument("--json", action="store_true", help="everything, for programs")
    return options


def add_length(options: Parser, config: Any) -> None:
    names, text = ["--length"], "tokens in a sequence (now the context)"
    if isinstance(config, AttentionConfig):
        names, text = ["--length", "--tokens"], "tokens in a sequence (now 5)"
    if isinstance(config, VisionConfig):
        text = argparse.SUPPRESS  # follows from the image; who asks for one is told so
    options.add_argument(*names, type=reader(int), metavar="N", help=text)
    if isinstance(config, Seq2SeqConfig):
        options.add_argument("--source-length", type=reader(int), metavar="N", help="tokens in the source (now length)")


def names_text() -> str:
    size = max(map(len, NAMES))
    lines = [
        wrap(first_line(make), 80, initial_indent=f"  {name:{size}}  ", subsequent_indent=" " * (size + 4))
        for name, make in NAMES.items()
    ]
    return "\n".join(
        ["usage: clearhead shapes NAME [options]", "", ABOUT, "", "names", *chain.from_iterable(lines), "", EXAMPLES]
    )


def first_line(make: Callable[[], Any]) -> str:
    """Of its docstring, without the requirement that it stands for."""
    return (make.__doc__ or "").splitlines()[0]
