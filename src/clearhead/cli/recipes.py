"""`clearhead recipes`: what can be trained as it is."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from clearhead.cli.parser import Parser
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
        print(json.dumps(rows, indent=2))
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

    config = recipe.make()
    return {
        "recipe": name,
        "what": recipe.what,
        "data": config.data.name,
        "parameters": None if config.data.name in ("folder", "text") else shapes(config.model).parameters,
        "seconds": recipe.measured.seconds if recipe.measured else None,
        "test_accuracy": recipe.measured.accuracy if recipe.measured else None,
    }


def table(rows: Sequence[dict[str, Any]]) -> "Table":
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("recipe", no_wrap=True)
    for title in ("what", "data"):
        shown.add_column(title)
    for title in ("parameters", "time", "test accuracy"):
        shown.add_column(title, justify="right")
    for row in rows:
        numbers = f"{row['parameters']:,}" if row["parameters"] else "by its data"
        measured = (
            (duration(row["seconds"]), f"{row['test_accuracy']:.2%}") if row["seconds"] else ("", "not measured yet")
        )
        shown.add_row(row["recipe"], row["what"], row["data"], numbers, *measured)
    return shown


def duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
