"""`clearhead data` and `clearhead recipes`: list, download and show data sets; list the recipes."""

import argparse
import io
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.cli.options import Parser
from clearhead.data.datasets import N_VIEWS
from clearhead.messages import duration, json_text, printable
from clearhead.recipes.registry import RECIPES, Recipe

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.data.cache import CachedDataset
    from clearhead.data.datasets import DataConfig
    from clearhead.training.config import RunConfig

ABOUT_DATA = """\
clearhead data list                        list all data sets
clearhead data get NAME [--from PATH]      download one, or copy it from a folder or archive
clearhead data show NAME [--out FILE]      show one: a contact sheet, or examples as text
clearhead data show NAME --augmented       show images beside their augmented versions

Downloaded data is kept in ~/.cache/clearhead, or in the folder that CLEARHEAD_CACHE
names, and verified by its SHA-256 digests. `data show` takes the same --data options
as `train`: clearhead data show folder --data.folder PATH"""

ABOUT_SHOW = """\
Writes a contact sheet of images as a PNG file: a row of training images for each
class, or with --augmented a row for each image, followed by its versions as training
sees them. Examples of digits, words and texts are printed as text."""

PATHS = {"folder": "--data.folder", "text": "--data.file", "words": "--data.file", "pronounce": "--data.train-file"}
"""options that hold the path of the user's own data"""

USAGE = "list, get NAME or show NAME"

ABOUT_RECIPES = """\
Experiments that are ready to run, with the time and test accuracy that were measured
with their default settings on at most two processor cores."""


def data(argv: Sequence[str]) -> int:
    match list(argv):
        case [] | ["-h" | "--help", *_]:
            print(f"usage: clearhead data {USAGE}\n\n{ABOUT_DATA}")
        case ["list", *rest]:
            Parser("clearhead data list", "Lists all data sets.").parse(rest)
            show_list()
        case [("get" | "show") as verb, name, *rest] if not name.startswith("-"):
            (get if verb == "get" else show)(name, rest)
        case [("get" | "show") as verb, "-h" | "--help", *_]:
            print(f"usage: clearhead data {verb} NAME\n\n{ABOUT_DATA}")
        case [("get" | "show") as verb, *_]:
            raise ValueError(f"data {verb} needs the name of a data set, got none; see clearhead data list")
        case [other, *_]:
            raise LookupError(f"data takes {USAGE}, got {other!r}; see clearhead data --help")
    return 0


def show_list() -> None:
    from clearhead.data.datasets import DATASETS

    width = max(map(len, DATASETS))
    for name, entry in DATASETS.items():
        print(f"{name:{width}}  {availability(name):14}  {entry.description}")


def availability(name: str) -> str:
    from clearhead.data.cache import has
    from clearhead.data.datasets import DATASETS

    origin = DATASETS[name].origin
    return "not downloaded" if origin == "downloaded" and not has(name) else origin


ORIGINS = {"generated": "generated when it is used", "embedded": "part of the package", "your own": "your own data"}


def get(name: str, argv: Sequence[str]) -> None:
    options = Parser(f"clearhead data get {name}", "Downloads a data set from the first of its sources that has it.")
    options.add_argument("--from", dest="path", metavar="PATH", help="copy it from this folder or archive instead")
    args = options.parse(argv)
    check_name(name)
    if args.path == "":
        raise ValueError("--from must be the path of a folder or an archive, got an empty one")
    from clearhead.data.cache import folder_of, is_complete, obtain
    from clearhead.data.datasets import DATASETS
    from clearhead.data.sources import LocalSource
    from clearhead.data.user_files import user_path

    if DATASETS[name].origin != "downloaded":
        print(f"{name} needs no download: it is {ORIGINS[DATASETS[name].origin]}")
        return
    dataset: CachedDataset = import_module(DATASETS[name].loader.split(":")[0]).CACHED
    next_step = f"to view it, run: clearhead data show {name}"
    if is_complete(dataset):
        print(f"{name} is already in {printable(folder_of(dataset))}, verified; {next_step}")
        return
    sources = [LocalSource(user_path(args.path))] if args.path is not None else dataset.sources
    folder = obtain(dataset, sources, lambda line: print(printable(line), file=sys.stderr))
    print(f"{name} is in {printable(folder)}, verified; {next_step}")


