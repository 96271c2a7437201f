"""`clearhead train`, `resume`, `verify-resume` and `demo`: train a recipe with any settings, or a model of your own."""

import argparse
import inspect
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from clearhead.cli.options import (
    Parser,
    add_overrides,
    dashes,
    field_docs,
    format_value,
    get_overrides,
    metavar,
    reader,
)
from clearhead.messages import duration, printable
from clearhead.models.config import VisionConfig
from clearhead.recipes import RECIPES, config_of, find
from clearhead.training.config import OptimizerConfig, SnapshotConfig, TrainingConfig

if TYPE_CHECKING:
    from clearhead.training.custom import UserParts
    from clearhead.training.loop import TrainResult

TRAIN_DETAILS = """\
The run is saved in runs/NAME. Any setting of a recipe can be changed:
--training.steps 100, --optimizer.lr 1e-3, --data.augmentation.flip true. Ctrl-C
finishes the current step and saves a checkpoint; clearhead resume continues.

More examples:
  clearhead train mnist --training.epochs 5 --model.width 96 --dry-run
  clearhead train digits --data.question sum
  clearhead train folder --data.folder images
  clearhead train text --data.file my.txt
  clearhead train pronounce-fast --data.stress true
  torchrun --nproc-per-node 2 -m clearhead train mnist --name two

clearhead train RECIPE --help lists the settings of a recipe.

Your own nn.Module on your own data (clearhead train --model X --help lists more):
  clearhead train --model mymodel.py:GPT --data mydata.py:load --epochs 3"""

RESUME_DETAILS = """\
Training continues from the latest intact checkpoint with the run's own
settings, exactly as if it had not been interrupted. A finished run is left
unchanged unless --epochs or --steps extends it. The learning-rate schedule is
then stretched to the new end, so the result differs from that of a run that had
this length from the start.

A run of your own model contains no code: --model and --data name both again."""

VERIFY_RESUME = "Verify on this machine that a killed run resumes bit for bit."
VERIFY_RESUME_DETAILS = """\
Trains a few steps of a recipe twice: once without interruption, and once in a
process that is killed halfway (SIGKILL) and resumed. Weights, optimizer state,
random state and records of the two runs must be identical. The exit code is 0 if
they are, and 1 if not. All files are temporary."""

DEMO_DETAILS = """\
Trains a vision transformer on the 60,000 handwritten digits that come with
clearhead, tests it on 10,000 others, and plots its learning curves, confusion
matrix, predictions and attention. The run is saved in runs/demo; a second call
resumes it."""

CUSTOM_DETAILS = """\
MODEL is an nn.Module, a class that is built without arguments, or a function that
returns a module. DATA is a data set or a function that returns one: a pair of tensors
(inputs, targets), a map-style dataset or an iterable of batches; or a tuple of them,
(train, val) or (train, val, test). LOSS is a function of outputs and targets that
returns the mean over the batch (default: cross-entropy).

The run contains no code: clearhead resume RUN takes --model and --data again, and
clearhead.open_run(RUN, model=...) loads it in Python."""

NOT_OFFERED = ("label_smoothing", "tta")
"""settings of recipes only"""
BATCH_SIZE = 32
DEFAULTS = {"batch_size": BATCH_SIZE, "eval_batch_size": "as batch_size", "compile": "off"}
"""defaults that differ from those of recipes"""
STEPS, CHECKPOINT_EVERY = 30, 4
"""length of the runs of verify-resume, and steps between their checkpoints"""
NOT_EXACT = 1
SHORT_NAMES = {f"--{name}": f"--training.{name}" for name in ("epochs", "steps", "threads")}
"""options of `resume` and the settings of a recipe that they change; both commands accept both names"""


def train(argv: Sequence[str]) -> int:
    if argv and argv[0].startswith("-") and any(arg.partition("=")[0] in ("--model", "--data") for arg in argv):
        return train_custom(argv)
    name, rest = split_recipe(argv, "train")
    if name is None:
        examples = ("clearhead train reverse", "clearhead train mnist --name mine --seed 1")
        sentence = "Train a recipe, with any of its settings changed, or a model of your own."
        print_recipe_help("train", sentence, examples, TRAIN_DETAILS)
        return 0
    config = find(name).make()
    options = train_parser(name)
    add_overrides(options, config, "run settings", without=fixed_settings(name))
    args = options.parse(rest)
    snapshots = {} if args.snapshot_inputs is None else {"snapshots.inputs": args.snapshot_inputs}
    config = config_of(name, get_overrides(config, args) | snapshots)  # reports mistakes before torch is imported

    if args.dry_run:
        from clearhead.recipes.trial import estimate

        print(estimate(config))
        return 0
    from clearhead.recipes import train

    return train(config, args.name, resume=args.resume, shard=args.shard).exit_code


