"""`clearhead data` lists, downloads and shows data sets; `clearhead recipes` lists the recipes."""

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.cli.options import Parser
from clearhead.data import N_VIEWS
from clearhead.messages import duration, json_text, printable
from clearhead.recipes import RECIPES, Recipe
from clearhead.tasks import TASKS, find_task
from clearhead.tasks.images import ImageTask
from clearhead.tasks.task import Task

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.data import Augmentation
    from clearhead.data.dataset import Dataset
    from clearhead.training.config import RunConfig

ABOUT_DATA = """\
List, download and show data sets.

  clearhead data list                      list all data sets
  clearhead data get NAME                  download a data set
  clearhead data get NAME --from PATH      copy it from a folder or an archive
  clearhead data show NAME [--out FILE]    save images as a contact sheet, or print
                                           examples as text
  clearhead data show NAME --augmented     show images beside augmented versions

Downloaded data is stored in ~/.cache/clearhead, or in the folder CLEARHEAD_CACHE,
and verified by SHA-256. `data show` accepts the --data options of `train`:
clearhead data show folder --data.folder PATH"""

ABOUT_SHOW = """\
Save a contact sheet of images as a PNG file, with a row of training images for
each class. With --augmented, each row contains an image and augmented versions
of it. Examples of digits, words and text are printed."""

USAGE = "list, get NAME or show NAME"

ABOUT_RECIPES = """\
List the recipes with the training time and test accuracy that were measured with
default settings on at most two CPU cores."""


def data(argv: Sequence[str]) -> int:
    match list(argv):
        case [] | ["-h" | "--help", *_]:
            print(f"usage: clearhead data list|get|show [NAME] [options]\n\n{ABOUT_DATA}")
        case ["list", *rest]:
            Parser("clearhead data list", "List all data sets.").parse(rest)
            show_list()
        case [("get" | "show") as verb, name, *rest] if not name.startswith("-"):
            (get if verb == "get" else show)(name, rest)
        case [("get" | "show") as verb, "-h" | "--help", *_]:
            print(f"usage: clearhead data {verb} NAME [options]\n\n{ABOUT_DATA}")
        case [("get" | "show") as verb, *_]:
            raise ValueError(f"data {verb} needs the name of a data set; clearhead data list shows all names")
        case [other, *_]:
            raise LookupError(f"data needs {USAGE}, got {other!r}; see clearhead data --help")
    return 0


def show_list() -> None:
    width = max(map(len, TASKS))
    for name, entry in TASKS.items():
        print(f"{name:{width}}  {availability(name):14}  {entry.description}")


def availability(name: str) -> str:
    """generated, embedded, downloaded, not downloaded or your own"""
    from clearhead.data.downloads import has

    origin = TASKS[name].origin
    return "not downloaded" if origin == "downloaded" and not has(name) else origin


ORIGINS = {"generated": "generated on the fly", "embedded": "part of the package", "your own": "your own data"}


def get(name: str, argv: Sequence[str]) -> None:
    options = Parser(f"clearhead data get {name}", "Download a data set from the first source that is available.")
    options.add_argument("--from", dest="path", metavar="PATH", help="copy it from a folder or an archive instead")
    args = options.parse(argv)
    find_task(name)
    if args.path == "":
        raise ValueError("--from must be the path of a folder or an archive, got ''")
    from clearhead.data.downloads import LocalSource, folder_of, is_complete, obtain
    from clearhead.data.user_files import user_path

    task = find_task(name)
    if (dataset := task.download()) is None:
        print(f"{name} does not need a download: it is {ORIGINS[task.origin]}")
        return
    next_step = f"to view it, run: clearhead data show {name}"
    if is_complete(dataset):
        print(f"{name} is already in {printable(folder_of(dataset))}, verified; {next_step}")
        return
    sources = [LocalSource(user_path(args.path))] if args.path is not None else dataset.sources
    folder = obtain(dataset, sources, lambda line: print(printable(line), file=sys.stderr))
    print(f"{name} is in {printable(folder)}, verified; {next_step}")


def show(name: str, argv: Sequence[str]) -> None:
    find_task(name)
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
    excluded = fixed_settings(recipe) | {f"data.{field}" for field in config.task.options_not_shown}
    add_overrides(options, config.data, "data", "data.", excluded)
    args = options.parse(argv)
    if args.path is not None:
        fields = config.task.file_fields
        hint = f"did you mean --data.{fields[0].replace('_', '-')}?" if fields else f"see {options.prog} --help"
        raise ValueError(f"data show {name} has no option --from; {hint}")
    task = override_data(config.data, get_overrides(config, args))
    data = task.load(args.seed)
    lines = task.show_examples(data, args.seed)
    if lines:
        print("\n".join(lines))
        return
    augmentation = None
    if isinstance(task, ImageTask) and isinstance(config.task, ImageTask):
        if args.augmented:
            augmentation = task.augmentation
        elif task.augmentation != config.task.augmentation:
            raise ValueError("--data.augmentation.* needs --augmented")
    out = Path(args.out or f"{name}{'' if augmentation is None else '-augmented'}.png")
    write_sheet(data, args.seed, out, augmentation)
    for note in data.notes:
        if "clearhead data show" not in note:  # do not suggest the command that is running
            print(printable(note))
    print(f"wrote {printable(out)}")


def recipe_of(name: str) -> tuple[str, "RunConfig"]:
    """Name and config of the first recipe that trains on a data set."""
    configs = ((recipe, entry.make()) for recipe, entry in RECIPES.items())
    found = next(((recipe, config) for recipe, config in configs if config.data.name == name), None)
    if found is None:
        raise LookupError(f"{name} has no examples to show: {find_task(name).description}")
    return found


def override_data(task: Task, overrides: dict[str, Any]) -> Task:
    """The recipe's task with the user's overrides, for display."""
    from clearhead.recipes import with_changes

    changes = {path.removeprefix("data."): value for path, value in overrides.items() if path.startswith("data.")}
    changed: Task = with_changes(task, changes)
    if changed.required and not getattr(changed, changed.required):
        raise ValueError(f"--data.{changed.required} PATH is required for {changed.name}")
    return changed.for_display()


def write_sheet(data: "Dataset", seed: int, out: Path, augmentation: "Augmentation | None") -> None:
    """Writes the contact sheet, with augmented versions if an augmentation is given."""
    from clearhead.files import write_atomic
    from clearhead.tasks.report import augmented_sheet, contact_sheet

    if out.suffix.lower() != ".png":
        raise ValueError(f"--out must be a .png file, got {str(out)!r}; try --out {out.with_suffix('.png')}")
    png = io.BytesIO()
    sheet = contact_sheet(data) if augmentation is None else augmented_sheet(data, augmentation, seed)
    sheet.save(png, "PNG")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, png.getvalue())


def recipes(argv: Sequence[str]) -> None:
    options = Parser("clearhead recipes", ABOUT_RECIPES, examples=("clearhead recipes", "clearhead recipes --json"))
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
