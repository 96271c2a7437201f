"""`clearhead train`: a recipe's name and whatever is changed in it become a config, and the config a run."""

import argparse
import inspect
from collections.abc import Sequence

from clearhead.cli.overrides import add_overrides, given, reader
from clearhead.cli.parser import Parser
from clearhead.models.config import VisionConfig
from clearhead.recipes.all import RECIPES, config_of, find

ABOUT = """\
usage: clearhead train RECIPE [options]

Trains a recipe in the folder runs/NAME. Any of its numbers can be changed:
--training.steps 100, --optimizer.lr 1e-3, --data.augmentation.flip true.
Ctrl-C stops after the step with a checkpoint; clearhead resume goes on."""

EXAMPLES = """\
examples
  clearhead train reverse
  clearhead train mnist --name mine --seed 1
  clearhead train mnist --training.epochs 5 --model.width 96 --dry-run
  clearhead train whole --data.question sum
  clearhead train folder --data.folder pictures
  clearhead train pronounce-fast --data.stress true
  clearhead train text --data.file my.txt
  clearhead train mnist --compile on
  torchrun --nproc-per-node 2 -m clearhead train mnist --name two

clearhead train RECIPE --help lists all that can be changed in it."""


def run(argv: Sequence[str]) -> int:
    name, rest = split_recipe(argv, "train")
    if name is None:
        print("\n".join([ABOUT, "", "recipes", *recipe_lines(), "", EXAMPLES]))
        return 0
    config = find(name).make()
    options = Parser(f"clearhead train {name}", inspect.getdoc(inspect.getmodule(find(name).make)) or "")
    options.add_argument("--name", metavar="NAME", help="the run's folder is runs/NAME (now the recipe and the seed)")
    options.add_argument("--resume", action="store_true", help="if the run is there, go on with it")
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
        "--dry-run", action="store_true", help="say what it takes, by a few real steps; leaves nothing"
    )
    options.add_argument(
        "--probe",
        metavar="N",
        dest="probed",
        type=reader(int),
        help="keep the attention to N inputs, for clearhead look RUN --over-time",
    )
    add_overrides(options, config, "what you may change", without=fixed(name))
    args = options.parse(rest)
    changes = given(config, args) | ({} if args.probed is None else {"probe.inputs": args.probed})
    config = config_of(name, changes)  # a mistake is answered before torch is loaded

    if args.dry_run:
        from clearhead.recipes.estimate import estimate

        print(estimate(config))
        return 0
    from clearhead.recipes.start import train

    outcome = train(config, args.name, resume=args.resume, shard=args.shard)
    return outcome.exit_code


def fixed(name: str) -> set[str]:
    """What cannot be changed in a recipe: its name, and what only other data sets have, or only pictures."""
    own = ("question", "length", "set_size", "folder", "image_size", "fit", "skip_invalid", "train_file", "test_file")
    others = {f"data.{field}" for field in (*own, "stress", "file", "level", "window")}
    make = find(name).make
    pictures: set[str] = set() if isinstance(make().model, VisionConfig) else {"data.augmentation", "training.views"}
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
    return [f"  {name:{size}}  {recipe.what}" for name, recipe in RECIPES.items()]