def train_parser(name: str) -> Parser:
    """The options that are not settings of the recipe."""
    sentence, _, details = (inspect.getdoc(inspect.getmodule(find(name).make)) or "").partition("\n\n")
    command = f"clearhead train {name}{find(name).make().task.example_options()}"
    options = Parser(
        f"clearhead train {name}", sentence, examples=(command, f"{command} --seed 1 --dry-run"), details=details
    )
    options.other_names |= SHORT_NAMES
    options.add_argument("--name", metavar="NAME", help="save the run in runs/NAME (default: RECIPE-SEED)")
    options.add_argument("--resume", action="store_true", help="resume the run if it exists")
    add_shard(options)
    options.add_argument(
        "--compile",
        metavar="{auto,on,off}",
        dest="training.compile",
        default=argparse.SUPPRESS,
        help="short for --training.compile: use torch.compile; auto enables it on a GPU",
    )
    options.add_argument(
        "--dry-run", action="store_true", help="estimate time and memory from a few real steps, then exit"
    )
    options.add_argument(
        "--snapshots",
        metavar="N",
        dest="snapshot_inputs",
        type=reader(int),
        help="save attention snapshots of N inputs, for clearhead look RUN --training-dynamics",
    )
    return options


def add_shard(options: Parser) -> None:
    options.add_argument("--shard", action="store_true", help="shard the weights over the torchrun processes (FSDP2)")


def fixed_settings(name: str) -> set[str]:
    """Paths that are not options of a recipe: its name, sizes that the data determines, and settings of images only."""
    config = find(name).make()
    derived = {f"model.{field}" for field in config.task.derived}
    return {"recipe"} | derived | (set() if isinstance(config.model, VisionConfig) else {"training.tta"})


def split_recipe(argv: Sequence[str], command: str) -> tuple[str | None, list[str]]:
    """The recipe, which comes first, and the remaining arguments; None for a call without a recipe or with --help."""
    match list(argv):
        case [] | ["-h" | "--help", *_]:
            return None, []
        case [name, *rest] if not name.startswith("-"):
            find(name)
            return name.replace("_", "-"), rest
    raise ValueError(f"{command} needs a recipe as its first argument, got {argv[0]!r}; one of {', '.join(RECIPES)}")


def print_recipe_help(command: str, sentence: str, examples: Sequence[str], details: str) -> None:
    """The help of a command that takes a recipe, with a list of recipes."""
    size = max(map(len, RECIPES))
    recipes = [f"  {name:{size}}  {recipe.description}" for name, recipe in RECIPES.items()]
    Parser(
        f"clearhead {command}",
        sentence,
        usage=f"clearhead {command} RECIPE [options]",
        examples=examples,
        details="\n".join(["recipes:", *recipes, "", details]),
    ).print_help()


def resume(argv: Sequence[str]) -> int:
    options = Parser(
        "clearhead resume",
        "Resume an interrupted run, or extend a finished one.",
        usage="clearhead resume RUN [options]",
        examples=("clearhead resume runs/mine", "clearhead resume runs/mine --epochs 50"),
        details=RESUME_DETAILS,
    )
    options.other_names |= {setting: option for option, setting in SHORT_NAMES.items()}
    options.add_run()
    length = options.add_mutually_exclusive_group()
    length.add_argument("--epochs", metavar="N", type=reader(int), help="train until epoch N, counted from the start")
    length.add_argument("--steps", metavar="N", type=reader(int), help="train until step N, counted from the start")
    options.add_argument(
        "--threads", metavar="N", type=reader(int), help="number of CPU threads from now on; 0 for PyTorch's default"
    )
    add_shard(options)
    add_parts(options)
    args = options.parse(argv)
    if args.model or args.data:
        return resume_custom(args).exit_code

    from clearhead.recipes import resume

    return resume(args.run, epochs=args.epochs, steps=args.steps, threads=args.threads, shard=args.shard).exit_code


