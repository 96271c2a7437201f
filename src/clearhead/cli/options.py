"""Shared by all commands: a parser with one-line errors, options from config fields, and terminal output.

`add_overrides` turns the fields of a config into options: --width 256, --image-size 32x64, --no-output-projection. The
fields of nested configs are named by their path: --training.steps 100, --data.augmentation.flip true. Options only
convert text to a value; the config validates it when it is created.
"""

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
    "n-heads": "num-heads",
    "n-classes": "num-classes",
}
"""names used by other libraries -> the last part of the corresponding option"""

ALIASES = {"num_heads": ("heads",)}
"""shorter names of fields"""

FILE_WIDTH = 120
"""columns of output to a file or a pipe"""
MIN_WIDTH = 78
"""columns; on a narrower terminal lines wrap, because a narrower table would cut off its numbers"""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ValueError instead of exiting, and suggests the closest known option."""

    def __init__(
        self, prog: str, description: str, *, usage: str = "", examples: Sequence[str] = (), details: str = ""
    ):
        """The help shows usage, description, examples, options and details, in this order."""
        example_lines = "\n".join(["Examples:", *(f"  {example}" for example in examples)]) if examples else ""
        super().__init__(
            prog=prog,
            usage=usage or f"{prog} [options]",
            description="\n\n".join(filter(None, ["\n".join(wrap_lines(description)), example_lines])),
            epilog=details,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=30),
        )
        self.other_names: dict[str, str] = {}
        """names that are accepted in place of an option, but not shown in the help: {"--steps": "--training.steps"}"""
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
            if option.startswith("--") and value == "--":  # argparse would drop it and store a list
                self.error(f"{option}: expected one argument, got '--'")
        args, unknown = self.parse_known_args([self.option_name(with_dashes(arg)) for arg in argv])
        if unknown:
            raise ValueError(self.describe_unknown(unknown[0]))
        return args

    def option_name(self, arg: str) -> str:
        """--steps=5 -> --training.steps=5, where that is the option's own name."""
        option, equals, value = arg.partition("=")
        return self.other_names.get(option, option) + equals + value

    def describe_unknown(self, arg: str) -> str:
        """An error message for an unknown argument, with the closest option."""
        command = self.prog.removeprefix("clearhead ")
        if not arg.startswith("-"):
            return f"{command}: unexpected argument {arg!r}; see {self.prog} --help"
        option = arg.partition("=")[0]
        known = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        known.remove("--help")  # or it would be suggested for --heads
        closest = closest_option(option, known)
        hint = f"did you mean {closest}?" if closest else f"see {self.prog} --help"
        return f"{command} has no option {option}; {hint}"


def wrap_lines(text: str) -> list[str]:
    """Wraps a single long line; text with line breaks keeps them."""
    return text.splitlines() if "\n" in text else wrap(text, 80)


def closest_option(option: str, known: Sequence[str]) -> str | None:
    """The closest known option, or None.

    An option without its group (--lr for --optimizer.lr) or with another group (--training.seed for --seed) is
    recognized by the last part of its name.
    """
    by_end = {last_part(name): name for name in reversed(known)}
    end = last_part(option)
    if end in by_end:
        return by_end[end]
    if SYNONYMS.get(end) in by_end:
        return by_end[SYNONYMS[end]]
    if matches := difflib.get_close_matches(option, known, n=1, cutoff=0.7):
        return matches[0]
    if (closest_end := messages.closest_name(end, by_end)) is not None:
        return by_end[closest_end]
    by_name = {name.removeprefix("--"): name for name in known}  # without dashes, which would count as similarity
    matches = difflib.get_close_matches(option.removeprefix("--"), by_name, n=1)
    return by_name[matches[0]] if matches else None


def last_part(option: str) -> str:
    """--optimizer.lr -> lr"""
    return option.rpartition(".")[2].removeprefix("--")


def with_dashes(arg: str) -> str:
    """--num_heads=4 -> --num-heads=4"""
    option, equals, value = arg.partition("=")
    return option.replace("_", "-") + equals + value if option.startswith("--") else arg


