"""`clearhead train --model FILE.py:NAME --data FILE.py:NAME`, and `resume` of such a run: a module of your own."""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from clearhead.cli.options import Parser, dashes, field_docs, format_value, metavar, reader
from clearhead.training.config import OptimizerConfig, SnapshotConfig, TrainingConfig

if TYPE_CHECKING:
    from clearhead.training.custom import UserParts
    from clearhead.training.loop import TrainResult

DETAILS = """\
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


def train_custom(argv: Sequence[str]) -> int:
    options = Parser(
        "clearhead train",
        "Train a model of your own on data of your own.",
        usage="clearhead train --model FILE.py:NAME --data FILE.py:NAME [options]",
        examples=(
            "clearhead train --model mymodel.py:GPT --data mydata.py:text --epochs 3",
            "clearhead train --model mymodel.py:Net --data mydata.py:load --steps 500 --lr 1e-3",
        ),
        details=DETAILS,
    )
    add_parts(options)
    options.add_argument("--name", metavar="NAME", help="save the run in runs/NAME (default: the name of the class)")
    options.add_argument("--resume", action="store_true", help="resume the run if it exists")
    options.add_argument("--shard", action="store_true", help="shard the weights over the torchrun processes (FSDP2)")
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

    from clearhead.recipes.launch import check_run_name
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
