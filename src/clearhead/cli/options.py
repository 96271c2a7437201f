"""An argparse parser whose mistakes are one line: the rule, what came, what to do."""

import argparse
import ast
import difflib
import inspect
import os
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from textwrap import dedent, wrap
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from rich.console import Console, Group, RenderableType

from clearhead import messages
from clearhead.messages import printable, safe_console

SYNONYMS = {
    "learning-rate": "lr",
    "bs": "batch-size",
    "wd": "weight-decay",
    "dtype": "precision",
    "layers": "depth",
    "n-layers": "depth",
    "num-layers": "depth",
    "dim": "width",
    "d-model": "width",
    "embed-dim": "width",
    "hidden-size": "width",
    "num-heads": "num-heads",
    "num-classes": "num-classes",
}
"""options as other libraries call them, by the last part of ours"""


class Parser(argparse.ArgumentParser):
    """Raises ValueError instead of printing its usage and leaving; names the nearest option to an unknown one."""

    def __init__(
        self, prog: str, description: str, *, usage: str = "", examples: Sequence[str] = (), details: str = ""
    ):
        """The help is: usage, one sentence and its examples, the options, details."""
        shown = "\n".join(["Examples:", *(f"  {example}" for example in examples)]) if examples else ""
        super().__init__(
            prog=prog,
            usage=usage or f"{prog} [options]",
            description="\n\n".join(filter(None, ["\n".join(wrap_lines(description)), shown])),
            epilog=details,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=30),
        )
        self._negative_number_matcher = re.compile(r"-(inf|\.?\d)", re.ASCII)  # --beta -inf, --beta -1e5

    def add_run(self) -> None:
        self.add_argument("run", metavar="RUN", help="path of a run, or its name in runs/")

    def add_figure(self, default: str) -> None:
        self.add_argument("--out", metavar="FILE", type=Path, help=f"a .png, .svg or .pdf file (default: {default})")

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message.removeprefix('argument ')}; see {self.prog} --help")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        for arg in argv:
            option, _, value = arg.partition("=")
            if option.startswith("--") and value == "--":  # which argparse would drop, and give the option a list
                self.error(f"{option}: expected one argument, got '--'")
        args, unknown = self.parse_known_args([dashed(arg) for arg in argv])
        if unknown:
            raise ValueError(self.describe_unknown(unknown[0]))
        return args

    def describe_unknown(self, arg: str) -> str:
        command = self.prog.removeprefix("clearhead ")
        if not arg.startswith("-"):
            return f"{command} takes options, --name value, got {arg!r}; see {self.prog} --help"
        option = arg.partition("=")[0]
        known = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        known.remove("--help")  # no suggestion for --heads
        near = nearest(option, known)
        hint = f"did you mean {near}?" if near else f"see {self.prog} --help"
        return f"{command} has no option {option}; {hint}"


def wrap_lines(text: str) -> list[str]:
    """A single long line is wrapped; text that has lines already keeps them."""
    return text.splitlines() if "\n" in text else wrap(text, 80)


def nearest(option: str, known: Sequence[str]) -> str | None:
    """The option most like it; for one without its group (--lr for --optimizer.lr), or with another's (--training.seed
    for --seed), by the last part of the name."""
    by_end = {last_part(name): name for name in reversed(known)}
    end = last_part(option)
    if end in by_end:
        return by_end[end]
    if SYNONYMS.get(end) in by_end:
        return by_end[SYNONYMS[end]]
    if near := difflib.get_close_matches(option, known, n=1, cutoff=0.7):
        return near[0]
    if (by_last := messages.closest_name(end, by_end)) is not None:
        return by_end[by_last]
    by_name = {name.removeprefix("--"): name for name in known}  # the dashes, which all have, are no resemblance
    return next((by_name[near] for near in difflib.get_close_matches(option.removeprefix("--"), by_name, n=1)), None)


def last_part(option: str) -> str:
    """--optimizer.lr -> lr"""
    return option.rpartition(".")[2].removeprefix("--")


def dashed(arg: str) -> str:
    """--num_heads=4 is --num-heads=4"""
    option, equals, value = arg.partition("=")
    return option.replace("_", "-") + equals + value if option.startswith("--") else arg


# Options from the fields of a config: --width 256, --norm post, --image-size 32x64, --no-output-projection; of a
# config of configs by their path: --training.steps 100, --data.augmentation.flip true.
#
# The config checks the values itself when it is made; here text only becomes a number or a word.


ALIASES = {"num_heads": ("heads",)}


