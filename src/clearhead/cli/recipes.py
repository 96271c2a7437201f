"""`clearhead recipes`: what can be trained as it is."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from clearhead.cli.parser import Parser
from clearhead.data.config import N_VIEWS
from clearhead.messages import duration, json_text
from clearhead.recipes.all import RECIPES, Recipe

if TYPE_CHECKING:
    from rich.table import Table

ABOUT = """\
Experiments that are ready to run, with what they took and reached when they
were measured, unchanged, on at most two processor cores."""


def run(argv: Sequence[str]) -> None:
    options = Parser("clearhead recipes", ABOUT)
    options.add_argument("--json", action="store_true", help="everything, for programs")
    args = options.parse(argv)
    rows = [as_dict(name, recipe) for name, recipe in RECIPES.items()]
    if args.json:
        print(json_text(rows))
        return
    from rich.console import Group

    from clearhead.cli.terminal import show

    show(
        Group(
            table(rows),
            "",
            "Train one:           clearhead train reverse",
            "What it will take:   clearhead train mnist --dry-run",
            "All its numbers:     clearhead train mnist --help",
        )
    )


def as_dict(name: str, recipe: Recipe) -> dict[str, Any]:
    from clearhead.models.shapes import shapes

    config, measured = recipe.make(), recipe.measured
    return {
        "recipe": name,
        "what": recipe.what,
        "data": config.data.name,
        "parameters": None if config.data.name in ("folder", "text") else shapes(config.model).parameters,
        "epochs": config.training.epochs,
        "seconds": measured.seconds if measured else None,
        "test_accuracy": measured.accuracy if measured else None,
        "views": N_VIEWS[config.training.views],
        "after_epochs": (measured.epochs or config.training.epochs) if measured else None,
    }


def table(rows: Sequence[dict[str, Any]]) -> "Table":
    """Without the data sets where the terminal is too narrow for them."""
    from rich.table import Table

    from clearhead.cli.terminal import console

    is_wide = console().width >= 110

    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("recipe", no_wrap=True)
    shown.add_column("what", min_width=18)
    if is_wide:
        shown.add_column("data")
    for title in ("parameters", "time"):
        shown.add_column(title, justify="right", no_wrap=True)
    shown.add_column("test accuracy", justify="right", min_width=16, no_wrap=is_wide)
    for row in rows:
        numbers = f"{row['parameters']:,}" if row["parameters"] else "by its data"
        shown.add_row(row["recipe"], row["what"], *([row["data"]] if is_wide else []), numbers, *results(row))
    return shown


def results(row: dict[str, Any]) -> tuple[str, str]:
    """Time and accuracy."""
    if row["seconds"] is None:
        return "", "by its data" if row["parameters"] is None else "not measured yet"
    of = "" if row["after_epochs"] == row["epochs"] else f", epoch {row['after_epochs']} of {row['epochs']}"
    views = "" if row["views"] == 1 else f", mean of {row['views']} views"
    return duration(row["seconds"]), f"{row['test_accuracy']:.2%}{of}{views}"
