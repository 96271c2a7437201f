"""Generates the reference pages of the site from the code: commands, settings and the Python API.

The pages exist in the built site only, so they cannot be out of date; docs/site_hooks.py adds them to the build.
"""

import argparse
import ast
import io
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from unittest.mock import patch

from clearhead.cli import main as cli
from clearhead.cli.options import Parser, field_docs, format_value
from clearhead.data import Augmentation
from clearhead.tasks import TASKS
from clearhead.training.config import MODELS, OptimizerConfig, RunConfig, SnapshotConfig, TrainingConfig

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"

API = {
    "clearhead": "clearhead",
    "nn": "clearhead.nn",
    "masks": "clearhead.nn.masks",
    "models": "clearhead.models",
    "insight": "clearhead.insight",
    "data": "clearhead.data",
    "tasks": "clearhead.tasks",
    "training": "clearhead.training",
}
"""the pages of the API reference, and the package or module of each"""

OPTIONS_OF = {
    "train": (["mnist"],),
    "verify-resume": (["mnist"],),
    "shapes": (["attention"],),
    "data": (["get", "cifar10"], ["show", "mnist"]),
}
"""commands whose options depend on a name: the arguments with which their help lists those that all names share"""


COMMAND = rf"clearhead (?:{'|'.join(cli.COMMANDS)})\b(?: [A-Z]+\b)*(?: --[a-z][\w.-]*[\w])*"
OPTION = r"--[a-z][\w.-]*\w(?: (?:\d[\w.-]*\w|\d|true|false|[A-Z]+\b))?"
IN_PROSE = re.compile(f"{COMMAND}|{OPTION}")
"""commands and options, with their values, in the prose of a help text"""


class HelpRequested(BaseException):
    """Carries the parser whose help would have been printed."""


def help_of(argv: list[str]) -> Parser | str:
    """The parser behind `clearhead ARGV --help`, or the text of a help that is written by hand."""

    def capture(parser: Parser, file: object = None) -> None:
        raise HelpRequested(parser)

    out = io.StringIO()
    with patch.object(Parser, "print_help", capture), redirect_stdout(out):
        try:
            cli.run([*argv, "--help"])
        except HelpRequested as request:
            return request.args[0]
    return out.getvalue().strip()


def command_line() -> str:
    """One section for each group of commands and one for each command, as in `clearhead --help`."""
    sections = []
    for group, commands in cli.GROUPS.items():
        sections.append(f"## {group}\n")
        for name, command in commands.items():
            sections.append(f"### {name}\n\n{command_section(name, command.summary)}\n")
    return "\n".join(sections)


def command_section(name: str, summary: str) -> str:
    """Description, usage, examples, arguments and details of one command."""
    parser = help_of([name])
    parts = []
    if isinstance(parser, str):
        usage, _, text = parser.partition("\n\n")
        parts += [f"{summary}.", code(usage.removeprefix("usage: ")), code(text)]
    else:
        description, _, rest = (parser.description or "").partition("\n\nExamples:\n")
        parts += [" ".join(description.split()), code(str(parser.usage))]
        examples, _, from_python = rest.partition("\n\n")
        parts += [code(example_lines(examples), "bash")] * bool(examples) + [code(from_python)] * bool(from_python)
        parts += arguments(parser)
    for argv in OPTIONS_OF.get(name, ()):
        variant = help_of([name, *argv])
        assert isinstance(variant, Parser), argv
        parts += [f"Options of `clearhead {' '.join([name, *argv])}`:", *arguments(variant, ("options",))]
    if name in ("train", "verify-resume"):
        parts.append("Every [setting](settings.md) of a recipe is an option, too.")
    if isinstance(parser, Parser) and parser.epilog:
        parts += map(paragraph_or_code, parser.epilog.split("\n\n"))
    return "\n\n".join(parts)


def paragraph_or_code(text: str) -> str:
    """Prose of a help text as a paragraph; lists and examples, which are indented, as they are in the terminal."""
    is_prose = not any(line.startswith(" ") for line in text.splitlines())
    return IN_PROSE.sub(r"`\g<0>`", " ".join(text.split())) if is_prose else code(text)


def arguments(parser: Parser, groups: tuple[str, ...] = ()) -> Iterator[str]:
    """A table for each group of arguments, without --help."""
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if is_shown(action)]
        if actions and (not groups or group.title in groups):
            rows = [f"| {signature(action)} | {cell(expanded(action, parser))} |" for action in actions]
            yield "\n".join([f"| {group.title} | |", "|---|---|", *rows])


def is_shown(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)


def signature(action: argparse.Action) -> str:
    """`--epochs N`, or the name of a positional argument"""
    metavar = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else "")
    value = " ".join(metavar) if isinstance(metavar, tuple) else str(metavar)
    if action.nargs in ("+", "*"):
        value += "..."
    elif action.nargs == "?" and value:
        value = f"[{value}]"
    if not action.option_strings:
        return f"`{cell(value or action.dest)}`"
    takes_value = action.nargs != 0
    value = value or (action.dest.upper() if takes_value else "")
    return ", ".join(f"`{cell(f'{option} {value}'.strip())}`" for option in action.option_strings)


def expanded(action: argparse.Action, parser: Parser) -> str:
    return argparse.HelpFormatter(parser.prog)._expand_help(action) if action.help else ""