def verify_resume(argv: Sequence[str]) -> int:
    name, rest = split_recipe(argv, "verify-resume")
    if name is None:
        examples = ("clearhead verify-resume reverse", "clearhead verify-resume mnist --model.dropout 0.1")
        print_recipe_help("verify-resume", VERIFY_RESUME, examples, VERIFY_RESUME_DETAILS)
        return 0
    config = find(name).make()
    command = f"clearhead verify-resume {name}{find(name).make().task.example_options()}"
    options = Parser(
        f"clearhead verify-resume {name}",
        VERIFY_RESUME,
        examples=(command, f"{command} --training.steps 60"),
        details=VERIFY_RESUME_DETAILS,
    )
    options.other_names |= SHORT_NAMES
    add_overrides(options, config, "run settings", without=fixed_settings(name))
    short = {"training.steps": STEPS, "training.checkpoint_every": CHECKPOINT_EVERY}
    config = config_of(name, short | get_overrides(config, options.parse(rest)))

    from clearhead.recipes.trial import verify_resume

    with tempfile.TemporaryDirectory() as folder:
        result = verify_resume(config, folder, report_progress)
    print(
        f"killed at step {result.killed_at} of {result.steps}, resumed from the checkpoint of step "
        f"{result.resumed_from}"
    )
    if result.is_exact:
        print("exact: weights, optimizer state, random state and records equal those of the uninterrupted run")
        return 0
    n = len(result.differences)
    names = ", ".join(map(printable, result.differences[:5]))
    print(f"NOT EXACT: {n} {'difference' if n == 1 else 'differences'}: {names}{', ...' if n > 5 else ''}")
    return NOT_EXACT


def report_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def demo(argv: Sequence[str]) -> int:
    options = Parser(
        "clearhead demo",
        "Train on handwritten digits for a minute and plot the results.",
        examples=("clearhead demo", "clearhead demo --steps 100"),
        details=DEMO_DETAILS,
    )
    options.add_argument("--steps", type=reader(int), metavar="N", help="number of steps (default: as in the recipe)")
    args = options.parse(argv)

    from clearhead.cli.look import announce_drawing
    from clearhead.inference.explain import DEMO_RECIPE, run_demo
    from clearhead.models.shapes import shapes

    n_parameters = shapes(config_of(DEMO_RECIPE).model).parameters
    print(f"Training a vision transformer with {n_parameters:,} parameters to recognize digits.\n", flush=True)
    result, figures = run_demo(args.steps, announce_drawing)
    if result.test is None:
        return result.exit_code
    accuracy, seconds = result.test["accuracy"], result.test["seconds"]
    print(f"\nTest accuracy: {accuracy:.2%} on 10,000 digits after {duration(seconds)} of training.\n")
    print("Figures:")
    for path, title in figures:
        print(f"  {path!s:37}  {title}")
    print(
        "\nNext:\n"
        "  clearhead open runs/demo                         draw digits and look inside the model\n"
        "  clearhead predict runs/demo YOUR.png --invert    classify your own digit, dark on white\n"
        "  clearhead look runs/demo --sample 7              plot the attention for another digit\n"
        "  clearhead train mnist --name wide --model.width 96 --training.epochs 4\n"
        "  clearhead curves runs/demo runs/wide             compare the two runs\n"
        "  clearhead train reverse                          train to 100% in four seconds\n"
        "  clearhead recipes                                list all recipes"
    )
    return 0


