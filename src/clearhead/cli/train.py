"""`clearhead train`: a recipe's name and whatever is changed in it become a config, and the config a run."""

import argparse
import inspect
import sys
import tempfile
from collections.abc import Sequence

from clearhead.cli.options import Parser, add_overrides, get_overrides, reader
from clearhead.messages import duration, printable
from clearhead.models.config import VisionConfig
from clearhead.recipes.registry import RECIPES, config_of, find

ABOUT_TRAIN = """\
usage: clearhead train RECIPE [options]

Trains a recipe in the folder runs/NAME. Any of its numbers can be changed:
--training.steps 100, --optimizer.lr 1e-3, --data.augmentation.flip true.
Ctrl-C stops after the step with a checkpoint; clearhead resume goes on."""

TRAIN_EXAMPLES = """\
examples
  clearhead train reverse
  clearhead train mnist --name mine --seed 1
  clearhead train mnist --training.epochs 5 --model.width 96 --dry-run
  clearhead train digits --data.question sum
  clearhead train folder --data.folder pictures
  clearhead train pronounce-fast --data.stress true
  clearhead train text --data.file my.txt
  clearhead train mnist --compile on
  torchrun --nproc-per-node 2 -m clearhead train mnist --name two

clearhead train RECIPE --help lists all that can be changed in it."""


def train(argv: Sequence[str]) -> int:
    name, rest = split_recipe(argv, "train")
    if name is None:
        print("\n".join([ABOUT_TRAIN, "", "recipes", *recipe_lines(), "", TRAIN_EXAMPLES]))
        return 0
    config = find(name).make()
    options = Parser(f"clearhead train {name}", inspect.getdoc(inspect.getmodule(find(name).make)) or "")
    options.add_argument(
        "--name", metavar="NAME", help="the run's folder is runs/NAME (default: the recipe and the seed)"
    )
    options.add_argument("--resume", action="store_true", help="resume the run if it exists")
    options.add_argument(
        "--shard", action="store_true", help="split the weights over the processes of torchrun (FSDP2)"
    )
    options.add_argument(
        "--compile",
        metavar="{auto,on,off}",
        dest="training.compile",
        default=argparse.SUPPRESS,
        help="short for --training.compile: torch.compile; auto is on with a GPU",
    )
    options.add_argument(
        "--dry-run", action="store_true", help="estimate time and memory from a few real steps, then exit"
    )
    options.add_argument(
        "--snapshots",
        metavar="N",
        dest="snapshot_inputs",
        type=reader(int),
        help="keep the attention to N inputs, for clearhead look RUN --training-dynamics",
    )
    add_overrides(options, config, "what you may change", without=fixed_settings(name))
    args = options.parse(rest)
    changes = get_overrides(config, args) | (
        {} if args.snapshot_inputs is None else {"snapshots.inputs": args.snapshot_inputs}
    )
    config = config_of(name, changes)  # a mistake is answered before torch is loaded

    if args.dry_run:
        from clearhead.recipes.estimate import estimate

        print(estimate(config))
        return 0
    from clearhead.recipes.launch import train

    outcome = train(config, args.name, resume=args.resume, shard=args.shard)
    return outcome.exit_code


def fixed_settings(name: str) -> set[str]:
    """What cannot be changed in a recipe: its name, and what only other data sets have, or only pictures."""
    own = ("question", "length", "set_size", "folder", "image_size", "fit", "skip_invalid", "train_file", "test_file")
    others = {f"data.{field}" for field in (*own, "stress", "file", "level", "window")}
    make = find(name).make
    pictures: set[str] = set() if isinstance(make().model, VisionConfig) else {"data.augmentation", "training.tta"}
    return {"recipe"} | pictures | others - {f"data.{argument}" for argument in inspect.signature(make).parameters}


def split_recipe(argv: Sequence[str], command: str) -> tuple[str | None, list[str]]:
    """The recipe's name comes first; None if only help is wanted."""
    match list(argv):
        case [] | ["-h" | "--help", *_]:
            return None, []
        case [name, *rest] if not name.startswith("-"):
            find(name)
            return name.replace("_", "-"), rest
    raise ValueError(f"{command} takes a recipe's name first, got {argv[0]!r}; one of {', '.join(RECIPES)}")


def recipe_lines() -> list[str]:
    size = max(map(len, RECIPES))
    return [f"  {name:{size}}  {recipe.description}" for name, recipe in RECIPES.items()]


# `clearhead resume`: continues a run with the settings in its folder; only its length and threads can be changed.


ABOUT_RESUME = """\
Resumes an interrupted run from its newest intact checkpoint, with the settings
that it began with, exactly as if it had not been interrupted. A finished run is
left unchanged, unless --epochs or --steps lengthens it: its learning-rate
schedule is then stretched to the new end, so the result differs from that of a
run that had this length from the beginning."""