SETTINGS = """\
A run is described by one `RunConfig`, which is stored as `config.json`. On the command line, a setting is an option
named after its path, such as `--training.batch-size 64`; in Python, `clearhead.train` takes it in
`changes={"training.batch_size": 64}`. The tables list the defaults of the classes; a recipe sets its own, which
`clearhead train RECIPE --help` lists.
"""
MODEL_SETTINGS = """\
The `kind` of the model selects one of these configs. Sizes that the data determines, such as `num_classes`, are not
options of `clearhead train`.
"""


def settings() -> str:
    """A table for each config: the fields, their types, their defaults and their docstrings."""
    parts = ["# Settings\n", SETTINGS, "## run\n", table_of(RunConfig, "")]
    for name, config in {"training": TrainingConfig, "optimizer": OptimizerConfig, "snapshots": SnapshotConfig}.items():
        parts += [f"## {name}\n", f"{first_paragraph(config)}\n", table_of(config, f"{name}.")]
    parts += ["## model\n", MODEL_SETTINGS]
    for kind, config in MODELS.items():
        parts += [f"### {kind}\n", f"{first_paragraph(config)}\n", table_of(config, "model.")]
    parts += ["## data\n", "Each task has its own options.\n"]
    for name, task in TASKS.items():
        parts += [f"### {name}\n", f"{first_paragraph(task)}\n", table_of(task, "data.")]
    parts += [
        "## data.augmentation\n",
        f"{first_paragraph(Augmentation)}\n",
        table_of(Augmentation, "data.augmentation."),
    ]
    return "\n".join(parts)


def table_of(config: Any, prefix: str) -> str:
    """The fields of a dataclass; nested configs have tables of their own."""
    types, docs = get_type_hints(config), field_docs(config)
    rows = []
    for field in fields(config):
        if is_dataclass(types[field.name]) or field.name in ("model", "data"):
            continue
        default = "required" if field.default is MISSING else f"`{cell(format_value(field.default))}`"
        meaning = cell(" ".join(docs.get(field.name, "").split()))
        rows.append(f"| `{prefix}{field.name}` | {cell(type_name(types[field.name]))} | {default} | {meaning} |")
    return "\n".join(["| setting | type | default | meaning |", "|---|---|---|---|", *rows]) + "\n"


def type_name(kind: Any) -> str:
    """int, number, or the choices of a Literal"""
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) in (Union, UnionType):
        return " or ".join("none" if part is NoneType else type_name(part) for part in get_args(kind))
    if get_origin(kind) is tuple:
        return "pair of " + type_name(get_args(kind)[0])
    return {"float": "number", "str": "text", "bool": "yes or no"}.get(kind.__name__, kind.__name__)


def first_paragraph(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def api(page: str) -> str:
    """The page of a package. A name is documented once, in the smallest package that exports it; `clearhead` links
    the others."""
    package = API[page]
    names = [(module, name) for module, name in public_names(package) if not is_module(f"{module}.{name}")]
    if not names:
        options = (
            "show_root_heading: false\n      show_root_toc_entry: false\n      filters: ['!^_', '!^(check|kernel)_']"
        )
        return f"# {package}\n\n::: {package}\n    options:\n      {options}\n"
    summary_only = "members: false\n      show_root_heading: false\n      show_root_toc_entry: false"
    parts = [f"# {package}\n", f"::: {package}\n    options:\n      {summary_only}\n"]
    elsewhere = {entry for other in API.values() if other.startswith(f"{package}.") for entry in public_names(other)}
    if linked := [entry for entry in names if entry in elsewhere]:
        rows = [f"| [`{package}.{name}`][{module}.{name}] | {summary(module, name)} |" for module, name in linked]
        parts.append("\n".join(["| name | summary |", "|---|---|", *rows]) + "\n")
    parts += [
        f"::: {module}.{name}\n    options:\n      heading_level: 2\n"
        for module, name in names
        if (module, name) not in elsewhere
    ]
    return "\n".join(parts)


def public_names(package: str) -> list[tuple[str, str]]:
    """(module, name) of what a package exports lazily; the imports for type checkers say where it is defined."""
    path = SOURCE.joinpath(*package.split("."), "__init__.py")
    if not path.exists():
        return []
    exported = getattr(import_module(package), "__all__", ())
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return [
        (node.module, alias.name)
        for node in imports
        for alias in node.names
        if node.module and (alias.asname or alias.name) in exported
    ]


def summary(module: str, name: str) -> str:
    """The first line of the docstring of a function or class."""
    tree = ast.parse(SOURCE.joinpath(*module.split(".")).with_suffix(".py").read_text())
    (node,) = [node for node in tree.body if getattr(node, "name", None) == name]
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    return cell((ast.get_docstring(node) or "").partition("\n")[0])


def is_module(name: str) -> bool:
    path = SOURCE.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def code(text: str, language: str = "text") -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def example_lines(text: str) -> str:
    """Examples without their indentation; an explanation after two or more spaces becomes a comment."""
    return "\n".join(re.sub(r"(?<=\S)( {2,})(?=\w)", r"\1# ", line.strip()) for line in text.splitlines())


def cell(text: str) -> str:
    """Text inside a table of Markdown."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|")
