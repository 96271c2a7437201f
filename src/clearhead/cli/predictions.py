"""`clearhead predictions`: a run's predictions beside the truth, and its worst mistakes."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.cli.overrides import reader
from clearhead.cli.parser import Parser
from clearhead.messages import json_text, printable

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.serving.evaluating import PartName
    from clearhead.serving.session import Session
    from clearhead.serving.testing import Report, Row

ABOUT = """\
Compare the predictions of a run's best checkpoint with the truth: the first
examples of the test set, and the worst mistakes, which are the wrong
predictions that the model was most confident of. Loss and accuracy are those
of clearhead evaluate. For images, both are drawn into figures/predictions.png.

The probability of a sequence is the product of the probabilities of its
tokens. Predicted numbers have no probability: their largest errors come first.
Runs of words and text are judged token by token, each predicted from the true
tokens before it."""

EXAMPLES = """\
examples
  clearhead predictions runs/mine
  clearhead predictions runs/mine --n 40 --out mistakes.pdf
  clearhead predictions runs/text-0 --part validation
  clearhead predictions runs/mine --json"""

DEFAULT_NAME = "figures/predictions.png"


def run(argv: Sequence[str]) -> None:
    options = Parser("clearhead predictions", ABOUT)
    options.usage = "clearhead predictions RUN [options]"
    options.epilog = EXAMPLES
    options.add_argument("run", metavar="RUN", help="the folder of a run, such as runs/mine")
    options.add_argument(
        "--n", metavar="N", type=reader(int), default=16, help="predictions of each kind (default: 16)"
    )
    options.add_argument(
        "--part", choices=("test", "validation"), default="test", help="part of the run's data (default: test)"
    )
    options.add_argument("--beam", metavar="N", type=reader(int), help="pronounce: beam size (default: 5)")
    options.add_argument(
        "--out", metavar="FILE", type=Path, help=f"a .png, .svg or .pdf (default: {DEFAULT_NAME} in the run's folder)"
    )
    options.add_argument("--json", action="store_true", help="machine-readable output")
    args = options.parse(argv)

    from clearhead.cli.terminal import say, warn_if_unfinished
    from clearhead.drawing import check_suffix
    from clearhead.serving.pronouncing import beam_of
    from clearhead.serving.session import Session
    from clearhead.serving.testing import report

    session = Session(args.run)
    check_options(session, args.out, args.beam)
    warn_if_unfinished(session.path, session.step)
    out = (args.out or session.path / DEFAULT_NAME) if session.takes_pictures else None
    if out is not None:
        check_suffix(out)

    def announce() -> None:
        print(f"Evaluating the {args.part} set ...", file=sys.stderr, flush=True)

    found = report(session, args.part, args.n, beam_of(args.beam), announce)
    if args.json:
        print(json_text(as_dict(session, found, args.part) | {"figure": None if out is None else str(out)}))
    else:
        show_report(session, found, args.part)
    if out is not None:
        draw(session, found, args.part, out)
        if not args.json:
            say(out)


def check_options(session: "Session", out: Path | None, beam: int | None) -> None:
    if beam is not None and session.config.objective != "written":
        raise ValueError(f"--beam is for runs of pronounce, got {session.path}")
    if out is not None and not session.takes_pictures:
        raise ValueError(f"--out is for runs on images, got {session.path}, whose predictions are printed as text")


def draw(session: "Session", found: "Report", part: "PartName", out: Path) -> None:
    from clearhead.drawing import save_figure
    from clearhead.serving.gallery import draw_report

    print("Drawing 1 figure ...", file=sys.stderr, flush=True)
    save_figure(draw_report(session, found, part), out)


def summary(session: "Session", found: "Report", part: "PartName") -> dict[str, Any]:
    """What `clearhead evaluate` says of the same part."""
    from clearhead.data.views import NAMES
    from clearhead.serving.evaluating import views_at

    views = NAMES[views_at(session, part)]
    return {"part": part, **({"answers": views} if views else {}), **found.metrics}


def as_dict(session: "Session", found: "Report", part: "PartName") -> dict[str, Any]:
    rows = {"first": [asdict(row) for row in found.first], "mistakes": [asdict(row) for row in found.mistakes]}
    counted = {"unit": found.unit, "total": found.total, "wrong": found.wrong}
    return summary(session, found, part) | counted | rows


def show_report(session: "Session", found: "Report", part: "PartName") -> None:
    from clearhead.cli.evaluate import as_text
    from clearhead.cli.terminal import say, show
    from clearhead.serving.gallery import titles

    print(as_text(summary(session, found, part)))
    for title, rows in zip(titles(found, part), (found.first, found.mistakes), strict=True):
        if rows:
            print(f"\n{title}:")
            show(table_of(rows))
    if not found.mistakes:
        print(f"\nAll {found.total:,} {found.unit} are correct.")
    elif part == "test":
        example = found.mistakes[0]
        which = f'--text "{example.input}"' if example.index is None else f"--sample {example.index}"
        print()
        say(f"See what the model attends to: clearhead look {session.path} {which}")


def percent(probability: float) -> str:
    """54.2%, or 3.1e-05 for the probability of a long sequence."""
    return f"{probability:.1%}" if probability >= 1e-3 or probability == 0 else f"{probability:.1e}"


def table_of(rows: Sequence["Row"]) -> "Table":
    """Columns that no row has a value in are left out."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="none")
    some_are_correct = any(row.correct for row in rows)
    columns: dict[str, list[str | None]] = {
        "index": [None if row.index is None else str(row.index) for row in rows],
        "input": [row.input for row in rows],
        "predicted": [row.predicted for row in rows],
        "actual": [row.actual for row in rows],
        "probability": [None if row.probability is None else percent(row.probability) for row in rows],
        "": ["wrong" if some_are_correct and not row.correct else None for row in rows],
    }
    kept = {name: cells for name, cells in columns.items() if any(cell is not None for cell in cells)}
    for name in kept:
        table.add_column(name, justify="right" if name in ("index", "probability") else "left", overflow="fold")
    for cells in zip(*kept.values(), strict=True):
        table.add_row(*(printable(cell or "") for cell in cells))
    return table
