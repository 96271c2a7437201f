"""`clearhead evaluate`: a run, and how good it is."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.cli.options import Parser, reader
from clearhead.messages import json_text, printable

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.data.vocab import Pronunciations
    from clearhead.inference.evaluate import PartName
    from clearhead.inference.predictions import Report, Row
    from clearhead.inference.run import Run

ABOUT_EVALUATE = """\
How good a run's best checkpoint is. Of pronounce: word and phoneme error rate,
each word against the nearest of its pronunciations; of any other run: loss and
accuracy. Where each token has an answer (reverse, words, text), they are those
of one token, the loss in nats, and "exact_match" is the share of examples without a
mistake. A run of text has no test part: measure it with --part validation."""

EVALUATE_EXAMPLES = """\
examples
  clearhead evaluate runs/mine
  clearhead evaluate runs/mine --part validation --beam 1
  clearhead evaluate runs/mine --test other.dict --json
  clearhead evaluate runs/mine --ensemble runs/other runs/third"""

MANY = 1_000
"""words that nobody waits for without being told"""


def evaluate(argv: Sequence[str]) -> None:
    options = Parser("clearhead evaluate", ABOUT_EVALUATE)
    options.usage = "clearhead evaluate RUN [options]"
    options.epilog = EVALUATE_EXAMPLES
    options.add_argument("run", metavar="RUN", help="the path of a run, or its name in runs/")
    options.add_argument("--part", choices=("test", "validation"), help="part of the run's data (default: test)")
    options.add_argument("--test", metavar="FILE", type=Path, help="pronounce: a dictionary to test on instead")
    options.add_argument("--beam", metavar="N", type=reader(int), help="pronounce: beam size (default: 5)")
    options.add_argument(
        "--ensemble",
        metavar="RUN",
        nargs="+",
        default=[],
        dest="ensemble",
        help="pronounce: runs that answer together with it",
    )
    options.add_argument("--json", action="store_true", help="machine-readable output")
    args = options.parse(argv)
    if args.part is not None and args.test is not None:
        raise ValueError(f"--part selects from the run's own data and excludes --test, got both (--test {args.test})")
    part: PartName = args.part or "test"

    from clearhead.cli.options import warn_if_unfinished
    from clearhead.inference.run import Run

    run = Run(args.run)
    warn_if_unfinished(run.path, run.step)
    if run.config.objective == "seq2seq":
        result = rates([run, *map(Run, args.ensemble)], part, args.test, args.beam)
    elif args.test is not None or args.beam is not None or args.ensemble:
        raise ValueError(f"--test, --beam and --ensemble are for runs of pronounce, got {args.run}; leave them out")
    else:
        result = numbers(run, part)
    print(json_text(result) if args.json else as_text(result))


def rates(runs: Sequence["Run"], part: "PartName", test: Path | None, beam: int | None) -> dict[str, Any]:
    from clearhead.inference.evaluate import error_rates, words_to_score
    from clearhead.inference.g2p import beam_of, ensemble

    how, joined = beam_of(beam), ensemble(runs)
    words = words_to_score(joined, part, test)
    what = f"the {part} words" if test is None else f"the words of {test}"
    for each in runs if test is not None else runs[1:]:
        warn_of_learnt(each, words, what)
    if len(words) > MANY:
        print(f"{len(words):,} words are said, {how.size} ways each: this may take minutes ...", file=sys.stderr)
    found = error_rates(joined, words, how)
    return {
        "part": part if test is None else str(test),
        "beam": how.size,
        **asdict(found),
        "word_error_rate": found.word_error_rate,
        "phoneme_error_rate": found.phoneme_error_rate,
    }


def warn_of_learnt(run: "Run", words: "Pronunciations", what: str) -> None:
    """Words that were learnt are no test."""
    from clearhead.cli.options import warn
    from clearhead.inference.evaluate import learnt

    match learnt(run, words):
        case None:
            warn(f"whether {run.path} learnt {what} is not known: its own files are not there, or changed")
        case n if n:
            warn(f"{run.path} learnt {n:,} of {what} ({len(words):,}) in training, which flatters the rates")


def numbers(run: "Run", part: "PartName") -> dict[str, Any]:
    from clearhead.data.augment import NAMES
    from clearhead.inference.evaluate import loss_and_accuracy, tta_of

    tta = NAMES[tta_of(run, part)]
    return {"part": part, **({"tta": tta} if tta else {}), **loss_and_accuracy(run, part)}


def as_text(result: dict[str, Any]) -> str:
    shown = {}
    for name, value in result.items():
        is_share = name.endswith("rate") or name in ("accuracy", "exact_match")
        shown[name.replace("_", " ")] = f"{value:.2%}" if is_share else f"{value:.4f}" if name == "loss" else value
    size = max(map(len, shown))
    return "\n".join(
        f"{name:{size}}  {value:,}" if type(value) is int else f"{name:{size}}  {printable(value)}"
        for name, value in shown.items()
    )


# `clearhead confusion`: from the name of a run to its confusion matrix, as a picture.


ABOUT_CONFUSION = """\
Plots the confusion matrix of a run's best checkpoint on its test set: a row for
each class, a column for each predicted class."""


def confusion(argv: Sequence[str]) -> None:
    options = Parser("clearhead confusion", ABOUT_CONFUSION)
    options.usage = "clearhead confusion RUN [options]"
    options.add_argument("run", metavar="RUN", help="the path of a run, or its name in runs/")
    options.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="a .png, .svg or .pdf (default: figures/confusion.png in the run's folder)",
    )
    args = options.parse(argv)

    from clearhead.cli.options import say, warn_if_unfinished
    from clearhead.data.config import N_VIEWS
    from clearhead.drawing import check_suffix, save_figure
    from clearhead.inference.evaluate import draw_confusion
    from clearhead.inference.predictions import confusion
    from clearhead.inference.run import Run

    if args.out:
        check_suffix(args.out)
    run = Run(args.run)
    warn_if_unfinished(run.path, run.step)
    n_views = N_VIEWS[run.config.training.tta]
    note = "" if n_views == 1 else f"mean of {n_views} views"
    figure = draw_confusion(confusion(run, announce), run.classes, note)
    say(save_figure(figure, args.out or run.path / "figures/confusion.png"))


def announce() -> None:
    print("Evaluating the test set, then drawing 1 figure ...", file=sys.stderr, flush=True)


# `clearhead predictions`: a run's predictions beside the truth, and its worst mistakes.


ABOUT_PREDICTIONS = """\
Compare the predictions of a run's best checkpoint with the truth: the first
examples of the test set, and the worst mistakes, which are the wrong
predictions that the model was most confident of. Loss and accuracy are those
of clearhead evaluate. For images, both are drawn into figures/predictions.png.