def add_overrides(parser: Parser, config: Any, title: str, path: str = "", without: Collection[str] = ()) -> None:
    """An option for each field; its help shows the words below the field and its default. Fields are left out
    by their paths."""
    group = parser.add_argument_group(title)
    types, words = get_type_hints(type(config)), field_words(type(config))
    for field in fields(config):
        value, kind = getattr(config, field.name), types[field.name]
        if path + field.name in without:
            continue
        if is_dataclass(value):
            add_overrides(parser, value, path + field.name, f"{path}{field.name}.", without)
            continue
        text = " ".join(filter(None, [words.get(field.name, ""), f"(default: {show_value(value)})"])).replace("%", "%%")
        what: dict[str, Any] = {"dest": path + field.name, "default": argparse.SUPPRESS}
        names = ["--" + dashes(path + name) for name in (field.name, *ALIASES.get(field.name, ()))]
        if kind is bool:
            group.add_argument(*names, type=yes_or_no, nargs="?", const=True, metavar="true|false", help=text, **what)
            no = f"--no-{dashes(path + field.name)}"
            group.add_argument(no, action="store_const", const=False, help=argparse.SUPPRESS, **what)
        else:
            group.add_argument(*names, type=reader(kind), metavar=metavar(kind), help=text, **what)


def overridden(config: Any, args: argparse.Namespace) -> Any:
    """The config with the fields that were given."""
    names = {field.name for field in fields(config)}
    return replace(config, **{name: value for name, value in vars(args).items() if name in names})


def given(config: Any, args: argparse.Namespace) -> dict[str, Any]:
    """What was given for a config of configs, by path: {"training.steps": 100}."""
    names = {field.name for field in fields(config)}
    return {path: value for path, value in vars(args).items() if path.partition(".")[0] in names}


def dashes(name: str) -> str:
    return name.replace("_", "-")


def yes_or_no(text: str) -> bool:
    if text.lower() not in ("true", "false", "yes", "no"):
        raise argparse.ArgumentTypeError(f"must be true or false, got {text!r}")
    return text.lower() in ("true", "yes")


def reader(kind: Any) -> Any:
    """From text to one of the kinds that a field may have."""
    kinds = get_args(kind) or (kind,)

    def read(text: str) -> Any:
        if get_origin(kind) is Literal or kind is str:
            return text
        if NoneType in kinds and text == "none":
            return None
        try:
            if float in kinds:
                return float(text)
            if any(get_origin(k) is tuple for k in kinds) and "x" in text:
                height, width = text.split("x")
                return int(height), int(width)
            return int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {describe(kind)}, got {text!r}") from None

    return read


def describe(kind: Any) -> str:
    kinds = get_args(kind) or (kind,)
    if float in kinds:
        words = "a number"
    elif any(get_origin(k) is tuple for k in kinds):
        words = "a whole number, or two as 32x64"
    else:
        words = "a whole number"
    return f"{words}, or none" if NoneType in kinds else words


def metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    if kind is str:
        return "TEXT"
    return "X" if float in (get_args(kind) or (kind,)) else "N"


def show_value(value: Any) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case (height, width):
            return f"{height}x{width}"
        case "":
            return "none"
    return str(value)


def field_words(kind: type) -> dict[str, str]:
    """The string below each field of a dataclass and of what it is derived from."""
    words: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        (tree,) = ast.parse(dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for statement, below in zip(tree.body, tree.body[1:], strict=False):
            match statement, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    words[name] = text
    return words


# Where output goes: as wide as the terminal, with colours only there; as wide as it likes in a file or a pipe.


FILE_WIDTH = 120
NARROWEST = 78
"""below it a table would lose its numbers; long lines that go on in the next are the lesser evil"""
STATES = {"running": "is still training", "interrupted": "was interrupted", "diverged": "diverged"}
"""of a run that has not been trained to its end"""


def console() -> Console:
    is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    return safe_console(width=max(NARROWEST, safe_console().width) if is_sized else FILE_WIDTH)


def say(line: object) -> None:
    """A line with names or paths of others in it: a line break in one of them is escaped too."""
    print(printable(line))


def warn(message: str) -> None:
    """A line beside the output, which programs do not read."""
    print(f"warning: {printable(message)}", file=sys.stderr)


def warn_if_unfinished(run: Path, step: int) -> None:
    """Numbers of a run that is still training, or was stopped, are not yet those of its recipe."""
    from clearhead.cli.runs import summarise

    known = summarise(run)
    if known.state in ("running", "interrupted", "diverged"):
        end = f" of {known.total_steps:,}" if known.total_steps else ""
        at = f"at step {known.step:,}{end}"
        warn(f"{run} {STATES[known.state]} {at}; its best checkpoint so far is that of step {step:,}")


def show(renderable: RenderableType) -> None:
    """Prints it; lines end where their text ends."""
    target = console()
    with target.capture() as captured:
        target.print(Group(renderable))  # a Text alone would be wrapped even where it says not to
    target.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))
