"""`clearhead evaluate`, `confusion` and `predictions`: how well a run predicts its test or validation set."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.cli.options import Parser, reader
from clearhead.messages import json_text, printable
from clearhead.tasks.pronounce import Pronounce

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.data.vocab import Pronunciations
    from clearhead.inference.run import Run
    from clearhead.tasks.report import Report, Row
    from clearhead.tasks.task import PartName

MANY_WORDS = 1_000
"""evaluations of more words are announced, because they take long"""
PREDICTIONS_FIGURE = "figures/predictions.png"

EVALUATE_DETAILS = """\
The metrics are loss and accuracy; for pronounce, word and phoneme error rates,
where each word is compared with the nearest of its pronunciations. If every token
has a target (reverse, words, text), loss and accuracy are means over tokens, and
exact match is the fraction of examples without an error. A run of text has no
test set: use --part validation."""

PREDICTIONS_DETAILS = """\
Shows the first examples of the test set and the most confident mistakes. Loss
and accuracy are those of clearhead evaluate. For images, a figure is drawn.

The probability of a sequence is the product of the probabilities of its
tokens. Predicted numbers have no probability: their largest errors come first.
Runs of words and text are judged token by token, each predicted from the true
tokens before it."""


def add_common(options: Parser) -> None:
    options.add_run()
    options.add_argument("--part", choices=("test", "validation"), help="part of the run's data (default: test)")
    options.add_argument("--beam", metavar="N", type=reader(int), help="pronounce: beam size (default: 5)")
    options.add_argument("--json", action="store_true", help="machine-readable output")


def evaluate(argv: Sequence[str]) -> None:
    options = Parser(
        "clearhead evaluate",
        "Measure the best checkpoint of a run on its test or validation set.",
        usage="clearhead evaluate RUN [options]",
        examples=("clearhead evaluate runs/mine", "clearhead evaluate runs/mine --part validation --json"),
        details=EVALUATE_DETAILS,
    )
    add_common(options)
    options.add_argument("--test", metavar="FILE", type=Path, help="pronounce: evaluate on this dictionary instead")
    options.add_argument("--ensemble", metavar="RUN", nargs="+", default=[], help="pronounce: average with these runs")
    args = options.parse(argv)
    if args.part is not None and args.test is not None:
        raise ValueError(f"--part and --test exclude each other, got --part {args.part} and --test {args.test}")
    part: PartName = args.part or "test"

    from clearhead.cli.options import warn_if_unfinished
    from clearhead.inference.run import Run

    run = Run(args.run)
    warn_if_unfinished(run.path, run.step)
    if isinstance(run.task, Pronounce):
        result = evaluate_words([run, *map(Run, args.ensemble)], part, args.test, args.beam)
    elif args.test is not None or args.beam is not None or args.ensemble:
        raise ValueError(f"--test, --beam and --ensemble need a run of pronounce, got {args.run}")
    else:
        result = with_part(run, part, run.evaluate(part))
    print(json_text(result) if args.json else as_text(result))


def evaluate_words(
    runs: Sequence["Run"], part: "PartName", dictionary: Path | None, beam_size: int | None
) -> dict[str, Any]:
    from clearhead.tasks.pronunciation import beam_of, ensemble, error_rates, words_to_score

    beam, joint = beam_of(beam_size), ensemble(runs)
    words = words_to_score(as_pronounce(joint), joint, part, dictionary)
    name = f"the {part} words" if dictionary is None else f"the words of {dictionary}"
    for run in runs if dictionary is not None else runs[1:]:
        warn_of_overlap(run, words, name)
    if len(words) > MANY_WORDS:
        print(f"Evaluating {len(words):,} words with a beam of {beam.size} ...", file=sys.stderr)
    rates = error_rates(joint, words, beam)
    return {"part": part if dictionary is None else str(dictionary)} | rates.to_dict(beam)


def warn_of_overlap(run: "Run", words: "Pronunciations", name: str) -> None:
    from clearhead.cli.options import warn
    from clearhead.tasks.pronunciation import training_overlap

    match training_overlap(as_pronounce(run), run, words):
        case None:
            warn(f"cannot check whether {run.path} was trained on {name}: its data is missing or has changed")
        case n if n:
            warn(f"{run.path} was trained on {n:,} of {name} ({len(words):,}): the error rates are too optimistic")


def as_pronounce(run: "Run") -> Pronounce:
    assert isinstance(run.task, Pronounce)
    return run.task


def with_part(run: "Run", part: "PartName", metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics with the part of the data and the test-time augmentation before them."""
    from clearhead.data.batches import TTA_DESCRIPTIONS
    from clearhead.inference.evaluate import tta_of

    tta = TTA_DESCRIPTIONS[tta_of(run, part)]
    return {"part": part, **({"tta": tta} if tta else {}), **metrics}


