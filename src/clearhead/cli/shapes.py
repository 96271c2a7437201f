"""`clearhead shapes`: the tensors of a forward pass of a preset, a recipe, a run or the user's own module."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from clearhead.cli.options import Parser, add_overrides, apply_overrides, reader
from clearhead.messages import closest_name, json_text
from clearhead.models.config import AttentionConfig, Seq2SeqConfig, VisionConfig
from clearhead.models.presets import PRESETS
from clearhead.recipes import RECIPES

if TYPE_CHECKING:
    from clearhead.models.shapes import Shapes


def attention() -> AttentionConfig:
    """A single attention layer."""
    return AttentionConfig(width=768)


MODELS: dict[str, Callable[[], Any]] = {"attention": attention, **PRESETS}
SOURCES = ("preset", "recipe", "run")
RUNS = "runs"

ABOUT = """\
List every tensor of a forward pass: its shape, with tokens as rows and with
tokens as columns, its parameters, and its multiply-adds."""

DETAILS = """\
More examples:
  clearhead shapes attention --width 256 --key-width 64 --value-width 256
  clearhead shapes vit_tiny --width 256 --heads 4 --depth 8
  clearhead shapes gpt2_small --length 128 --batch 8 --json
  clearhead shapes runs/mine
  clearhead shapes mymodel.py:GPT
  clearhead shapes mymodel.py:Encoder --input 2,16,64

clearhead shapes NAME --help lists the settings of a model."""


def shapes(argv: Sequence[str]) -> None:
    name, rest = split_name(argv)
    if name is None:
        parser("NAME").parse([arg for arg in rest if arg not in ("-h", "--help")])  # reports invalid options
        print(overview())
        return
    if is_module(name):
        show_module(name, rest)
        return
    source, rest = split_source(rest)
    source, config, notes = resolve(name, source)
    options = parser(name)
    add_length(options, config)
    add_overrides(options, config, f"settings of {name}")
    args = options.parse(rest)
    config = apply_overrides(config, args)

    from clearhead.models.shapes import shapes

    lengths = {key: value for key, value in vars(args).items() if key in ("length", "source_length")}
    display(shapes(config, batch=args.batch, **lengths), args, {"name": name, "source": source}, notes)


def show_module(name: str, rest: Sequence[str]) -> None:
    """Shows the user's own module, for inputs of the given sizes, or for inputs inferred from its forward()."""
    options = parser(name)
    options.add_argument("--length", type=reader(int), metavar="N", help="tokens per sequence (default: 7)")
    options.add_argument(
        "--width", type=reader(int), metavar="N", help="pass features of this width instead of token ids"
    )
    options.add_argument(
        "--input",
        type=parse_size,
        action="append",
        default=[],
        metavar="B,L,...",
        help="size of an input; repeat the option for several inputs",
    )
    options.add_argument(
        "--dtype",
        action="append",
        default=[],
        metavar="{float,long,bool}",
        help="dtype of each --input (default: long for a B,L input of a module with an nn.Embedding, else float)",
    )
    args = options.parse(rest)
    if args.dtype and not args.input:
        raise ValueError("--dtype needs --input, such as --input 2,16")

    from clearhead.insight.doctor.loading import load
    from clearhead.insight.module_shapes import module_shapes
    from clearhead.validation import check_positive

    check_positive(batch=args.batch, **{key: n for key in ("length", "width") if (n := getattr(args, key)) is not None})
    with redirect_stdout(sys.stderr):  # keeps the output of the user's module apart from the table
        module = load(name, Path.cwd())
        try:
            summary = module_shapes(
                module, batch=args.batch, width=args.width, length=args.length, sizes=args.input, dtypes=args.dtype
            )
        except SystemExit:
            raise ValueError(f"forward() of {name} exits Python") from None
    inputs = [f"{tensor.name} {list(tensor.rows)}" for tensor in summary.tensors if tensor.operation == "input"]
    display(summary, args, {"name": name, "source": "module"}, [f"{name}, called with {', '.join(inputs)}"])