def add_overrides(parser: Parser, config: Any, title: str, path: str = "", without: Collection[str] = ()) -> None:
    """Adds an option for each field, with its docstring and its default as help, except the paths in `without`."""
    group = parser.add_argument_group(title)
    types, docs = get_type_hints(type(config)), field_docs(type(config))
    for field in fields(config):
        value, kind = getattr(config, field.name), types[field.name]
        if path + field.name in without:
            continue
        if is_dataclass(value):
            add_overrides(parser, value, f"{path}{field.name} settings", f"{path}{field.name}.", without)
            continue
        text = " ".join(filter(None, [docs.get(field.name, ""), f"(default: {format_value(value)})"])).replace(
            "%", "%%"
        )
        common: dict[str, Any] = {"dest": path + field.name, "default": argparse.SUPPRESS}
        names = ["--" + dashes(path + name) for name in (field.name, *ALIASES.get(field.name, ()))]
        if kind is bool:
            group.add_argument(
                *names, type=parse_bool, nargs="?", const=True, metavar="true|false", help=text, **common
            )
            no = f"--no-{dashes(path + field.name)}"
            group.add_argument(no, action="store_const", const=False, help=argparse.SUPPRESS, **common)
        else:
            group.add_argument(*names, type=reader(kind), metavar=metavar(kind), help=text, **common)


def apply_overrides(config: Any, args: argparse.Namespace) -> Any:
    """The config with the fields that were set by options."""
    names = {field.name for field in fields(config)}
    return replace(config, **{name: value for name, value in vars(args).items() if name in names})


def get_overrides(config: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a nested config that were set by options, by path: {"training.steps": 100}."""
    names = {field.name for field in fields(config)}
    return {path: value for path, value in vars(args).items() if path.partition(".")[0] in names}


def dashes(name: str) -> str:
    return name.replace("_", "-")


def parse_bool(text: str) -> bool:
    if text.lower() not in ("true", "false", "yes", "no"):
        raise argparse.ArgumentTypeError(f"must be true or false, got {text!r}")
    return text.lower() in ("true", "yes")


def reader(kind: Any) -> Any:
    """A function that converts text to the type of a field."""
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
            raise argparse.ArgumentTypeError(f"must be {describe_type(kind)}, got {text!r}") from None

    return read


def describe_type(kind: Any) -> str:
    kinds = get_args(kind) or (kind,)
    if float in kinds:
        text = "a number"
    elif any(get_origin(k) is tuple for k in kinds):
        text = "an integer, or two such as 32x64"
    else:
        text = "an integer"
    return f"{text}, or none" if NoneType in kinds else text


def metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    if kind is str:
        return "TEXT"
    return "X" if float in (get_args(kind) or (kind,)) else "N"


def format_value(value: Any) -> str:
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


def field_docs(kind: type) -> dict[str, str]:
    """The docstring below each field of a dataclass and of its base classes."""
    docs: dict[str, str] = {}
    for base in reversed([base for base in kind.__mro__ if is_dataclass(base)]):
        (tree,) = ast.parse(dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for statement, below in zip(tree.body, tree.body[1:], strict=False):
            match statement, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = text
    return docs


def console() -> Console:
    """A console as wide as the terminal; to a file or a pipe, FILE_WIDTH columns without colors."""
    is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    return safe_console(width=max(MIN_WIDTH, safe_console().width) if is_sized else FILE_WIDTH)


def say(line: object) -> None:
    """Prints one line; control characters and line breaks in names and paths are escaped."""
    print(printable(line))


def warn(message: str) -> None:
    """Prints a warning to stderr."""
    print(f"warning: {printable(message)}", file=sys.stderr)


def warn_if_unfinished(run: Path, step: int) -> None:
    """Warns if the training of a run has not finished, so that its results are not final."""
    from clearhead.training.run_summary import summarize

    if state := summarize(run).unfinished:
        warn(f"{run} {state}; using its best checkpoint so far, of step {step:,}")


def show(renderable: RenderableType) -> None:
    """Prints a rich object without trailing spaces."""
    target = console()
    with target.capture() as captured:
        target.print(Group(renderable))  # rich wraps a bare Text even with no_wrap
    target.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))
