"""`clearhead shapes`: a preset, a recipe, a run or a user's own module, and every tensor of its forward pass."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from clearhead.cli.options import Parser, add_overrides, apply_overrides, reader
from clearhead.messages import closest_name, json_text
from clearhead.models.config import AttentionConfig, Seq2SeqConfig, VisionConfig
from clearhead.models.presets import PRESETS
from clearhead.recipes.registry import RECIPES

if TYPE_CHECKING:
    from clearhead.models.shapes import Shapes


def attention() -> AttentionConfig:
    """One attention layer on its own."""
    return AttentionConfig(width=768)


NAMES: dict[str, Callable[[], Any]] = {"attention": attention, **PRESETS}
SOURCES = ("preset", "recipe", "run")
RUNS = "runs"

ABOUT = """\
Every tensor of a model in one forward pass: its shape with tokens as rows and
with tokens as columns, its parameters, and the multiply-adds it takes."""

EXAMPLES = """\
examples
  clearhead shapes attention --width 768 --heads 12 --tokens 5
  clearhead shapes attention --width 256 --key-width 64 --value-width 256
  clearhead shapes vit_tiny --width 256 --heads 4 --depth 8
  clearhead shapes gpt2_small --length 128 --batch 8 --json
  clearhead shapes mnist
  clearhead shapes runs/mine
  clearhead shapes mymodel.py:GPT
  clearhead shapes mymodel.py:Encoder --input 2,16,64