def display(summary: "Shapes", args: argparse.Namespace, header: dict[str, str], notes: Sequence[str]) -> None:
    """Prints the notes and the table, or with --json the header and all tensors."""
    if args.json:
        print(json_text({**header, **summary.to_dict()}))
        return
    from clearhead.cli.options import console, show

    for note in notes:
        print("\n".join(wrap(note, console().width)))
    print(end="\n" if notes else "")
    show(summary.table(args.conventions, every_block=args.every_block, width=console().width))


def split_name(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The name of the model and the other arguments: the first argument that names a model, else the first argument."""
    known = [i for i, arg in enumerate(argv) if not arg.startswith("-") and names_model(arg)]
    if not known and argv and not argv[0].startswith("-"):
        known = [0]
    if not known:
        return None, list(argv)
    index = known[0]
    return argv[index], [*argv[:index], *argv[index + 1 :]]


def names_model(arg: str) -> bool:
    return arg.replace("-", "_") in MODELS or arg.replace("_", "-") in RECIPES or is_module(arg) or "/" in arg


def is_module(name: str) -> bool:
    """FILE.py:NAME or package.file:NAME"""
    return ":" in name or name.endswith(".py")


def split_source(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of --as, which is needed before the other options can be parsed, and the other arguments."""
    options = Parser("clearhead shapes", ABOUT)
    options.add_argument("--as", dest="source", metavar="|".join(SOURCES))
    index = next((i for i, arg in enumerate(argv) if arg == "--as" or arg.startswith("--as=")), None)
    if index is None:
        return None, list(argv)
    end = index + (1 if "=" in argv[index] else 2)
    source = options.parse(argv[index:end]).source
    if source not in SOURCES:
        raise ValueError(f"--as must be one of {', '.join(SOURCES)}, got {source!r}")
    return source, [*argv[:index], *argv[end:]]


def resolve(name: str, source: str | None) -> tuple[str, Any, list[str]]:
    """The source of a name, the config of its model, and notes for the user.

    Unless `source` is given, a preset takes precedence over a recipe of the same name, and a recipe over a run.
    """
    preset, recipe, run_path = name.replace("-", "_"), name.replace("_", "-"), run_folder(name)
    exists = {"preset": preset in MODELS, "recipe": recipe in RECIPES, "run": run_path is not None}
    available = [candidate for candidate in SOURCES if exists[candidate]]
    if source is not None and source not in available:
        others = f"; {name} is a {' and a '.join(available)}" if available else ""
        raise LookupError(f"there is no {source} {name!r}{others}")
    if not available:
        raise LookupError(unknown_model(name))
    source = source or available[0]
    alternatives = [candidate for candidate in available if candidate != source]
    if source == "preset":
        config = MODELS[preset]()
        if "recipe" in alternatives and RECIPES[recipe].make().model == config:
            alternatives.remove("recipe")  # both are the same model
        notes = [f"{preset}: the preset"] if alternatives else []
    elif source == "recipe":
        run_config = RECIPES[recipe].make()
        config, notes = run_config.model, [f"{recipe}: the model of the recipe"]
        if (task := run_config.task).required:
            sizes = ", ".join(f"{field}={getattr(config, field)}" for field in task.derived)
            notes[0] += f", with {sizes}, which depend on your data"
    else:
        assert run_path is not None
        config, notes = config_of_run(run_path), [f"{run_path}: the model of the run"]
    described = {"preset": "a preset", "recipe": "a recipe", "run": f"a run, {run_path}"}
    notes += [f"{name} is also {described[other]}: clearhead shapes {name} --as {other}" for other in alternatives]
    return source, config, notes


def run_folder(name: str) -> Path | None:
    """The folder of a run, given by its path or its name in runs/; None if there is no such run."""
    for path in (Path(name), Path(RUNS) / name):
        if (path / "config.json").is_file():
            return path
    return None


def config_of_run(path: Path) -> Any:
    from clearhead.models.config import ModuleConfig
    from clearhead.training.config import RunConfig
    from clearhead.training.run_directory import RunDirectory

    model = RunConfig.from_dict(RunDirectory.open(path).config).model
    if isinstance(model, ModuleConfig):
        raise ValueError(f"{path} has a model of your own; try clearhead shapes FILE.py:{model.name}")
    return model


def unknown_model(name: str) -> str:
    """An error message with the closest name and all known names."""
    if "/" in name:
        from clearhead.training.run_directory import no_run

        return str(no_run(Path(name)))
    closest = closest_name(name, [*MODELS, *RECIPES])
    hint = f"did you mean {closest}? Choose from" if closest else "choose from"
    return (
        f"unknown model {name!r}; {hint} the presets {', '.join(MODELS)}, the recipes {', '.join(RECIPES)}, "
        "a run (runs/NAME) or your own module (FILE.py:NAME)"
    )


def parse_size(text: str) -> tuple[int, ...]:
    """2,16,64 or 2x16x64"""
    is_size = re.fullmatch(r"\d+([,x]\d+)*", text, re.ASCII)
    sizes = [int(part) for part in re.split("[,x]", text)] if is_size else []
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"must be positive integers, such as 2,16, got {text!r}")
    return tuple(sizes)


