"""`clearhead evaluate`: a run, and how good it is."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.cli.overrides import reader
from clearhead.cli.parser import Parser
from clearhead.messages import json_text, printable

if TYPE_CHECKING:
    from clearhead.data.dictionary import Pronunciations
    from clearhead.serving.evaluating import PartName
    from clearhead.serving.session import Session

ABOUT = """\
How good a run's best checkpoint is. Of pronounce: word and phoneme error rate,
each word against the nearest of its pronunciations; of any other run: loss and
accuracy. Where each token has an answer (reverse, words, text), they are those
of one token, the loss in nats, and "whole" is the share of examples without a
mistake. A run of text has no test part: measure it with --part validation."""

EXAMPLES = """\
examples
  clearhead evaluate runs/mine
  clearhead evaluate runs/mine --part validation --beam 1
  clearhead evaluate runs/mine --test other.dict --json
  clearhead evaluate runs/mine --with runs/other runs/third"""

MANY = 1_000
"""words that nobody waits for without being told"""


def run(argv: Sequence[str]) -> None:
    options = Parser("clearhead evaluate", ABOUT)
    options.usage = "clearhead evaluate RUN [options]"
    options.epilog = EXAMPLES
    options.add_argument("run", metavar="RUN", help="the path of a run, or its name in runs/")
    options.add_argument("--part", choices=("test", "validation"), help="part of the run's data (default: test)")
    options.add_argument("--test", metavar="FILE", type=Path, help="pronounce: a dictionary to test on instead")
    options.add_argument("--beam", metavar="N", type=reader(int), help="pronounce: beam size (default: 5)")
    options.add_argument(
        "--with",
        metavar="RUN",
        nargs="+",
        default=[],
        dest="others",
        help="pronounce: runs that answer together with it",
    )
    options.add_argument("--json", action="store_true", help="machine-readable output")
    args = options.parse(argv)
    if args.part is not None and args.test is not None:
        raise ValueError(f"--part selects from the run's own data and excludes --test, got both (--test {args.test})")
    part: PartName = args.part or "test"

    from clearhead.cli.terminal import warn_if_unfinished
    from clearhead.serving.session import Session

    session = Session(args.run)
    warn_if_unfinished(session.path, session.step)
    if session.config.objective == "written":
        result = rates([session, *map(Session, args.others)], part, args.test, args.beam)
    elif args.test is not None or args.beam is not None or args.others:
        raise ValueError(f"--test, --beam and --with are for runs of pronounce, got {args.run}; leave them out")
    else:
        result = numbers(session, part)
    print(json_text(result) if args.json else as_text(result))


def rates(sessions: Sequence["Session"], part: "PartName", test: Path | None, beam: int | None) -> dict[str, Any]:
    from clearhead.serving.evaluating import error_rates, words_to_score
    from clearhead.serving.pronouncing import beam_of, together

    how, joined = beam_of(beam), together(sessions)
    words = words_to_score(joined, part, test)
    what = f"the {part} words" if test is None else f"the words of {test}"
    for each in sessions if test is not None else sessions[1:]:
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


def warn_of_learnt(session: "Session", words: "Pronunciations", what: str) -> None:
    """Words that were learnt are no test."""
    from clearhead.cli.terminal import warn
    from clearhead.serving.evaluating import learnt

    match learnt(session, words):
        case None:
            warn(f"whether {session.path} learnt {what} is not known: its own files are not there, or changed")
        case n if n:
            warn(f"{session.path} learnt {n:,} of {what} ({len(words):,}) in training, which flatters the rates")


def numbers(session: "Session", part: "PartName") -> dict[str, Any]:
    from clearhead.data.views import NAMES
    from clearhead.serving.evaluating import loss_and_accuracy, views_at

    views = NAMES[views_at(session, part)]
    return {"part": part, **({"answers": views} if views else {}), **loss_and_accuracy(session, part)}


def as_text(result: dict[str, Any]) -> str:
    shown = {}
    for name, value in result.items():
        is_share = name.endswith("rate") or name in ("accuracy", "whole")
        shown[name.replace("_", " ")] = f"{value:.2%}" if is_share else f"{value:.4f}" if name == "loss" else value
    size = max(map(len, shown))
    return "\n".join(
        f"{name:{size}}  {value:,}" if type(value) is int else f"{name:{size}}  {printable(value)}"
        for name, value in shown.items()
    )