RESUME_EXAMPLES = """\
examples
  clearhead resume mine
  clearhead resume runs/mine --threads 1
  clearhead resume mine --epochs 50"""


def resume(argv: Sequence[str]) -> int:
    options = Parser("clearhead resume", ABOUT_RESUME)
    options.usage = "clearhead resume RUN [options]"
    options.epilog = RESUME_EXAMPLES
    options.add_argument("run", metavar="RUN", help="the path of a run, or its name in runs/")
    length = options.add_mutually_exclusive_group()
    length.add_argument("--epochs", metavar="N", type=reader(int), help="train until epoch N, counted from the start")
    length.add_argument("--steps", metavar="N", type=reader(int), help="train until step N, counted from the start")
    options.add_argument(
        "--threads", metavar="N", type=reader(int), help="number of CPU threads from now on; 0 for PyTorch's default"
    )
    options.add_argument(
        "--shard", action="store_true", help="split the weights over the processes of torchrun (FSDP2)"
    )
    args = options.parse(argv)

    from clearhead.recipes.launch import resume

    return resume(args.run, epochs=args.epochs, steps=args.steps, threads=args.threads, shard=args.shard).exit_code


# `clearhead verify-resume`: a recipe's name, a verdict.


ABOUT_VERIFY_RESUME = """\
Trains a few steps of a recipe twice: once undisturbed, and once in a process
that is killed halfway (kill -9) and resumed. Weights, optimizer, random state
and records of the two must agree in every bit. Leaves nothing behind."""

STEPS, CHECKPOINT_EVERY = 30, 4
DIFFERENT = 1


def verify_resume(argv: Sequence[str]) -> int:
    """The exit code: 1 when the two differ."""
    name, rest = split_recipe(argv, "verify-resume")
    if name is None:
        print(
            "\n".join(
                [
                    "usage: clearhead verify-resume RECIPE [options]",
                    "",
                    ABOUT_VERIFY_RESUME,
                    "",
                    "recipes",
                    *recipe_lines(),
                ]
            )
        )
        return 0
    config = find(name).make()
    options = Parser(f"clearhead verify-resume {name}", ABOUT_VERIFY_RESUME)
    add_overrides(options, config, "what you may change", without=fixed_settings(name))
    short = {"training.steps": STEPS, "training.checkpoint_every": CHECKPOINT_EVERY}
    config = config_of(name, short | get_overrides(config, options.parse(rest)))

    from clearhead.training.verify_resume import verify_resume

    with tempfile.TemporaryDirectory() as folder:
        seen = verify_resume(config, folder, report)
    print(f"killed at step {seen.killed_at} of {seen.steps}, resumed from the checkpoint of step {seen.resumed_from}")
    if seen.is_exact:
        print("exact: weights, optimizer, random state and records agree in every bit with the run that was not killed")
        return 0
    print(f"DIFFERENT in {len(seen.differences)} places: {', '.join(map(printable, seen.differences[:5]))}")
    return DIFFERENT


def report(line: str) -> None:
    """A line before a wait; on stderr, where no program reads it as an answer."""
    print(line, file=sys.stderr, flush=True)


# `clearhead demo`: one command that trains, draws, and says where to go from there.


ABOUT_DEMO = """\
Trains a vision transformer on the 60,000 handwritten digits that come with
clearhead, in runs/demo, tests it on 10,000 others, and draws its curves, its
confusion matrix, its answers and what it looks at. Once more, and it goes on
where it was."""


def demo(argv: Sequence[str]) -> int:
    options = Parser("clearhead demo", ABOUT_DEMO)
    options.add_argument("--steps", type=reader(int), metavar="N", help="fewer or more steps than the recipe has")
    args = options.parse(argv)

    from clearhead.cli.look import announce_drawing
    from clearhead.inference.demo import RECIPE, demo
    from clearhead.models.shapes import shapes
    from clearhead.recipes.registry import config_of

    config = config_of(RECIPE)
    print(
        f"Training a vision transformer of {shapes(config.model).parameters:,} parameters to read digits.\n", flush=True
    )
    outcome, pictures = demo(steps=args.steps, before_drawing=announce_drawing)
    if outcome.test is None:
        return outcome.exit_code
    seconds = outcome.test["seconds"]
    print(
        f"\n{outcome.test['accuracy']:.2%} of 10,000 unseen digits read right, after {duration(seconds)} of training.\n"
    )
    print("Open")
    for path, what in pictures:
        print(f"  {path!s:37}  {what}")
    print(
        "\nTry\n"
        "  clearhead predict runs/demo YOUR.png --invert    your own digit, dark on white paper\n"
        "  clearhead look runs/demo --sample 7              what it looks at in another digit\n"
        "  clearhead train mnist --name wide --model.width 96 --training.epochs 4\n"
        "  clearhead curves runs/demo runs/wide             the two side by side\n"
        "  clearhead train reverse                          four seconds, 100%\n"
        "  clearhead recipes                                what else there is"
    )
    return 0