def show(name: str, argv: Sequence[str]) -> None:
    check_name(name)
    from clearhead.cli.options import add_overrides, get_overrides
    from clearhead.cli.train import fixed_settings
    from clearhead.models.config import VisionConfig

    recipe, config = recipe_of(name)
    options = Parser(f"clearhead data show {name}", ABOUT_SHOW)
    options.add_argument("--out", metavar="FILE", help=f"PNG file to write (default: {name}.png)")
    options.add_argument(
        "--seed", type=int, default=0, help="random seed of the examples and their augmentation (default: 0)"
    )
    if isinstance(config.model, VisionConfig):
        options.add_argument("--augmented", action="store_true", help="show each image with its augmented versions")
    options.add_argument("--from", dest="path", help=argparse.SUPPRESS)
    fixed = ("name", "window") if name == "folder" else ("name", "window", "validation", "limit")
    excluded = fixed_settings(recipe) | {f"data.{field}" for field in fixed}
    add_overrides(options, config.data, "data", "data.", excluded)
    args = options.parse(argv)
    if args.path is not None:
        hint = f"did you mean {PATHS[name]}?" if name in PATHS else f"see {options.prog} --help"
        raise ValueError(f"data show {name} has no option --from; {hint}")
    data = override_data(config.data, get_overrides(config, args))
    if name in ("reverse", "digits"):
        show_digits(data, args.seed)
    elif name in ("pronounce", "words", "text"):
        show_symbols(data, args.seed)
    else:
        is_augmented = getattr(args, "augmented", False)
        if data.augmentation != config.data.augmentation and not is_augmented:
            raise ValueError("--data.augmentation.* needs --augmented")
        out = Path(args.out or f"{name}{'-augmented' * is_augmented}.png")
        for note in write_sheet(data, args.seed, out, is_augmented=is_augmented):
            if "clearhead data show" not in note:  # do not suggest the command that is running
                print(printable(note))
        print(f"wrote {printable(out)}")


def recipe_of(name: str) -> tuple[str, "RunConfig"]:
    """Name and config of the first recipe that trains on a data set."""
    configs = ((recipe, entry.make()) for recipe, entry in RECIPES.items())
    return next((recipe, config) for recipe, config in configs if config.data.name == name)


def override_data(data: "DataConfig", overrides: dict[str, Any]) -> "DataConfig":
    """The recipe's data config with the user's overrides.

    A folder is split as in training, because its split is printed. Of other data, no example is held out.
    """
    from clearhead.recipes.registry import with_changes

    changes = {path.removeprefix("data."): value for path, value in overrides.items() if path.startswith("data.")}
    if changes.get("question") == "repeat":
        changes.setdefault("length", 8)
    config: DataConfig = with_changes(data, changes if data.name == "folder" else changes | {"validation": 0})
    if config.name in ("folder", "text") and not (config.folder or config.file):
        raise ValueError(f"{PATHS[config.name]} PATH is required for {config.name}")
    return config


def show_digits(config: "DataConfig", seed: int) -> None:
    """Prints ten sequences and their targets."""
    import torch

    from clearhead.data.datasets import load_dataset

    data = load_dataset(config, seed)
    ids, targets = data.train.get_batch(torch.arange(10))
    for row, target in zip(ids.tolist(), targets.tolist(), strict=True):
        target_text = " ".join(map(str, target)) if isinstance(target, list) else f"{target:g}"
        print(f"{' '.join(map(str, row))}   ->   {target_text}")