def parser(name: str) -> Parser:
    options = Parser(f"clearhead shapes {name}", ABOUT)
    options.add_argument("--batch", type=reader(int), default=1, metavar="N", help="batch size (default: 1)")
    conventions = options.add_mutually_exclusive_group()
    for convention, text in (
        ("rows", "show shapes with tokens as rows only"),
        ("columns", "show shapes with tokens as columns only"),
        ("both", "show both (default)"),
    ):
        conventions.add_argument(
            f"--{convention}", dest="conventions", action="store_const", const=convention, default="both", help=text
        )
    options.add_argument("--every-block", action="store_true", help="list blocks that are equal to the previous one")
    options.add_argument("--json", action="store_true", help="machine-readable output")
    if not is_module(name):
        text = "the kind of model, if several have this name"
        options.add_argument("--as", dest="source", metavar="{preset,recipe,run}", help=text)  # see split_source
    return options


def add_length(options: Parser, config: Any) -> None:
    """Adds --length, and --source-length for an encoder-decoder."""
    names, text = ["--length"], "tokens per sequence (default: the context length)"
    if isinstance(config, AttentionConfig):
        names, text = ["--length", "--tokens"], "tokens per sequence (default: 5)"
    if isinstance(config, VisionConfig):
        text = argparse.SUPPRESS  # the length follows from image_size; `shapes` refuses the option with a reason
    options.add_argument(*names, type=reader(int), metavar="N", help=text)
    if isinstance(config, Seq2SeqConfig):
        options.add_argument(
            "--source-length", type=reader(int), metavar="N", help="tokens per source sequence (default: --length)"
        )


def overview() -> str:
    """The help of `clearhead shapes` without a name: lists all names."""
    size = max(map(len, MODELS))
    presets = [
        line
        for name, make in MODELS.items()
        for line in wrap(
            (make.__doc__ or "").splitlines()[0],
            80,
            initial_indent=f"  {name:{size}}  ",
            subsequent_indent=" " * (size + 4),
        )
    ]
    recipes = wrap(", ".join(RECIPES), 80, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(
        [
            "usage: clearhead shapes NAME [options]",
            "",
            ABOUT,
            "",
            "Examples:",
            "  clearhead shapes attention --width 768 --heads 12 --tokens 5",
            "  clearhead shapes mnist",
            "",
            "presets:",
            *presets,
            "",
            "recipes:",
            *recipes,
            "",
            "other models:",
            "  runs/NAME     a trained run",
            "  FILE.py:NAME  your own nn.Module: a class, an instance or a function",
            "",
            DETAILS,
        ]
    )
