"""`clearhead train`, `resume`, `verify-resume` and `demo`: train a recipe, with any of its settings changed."""

import argparse
import inspect
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clearhead.cli.custom import add_parts, resume_custom, train_custom
from clearhead.cli.options import Parser, add_overrides, get_overrides, reader
from clearhead.messages import duration, printable
from clearhead.models.config import VisionConfig
from clearhead.recipes.registry import RECIPES, config_of, find

if TYPE_CHECKING:
    from clearhead.inference.run import Run
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
        from clearhead.recipes.estimate import estimate

        print(estimate(config))
        return 0
    from clearhead.recipes.launch import train

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

    from clearhead.recipes.launch import resume

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

    from clearhead.training.verify_resume import verify_resume

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


DEMO_RECIPE, DEMO_NAME = "mnist", "demo"


def demo(argv: Sequence[str]) -> int:
    options = Parser(
        "clearhead demo",
        "Train on handwritten digits for a minute and plot the results.",
        examples=("clearhead demo", "clearhead demo --steps 100"),
        details=DEMO_DETAILS,
    )
    options.add_argument("--steps", type=reader(int), metavar="N", help="number of steps (default: as in the recipe)")
    args = options.parse(argv)

    from clearhead.models.shapes import shapes

    n_parameters = shapes(config_of(DEMO_RECIPE).model).parameters
    print(f"Training a vision transformer with {n_parameters:,} parameters to recognize digits.\n", flush=True)
    result, figures = run_demo(args.steps)
    if result.test is None:
        return result.exit_code
    accuracy, seconds = result.test["accuracy"], result.test["seconds"]
    print(f"\nTest accuracy: {accuracy:.2%} on 10,000 digits after {duration(seconds)} of training.\n")
    print("Figures:")
    for path, title in figures:
        print(f"  {path!s:37}  {title}")
    print(
        "\nNext:\n"
        "  clearhead predict runs/demo YOUR.png --invert    classify your own digit, dark on white\n"
        "  clearhead look runs/demo --sample 7              plot the attention for another digit\n"
        "  clearhead train mnist --name wide --model.width 96 --training.epochs 4\n"
        "  clearhead curves runs/demo runs/wide             compare the two runs\n"
        "  clearhead train reverse                          train to 100% in four seconds\n"
        "  clearhead recipes                                list all recipes"
    )
    return 0


def run_demo(steps: int | None = None) -> "tuple[TrainResult, list[tuple[Path, str]]]":
    """Trains runs/demo, or resumes it, and plots its results. Returns the path and the title of each figure, none if
    training was stopped."""
    from clearhead.cli.look import announce_drawing
    from clearhead.inference.run import Run
    from clearhead.recipes.launch import train
    from clearhead.validation import check_positive

    if steps is not None:
        check_positive(steps=steps)
    result = train(config_of(DEMO_RECIPE, {"training.steps": steps} if steps else {}), DEMO_NAME, resume=True)
    if result.reason == "stopped":
        return result, []
    announce_drawing()
    return result, plot_results(Run(Path("runs") / DEMO_NAME))


def plot_results(run: "Run") -> list[tuple[Path, str]]:
    """Learning curves, confusion matrix, predictions, and the attention for the first test image."""
    from clearhead.drawing import save_figure
    from clearhead.inference.evaluate import draw_confusion
    from clearhead.inference.explain import dataset_example, explain_input
    from clearhead.inference.predictions import confusion, plot_test_predictions
    from clearhead.training.curves import draw_curves, read_curves

    figures = {
        "curves.png": ("loss and accuracy against epochs", draw_curves([read_curves(run.path)])),
        "confusion.png": ("the confusion matrix on the test set", draw_confusion(confusion(run), run.classes)),
        "predictions.png": ("predictions, and the most confident mistakes", plot_test_predictions(run)),
    }
    saved = [(save_figure(figure, run.path / "figures" / name), title) for name, (title, figure) in figures.items()]
    return saved + explain_input(run, dataset_example(run, 0))