clearhead shapes NAME --help lists what can be changed in a model."""


def shapes(argv: Sequence[str]) -> None:
    name, rest = split_name(argv)
    if name is None:
        parser("NAME").parse([arg for arg in rest if arg not in ("-h", "--help")])  # a mistake is one here too
        print(names_text())
        return
    if is_module(name):
        run_module(name, rest)
        return
    source, rest = wanted_source(rest)
    source, config, notes = found(name, source)
    options = parser(name)
    add_length(options, config)
    add_overrides(options, config, f"settings of {name}")
    args = options.parse(rest)
    config = apply_overrides(config, args)

    from clearhead.models.shapes import shapes

    lengths = {key: value for key, value in vars(args).items() if key in ("length", "source_length")}
    display(shapes(config, batch=args.batch, **lengths), args, {"name": name, "source": source}, notes)


def run_module(name: str, rest: Sequence[str]) -> None:
    """The user's own module, with inputs that are found from it or given."""
    options = parser(name)
    options.add_argument("--length", type=reader(int), metavar="N", help="tokens per sequence (default: 7)")
    options.add_argument("--width", type=reader(int), metavar="N", help="pass features of this width, not token ids")
    options.add_argument(
        "--input",
        type=size,
        action="append",
        default=[],
        metavar="B,L,...",
        help="size of an input; repeat for several",
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
    with redirect_stdout(sys.stderr):  # what the user's file prints is no part of the answer
        module = load(name, Path.cwd())
        try:
            seen = module_shapes(
                module, batch=args.batch, width=args.width, length=args.length, sizes=args.input, dtypes=args.dtype
            )
        except SystemExit:
            raise ValueError(f"forward() of {name} ends the program") from None
    inputs = [f"{one.name} {list(one.rows)}" for one in seen.tensors if one.operation == "input"]
    display(seen, args, {"name": name, "source": "module"}, [f"{name}, called with {', '.join(inputs)}"])


def display(seen: "Shapes", args: argparse.Namespace, about: dict[str, str], notes: Sequence[str]) -> None:
    if args.json:
        print(json_text({**about, **seen.to_dict()}))
        return
    from clearhead.cli.options import console, show

    for note in notes:
        print("\n".join(wrap(note, console().width)))
    print(end="\n" if notes else "")
    show(seen.table(args.conventions, every_block=args.every_block, width=console().width))


def split_name(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The model's name may stand anywhere: it is the first word that is one, or else the first word."""
    words = [i for i, arg in enumerate(argv) if not arg.startswith("-")]
    known = [i for i in words if is_known(argv[i])]
    if not known and argv and not argv[0].startswith("-"):
        known = [0]
    if not known:
        return None, list(argv)
    at = known[0]
    return argv[at], [*argv[:at], *argv[at + 1 :]]


def is_known(word: str) -> bool:
    return word.replace("-", "_") in NAMES or word.replace("_", "-") in RECIPES or is_module(word) or "/" in word


def is_module(word: str) -> bool:
    return ":" in word or word.endswith(".py")


def wanted_source(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """--as recipe, where a name has several meanings."""
    options = Parser("clearhead shapes", ABOUT)
    options.add_argument("--as", dest="source", metavar="|".join(SOURCES))
    at = next((i for i, arg in enumerate(argv) if arg == "--as" or arg.startswith("--as=")), None)
    if at is None:
        return None, list(argv)
    n_words = 1 if "=" in argv[at] else 2
    source = options.parse(argv[at : at + n_words]).source
    if source not in SOURCES:
        raise ValueError(f"--as must be one of {', '.join(SOURCES)}, got {source!r}")
    return source, [*argv[:at], *argv[at + n_words :]]


def found(name: str, source: str | None) -> tuple[str, Any, list[str]]:
    """Where a name comes from, its model's config, and what a reader should know: a preset comes before a recipe of the
    same name, and a recipe before a run."""
    preset, recipe, run_path = name.replace("-", "_"), name.replace("_", "-"), run_folder(name)
    meanings = {"preset": preset in NAMES, "recipe": recipe in RECIPES, "run": run_path is not None}
    there = [one for one in SOURCES if meanings[one]]
    if source is not None and source not in there:
        raise LookupError(f"there is no {source} {name!r}" + (f", but a {' and a '.join(there)}" if there else ""))
    if not there:
        raise LookupError(unknown(name))
    source = source or there[0]
    others = [other for other in there if other != source]
    if source == "preset":
        config = NAMES[preset]()
        if "recipe" in others and RECIPES[recipe].make().model == config:
            others.remove("recipe")  # it makes no difference
        notes = [f"{preset}: the preset"] if others else []
    elif source == "recipe":
        made = RECIPES[recipe].make()
        config, notes = made.model, [f"{recipe}: the model of the recipe"]
        if made.data.name in ("folder", "text"):
            field = "num_classes" if made.data.name == "folder" else "vocab_size"
            notes[0] += f", for {field}={getattr(config, field)}: it follows from your data"
    else:
        assert run_path is not None
        config, notes = config_of_run(run_path), [f"{run_path}: the model of the run"]
    also = {"preset": "a preset", "recipe": "a recipe", "run": f"a run, {run_path}"}
    notes += [f"{name} is also {also[other]}: clearhead shapes {name} --as {other}" for other in others]
    return source, config, notes


def run_folder(name: str) -> Path | None:
    """The folder of a run: a path, or the name of one in runs/."""
    for path in (Path(name), Path(RUNS) / name):
        if (path / "config.json").is_file():
            return path
    return None


def config_of_run(path: Path) -> Any:
    from clearhead.training.config import RunConfig
    from clearhead.training.run_directory import RunDirectory

    return RunConfig.from_dict(RunDirectory.open(path).config).model


def unknown(name: str) -> str:
    """The nearest name first, then what there is."""
    if "/" in name:
        from clearhead.training.run_directory import no_run

        return str(no_run(Path(name)))
    names = [*NAMES, *RECIPES]
    near = closest_name(name, names)
    hint = f"did you mean {near}? " if near else ""
    return (
        f"no model {name!r}; {hint}Presets: {', '.join(NAMES)}; recipes: {', '.join(RECIPES)}; "
        "or a run (runs/NAME), or your own module (FILE.py:NAME)"
    )


def size(text: str) -> tuple[int, ...]:
    is_size = re.fullmatch(r"\d+([,x]\d+)*", text, re.ASCII)
    numbers = [int(part) for part in re.split("[,x]", text)] if is_size else []
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"must be whole numbers above 0, such as 2,16, got {text!r}")
    return tuple(numbers)


def parser(name: str) -> Parser:
    options = Parser(f"clearhead shapes {name}", ABOUT)
    options.add_argument("--batch", type=reader(int), default=1, metavar="N", help="examples in the batch (default: 1)")
    sides = options.add_mutually_exclusive_group()
    for side, text in (
        ("rows", "tokens as rows only"),
        ("columns", "tokens as columns only"),
        ("both", "both (default)"),
    ):
        sides.add_argument(f"--{side}", dest="conventions", action="store_const", const=side, default="both", help=text)
    options.add_argument("--every-block", action="store_true", help="do not fold blocks that equal the one before")
    options.add_argument("--json", action="store_true", help="machine-readable output")
    if not is_module(name):
        note = "what NAME means, if it is ambiguous"
        options.add_argument("--as", dest="source", metavar="{preset,recipe,run}", help=note)  # read before: see run()
    return options


def add_length(options: Parser, config: Any) -> None:
    names, text = ["--length"], "tokens per sequence (default: the context length)"
    if isinstance(config, AttentionConfig):
        names, text = ["--length", "--tokens"], "tokens per sequence (default: 5)"
    if isinstance(config, VisionConfig):
        text = argparse.SUPPRESS  # follows from the image; who asks for one is told so
    options.add_argument(*names, type=reader(int), metavar="N", help=text)
    if isinstance(config, Seq2SeqConfig):
        options.add_argument(
            "--source-length", type=reader(int), metavar="N", help="tokens in the source (default: --length)"
        )


def names_text() -> str:
    size = max(map(len, NAMES))
    lines = [
        wrap(first_line(make), 80, initial_indent=f"  {name:{size}}  ", subsequent_indent=" " * (size + 4))
        for name, make in NAMES.items()
    ]
    recipes = wrap(", ".join(RECIPES), 80, initial_indent="  ", subsequent_indent="  ")
    others = ["runs/NAME     a run that was trained here", "FILE.py:NAME  your own nn.Module, class or function"]
    return "\n".join(
        [
            *("usage: clearhead shapes NAME [options]", "", ABOUT, "", "presets", *chain.from_iterable(lines), ""),
            *("recipes (clearhead recipes)", *recipes, "", "or", *(f"  {other}" for other in others), "", EXAMPLES),
        ]
    )


def first_line(make: Callable[[], Any]) -> str:
    """Of its docstring, without the code of the exercise that it stands for."""
    return re.sub(r" \(R[\d.]+\d\)| of R[\d.]+\d", "", (make.__doc__ or "").splitlines()[0])
