"""Options from the fields of a config: --width 256, --norm post, --image-size 32x64, --no-output-projection; of a
config of configs by their path: --training.steps 100, --data.augmentation.flip true.

The config checks the values itself when it is made; here text only becomes a number or a word.
"""

import argparse
import ast
import inspect
from collections.abc import Collection
from dataclasses import fields, is_dataclass, replace
from textwrap import dedent
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from clearhead.cli.parser import Parser

ALIASES = {"n_heads": ("heads",)}


def add_overrides(parser: Parser, config: Any, title: str, path: str = "", without: Collection[str] = ()) -> None:
    """An option for each field; its help shows the words below the field and the value it has now. Fields are left out
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
        text = " ".join(filter(None, [words.get(field.name, ""), f"(now {show(value)})"])).replace("%", "%%")
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


def show(value: Any) -> str:
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