def train_custom(argv: Sequence[str]) -> int:
    options = Parser(
        "clearhead train",
        "Train a model of your own on data of your own.",
        usage="clearhead train --model FILE.py:NAME --data FILE.py:NAME [options]",
        examples=(
            "clearhead train --model mymodel.py:GPT --data mydata.py:text --epochs 3",
            "clearhead train --model mymodel.py:Net --data mydata.py:load --steps 500 --lr 1e-3",
        ),
        details=CUSTOM_DETAILS,
    )
    add_parts(options)
    options.add_argument("--name", metavar="NAME", help="save the run in runs/NAME (default: the name of the class)")
    options.add_argument("--resume", action="store_true", help="resume the run if it exists")
    add_shard(options)
    options.add_argument("--seed", metavar="N", type=reader(int), default=0, help="random seed (default: 0)")
    options.add_argument(
        "--snapshots", metavar="N", type=reader(int), default=0, help="save attention snapshots of N inputs"
    )
    add_settings(options, "training", TrainingConfig)
    add_settings(options, "optimizer", OptimizerConfig)
    args = options.parse(argv)
    check_parts(args)
    values = {"training.batch_size": BATCH_SIZE, "training.compile": "off"} | vars(args)
    values.setdefault("training.eval_batch_size", values["training.batch_size"])
    training = TrainingConfig(**settings_of(values, "training"))
    optimizer = OptimizerConfig(**settings_of(values, "optimizer"))
    snapshots = SnapshotConfig(inputs=args.snapshots)

    from clearhead.recipes import check_run_name
    from clearhead.training.custom import FitSettings, fit_parts
    from clearhead.training.run_directory import RUNS

    if args.name is not None:
        check_run_name(args.name)
    folder = None if args.name is None else RUNS / args.name
    settings = FitSettings(training, optimizer, snapshots, args.seed)
    parts = load_parts(args, args.seed)
    return fit_parts(parts, settings, folder, resume=args.resume, shard=args.shard, quiet=False).exit_code


def add_parts(options: Parser) -> None:
    group = options.add_argument_group("your own code")
    for name, what in (("model", "the module"), ("data", "its data"), ("loss", "the loss (default: cross-entropy)")):
        group.add_argument(f"--{name}", metavar="FILE.py:NAME", help=what)
    group.add_argument("--correct", metavar="FILE.py:NAME", help="which predictions are correct")


def check_parts(args: argparse.Namespace) -> None:
    for name in ("model", "data"):
        if not getattr(args, name):
            raise ValueError(f"--{name} FILE.py:NAME is missing")


def add_settings(options: Parser, group: str, config: type) -> None:
    """An option for each field: --lr, which may also be written --optimizer.lr."""
    section = options.add_argument_group(f"{group} settings")
    docs, hints = field_docs(config), get_type_hints(config)
    for field in fields(config):
        if field.name in NOT_OFFERED:
            continue
        default = DEFAULTS.get(field.name, field.default)
        short = group if field.name == "name" else field.name
        text = " ".join(filter(None, [docs.get(field.name, ""), f"(default: {format_value(default)})"]))
        options.other_names[f"--{group}.{dashes(field.name)}"] = f"--{dashes(short)}"
        section.add_argument(
            f"--{dashes(short)}",
            dest=f"{group}.{field.name}",
            default=argparse.SUPPRESS,
            type=reader(hints[field.name]),
            metavar=metavar(hints[field.name]),
            help=text.replace("%", "%%"),
        )


def settings_of(values: dict[str, Any], group: str) -> dict[str, Any]:
    """{"training.steps": 5} -> {"steps": 5}"""
    return {name.removeprefix(f"{group}."): value for name, value in values.items() if name.startswith(f"{group}.")}


def load_parts(args: argparse.Namespace, seed: int) -> "UserParts":
    """Import the user's files, which are relative to the current folder."""
    from clearhead.data.custom import is_tensor_pair
    from clearhead.insight.doctor.loading import load, load_value
    from clearhead.tasks.objectives import UserObjective
    from clearhead.training.custom import UserParts

    here = Path.cwd()
    model, data = load(args.model, here, seed), load_value(args.data, here, seed)
    loss, correct = (
        load_value(target, here, call_functions=False) if target else None for target in (args.loss, args.correct)
    )
    for target, function in ((args.loss, loss), (args.correct, correct)):
        if target and not callable(function):
            raise ValueError(f"{target} must be a function of outputs and targets, got {type(function).__name__}")
    splits = data if isinstance(data, tuple) and len(data) in (2, 3) and not is_tensor_pair(data) else (data,)
    named = dict(zip(("train", "val", "test"), (*splits, None, None), strict=False))
    return UserParts(model, named, UserObjective(loss, correct))


def resume_custom(args: argparse.Namespace) -> "TrainResult":
    check_parts(args)
    from clearhead.training.config import RunConfig
    from clearhead.training.custom import resume_fit
    from clearhead.training.run_directory import RunDirectory

    seed = RunConfig.from_dict(RunDirectory.open(args.run).config).seed
    parts = load_parts(args, seed)
    return resume_fit(args.run, parts, epochs=args.epochs, steps=args.steps, threads=args.threads, shard=args.shard)