The probability of a sequence is the product of the probabilities of its
tokens. Predicted numbers have no probability: their largest errors come first.
Runs of words and text are judged token by token, each predicted from the true
tokens before it."""

PREDICTIONS_EXAMPLES = """\
examples
  clearhead predictions runs/mine
  clearhead predictions runs/mine --n 40 --out mistakes.pdf
  clearhead predictions runs/text-0 --part validation
  clearhead predictions runs/mine --json"""

DEFAULT_NAME = "figures/predictions.png"


def predictions(argv: Sequence[str]) -> None:
    options = Parser("clearhead predictions", ABOUT_PREDICTIONS)
    options.usage = "clearhead predictions RUN [options]"
    options.epilog = PREDICTIONS_EXAMPLES
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

    from clearhead.cli.options import say, warn_if_unfinished
    from clearhead.drawing import check_suffix
    from clearhead.inference.g2p import beam_of
    from clearhead.inference.predictions import report
    from clearhead.inference.run import Run

    run = Run(args.run)
    check_options(run, args.out, args.beam)
    warn_if_unfinished(run.path, run.step)
    out = (args.out or run.path / DEFAULT_NAME) if run.input_kind == "images" else None
    if out is not None:
        check_suffix(out)

    def announce() -> None:
        print(f"Evaluating the {args.part} set ...", file=sys.stderr, flush=True)

    found = report(run, args.part, args.n, beam_of(args.beam), announce)
    if args.json:
        print(json_text(as_dict(run, found, args.part) | {"figure": None if out is None else str(out)}))
    else:
        show_report(run, found, args.part)
    if out is not None:
        draw(run, found, args.part, out)
        if not args.json:
            say(out)


def check_options(run: "Run", out: Path | None, beam: int | None) -> None:
    if beam is not None and run.config.objective != "seq2seq":
        raise ValueError(f"--beam is for runs of pronounce, got {run.path}")
    if out is not None and run.input_kind != "images":
        raise ValueError(f"--out is for runs on images, got {run.path}, whose predictions are printed as text")


def draw(run: "Run", found: "Report", part: "PartName", out: Path) -> None:
    from clearhead.drawing import save_figure
    from clearhead.inference.predictions import draw_report

    print("Drawing 1 figure ...", file=sys.stderr, flush=True)
    save_figure(draw_report(run, found, part), out)


def summary(run: "Run", found: "Report", part: "PartName") -> dict[str, Any]:
    """What `clearhead evaluate` says of the same part."""
    from clearhead.data.augment import NAMES
    from clearhead.inference.evaluate import tta_of

    tta = NAMES[tta_of(run, part)]
    return {"part": part, **({"tta": tta} if tta else {}), **found.metrics}


def as_dict(run: "Run", found: "Report", part: "PartName") -> dict[str, Any]:
    rows = {"first": [asdict(row) for row in found.first], "mistakes": [asdict(row) for row in found.mistakes]}
    counted = {"unit": found.unit, "total": found.total, "wrong": found.wrong}
    return summary(run, found, part) | counted | rows


def show_report(run: "Run", found: "Report", part: "PartName") -> None:
    from clearhead.cli.options import say, show
    from clearhead.inference.predictions import titles

    print(as_text(summary(run, found, part)))
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
        say(f"See what the model attends to: clearhead look {run.path} {which}")


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