def show_symbols(config: "DataConfig", seed: int) -> None:
    """Prints ten random examples: words with their phones, words, or windows of the text."""
    from clearhead.data.datasets import load_dataset
    from clearhead.data.prng import fold_in, permutation
    from clearhead.data.vocab import Vocabulary

    data = load_dataset(config, seed)
    sources, targets = data.train.get_batch(permutation(fold_in(seed, "show"), len(data.train))[:10])
    source_vocab, target_vocab = Vocabulary(data.vocab), Vocabulary(data.classes)
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        text = "".join(source_vocab.decode(source))
        if config.name == "pronounce":
            text += f"   ->   {' '.join(target_vocab.decode(i for i in target if i >= 0))}"
        print(repr(text) if config.name == "text" else printable(text))


def write_sheet(config: "DataConfig", seed: int, out: Path, *, is_augmented: bool) -> tuple[str, ...]:
    """Writes the contact sheet and returns the notes of the data set."""
    from clearhead.data.contact_sheet import augmented_sheet, contact_sheet
    from clearhead.data.datasets import load_dataset
    from clearhead.files import write_atomic

    if out.suffix.lower() != ".png":
        raise ValueError(f"--out must be a .png file, got {str(out)!r}; try --out {out.with_suffix('.png')}")
    png = io.BytesIO()
    data = load_dataset(config, seed)
    sheet = augmented_sheet(data, config, seed) if is_augmented else contact_sheet(data)
    sheet.save(png, "PNG")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, png.getvalue())
    return data.notes


def check_name(name: str) -> None:
    """Raises LookupError for an unknown data set."""
    from clearhead.data.datasets import DataConfig

    DataConfig(name=name)


def recipes(argv: Sequence[str]) -> None:
    options = Parser("clearhead recipes", ABOUT_RECIPES)
    options.add_argument("--json", action="store_true", help="machine-readable output")
    args = options.parse(argv)
    rows = [as_dict(name, recipe) for name, recipe in RECIPES.items()]
    if args.json:
        print(json_text(rows))
        return
    from rich.console import Group

    from clearhead.cli.options import show

    show(
        Group(
            table(rows),
            "",
            "Train a recipe:             clearhead train reverse",
            "Estimate time and memory:   clearhead train mnist --dry-run",
            "List all settings:          clearhead train mnist --help",
        )
    )


def as_dict(name: str, recipe: Recipe) -> dict[str, Any]:
    config, measured = recipe.make(), recipe.measured
    return {
        "recipe": name,
        "description": recipe.description,
        "data": config.data.name,
        "parameters": recipe.parameters,
        "epochs": config.training.epochs,
        "seconds": measured.seconds if measured else None,
        "test_accuracy": measured.accuracy if measured else None,
        "views": N_VIEWS[config.training.tta],
        "after_epochs": (measured.epochs or config.training.epochs) if measured else None,
    }


def table(rows: Sequence[dict[str, Any]]) -> "Table":
    """One line per recipe. A narrow terminal gets no column of data sets."""
    from rich.table import Table

    from clearhead.cli.options import console

    is_wide = console().width >= 110

    grid = Table(box=None, pad_edge=False, header_style="bold")
    grid.add_column("recipe", no_wrap=True)
    grid.add_column("description", min_width=18)
    if is_wide:
        grid.add_column("data")
    for title in ("parameters", "time"):
        grid.add_column(title, justify="right", no_wrap=True)
    grid.add_column("test accuracy", justify="right", min_width=16, no_wrap=is_wide)
    for row in rows:
        parameters = f"{row['parameters']:,}" if row["parameters"] else "depends on data"
        data = [row["data"]] if is_wide else []
        grid.add_row(row["recipe"], row["description"], *data, parameters, *results(row))
    return grid


def results(row: dict[str, Any]) -> tuple[str, str]:
    """Measured time and test accuracy, as text."""
    if row["seconds"] is None:
        return "", "depends on data" if row["parameters"] is None else "not measured yet"
    epochs = "" if row["after_epochs"] == row["epochs"] else f", epoch {row['after_epochs']} of {row['epochs']}"
    views = "" if row["views"] == 1 else f", mean of {row['views']} views"
    return duration(row["seconds"]), f"{row['test_accuracy']:.2%}{epochs}{views}"