def as_text(result: dict[str, Any]) -> str:
    """A line for each number."""
    from clearhead.tasks.report import format_metrics

    lines = format_metrics(result)
    size = max(map(len, lines))
    return "\n".join(f"{name:{size}}  {printable(text)}" for name, text in lines.items())


def confusion(argv: Sequence[str]) -> None:
    options = Parser(
        "clearhead confusion",
        "Plot the confusion matrix of a run on its test set: actual classes as rows, predicted ones as columns.",
        usage="clearhead confusion RUN [options]",
        examples=("clearhead confusion runs/mine", "clearhead confusion runs/mine --out confusion.pdf"),
    )
    options.add_run()
    options.add_figure("figures/confusion.png in the run's folder")
    args = options.parse(argv)

    from clearhead.cli.options import say, warn_if_unfinished
    from clearhead.data import N_VIEWS
    from clearhead.drawing import check_suffix, save_figure
    from clearhead.inference.evaluate import confusion, draw_confusion
    from clearhead.inference.run import Run

    if args.out:
        check_suffix(args.out)
    run = Run(args.run)
    warn_if_unfinished(run.path, run.step)
    n_views = N_VIEWS[run.config.training.tta]
    note = "" if n_views == 1 else f"mean of {n_views} views"

    def announce() -> None:
        print("Evaluating the test set, then drawing 1 figure ...", file=sys.stderr, flush=True)

    figure = draw_confusion(confusion(run, announce), run.classes, note)
    say(save_figure(figure, args.out or run.path / "figures/confusion.png"))


def predictions(argv: Sequence[str]) -> None:
    options = Parser(
        "clearhead predictions",
        "Compare the predictions of a run with the targets, and show its most confident mistakes.",
        usage="clearhead predictions RUN [options]",
        examples=("clearhead predictions runs/mine", "clearhead predictions runs/mine --n 40 --out mistakes.pdf"),
        details=PREDICTIONS_DETAILS,
    )
    add_common(options)
    options.add_argument(
        "--n", metavar="N", type=reader(int), default=16, help="number of examples, and of mistakes (default: 16)"
    )
    options.add_figure(f"{PREDICTIONS_FIGURE} in the run's folder")
    args = options.parse(argv)
    part: PartName = args.part or "test"

    from clearhead.cli.options import say, warn_if_unfinished
    from clearhead.drawing import check_suffix, save_figure
    from clearhead.inference.evaluate import draw_report, report
    from clearhead.inference.run import Run
    from clearhead.tasks.pronunciation import beam_of, report_words

    run = Run(args.run)
    if args.beam is not None and not isinstance(run.task, Pronounce):
        raise ValueError(f"--beam needs a run of pronounce, got {run.path}")
    takes_images = run.task.input_option == "image"
    if args.out is not None and not takes_images:
        raise ValueError(f"--out needs a run on images, got {run.path}, which takes {run.task.input_kind}")
    warn_if_unfinished(run.path, run.step)
    out = (args.out or run.path / PREDICTIONS_FIGURE) if takes_images else None
    if out is not None:
        check_suffix(out)

    def announce() -> None:
        print(f"Evaluating the {part} set ...", file=sys.stderr, flush=True)

    if args.beam is None:
        result = report(run, part, args.n, announce)
    else:
        result = report_words(as_pronounce(run), run, part, args.n, beam_of(args.beam), announce)
    if args.json:
        print(json_text(as_dict(run, result, part) | {"figure": None if out is None else str(out)}))
    else:
        show_report(run, result, part)
    if out is not None:
        print("Drawing 1 figure ...", file=sys.stderr, flush=True)
        save_figure(draw_report(run, result, part), out)
        if not args.json:
            say(out)


def as_dict(run: "Run", report: "Report", part: "PartName") -> dict[str, Any]:
    rows = {"first": [asdict(row) for row in report.first], "mistakes": [asdict(row) for row in report.mistakes]}
    counts = {"unit": report.unit, "total": report.total, "wrong": report.wrong}
    return with_part(run, part, report.metrics) | counts | rows


def show_report(run: "Run", report: "Report", part: "PartName") -> None:
    from clearhead.cli.options import say, show

    print(as_text(with_part(run, part, report.metrics)))
    for title, rows in zip(report.titles(part), (report.first, report.mistakes), strict=True):
        if rows:
            print(f"\n{title}:")
            show(rows_table(rows))
    if not report.mistakes:
        print(f"\nAll {report.total:,} {report.unit} are correct.")
    elif part == "test":
        row = report.mistakes[0]
        option = f'--text "{row.input}"' if row.index is None else f"--sample {row.index}"
        print()
        say(f"See what the model attends to: clearhead look {run.path} {option}")


def rows_table(rows: Sequence["Row"]) -> "Table":
    """A table of predictions; empty columns are omitted."""
    from rich.table import Table

    from clearhead.tasks.report import columns_of

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="none")
    columns = columns_of(rows)
    for name in columns:
        table.add_column(name, justify="right" if name in ("index", "probability") else "left", overflow="fold")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*map(printable, cells))
    return table
