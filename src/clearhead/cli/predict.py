"""`clearhead predict`: picture files, folders of them, words or digits; a run's answers, as text or as JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from clearhead.cli.overrides import reader
from clearhead.cli.parser import Parser

if TYPE_CHECKING:
    from clearhead.serving.session import Answer, Session

ABOUT = """\
What a run's best checkpoint answers, for pictures of your own, words or digits.
Pictures become squares and are resized exactly as in training (the run's
data.fit), and seen in as many views as at the run's test (training.views); words are
pronounced, with the next best answers and the probability of each. Their order
is by probability for their length, so that short answers have no advantage, but
none that is less probable than the greedy answer (--beam 1) comes before it."""

EXAMPLES = """\
examples
  clearhead predict runs/mine photo.jpg more/ --json
  clearhead predict runs/demo my-digit.png --invert
  clearhead predict runs/pronounce-0 thorough through --beam 10
  clearhead predict runs/pronounce-0 thorough --with runs/pronounce-1
  clearhead predict runs/reverse-0 --ids 3 1 4 1 5 9 2 6 5 3 5 8 9 7 9 3"""


def run(argv: Sequence[str]) -> None:
    options = Parser("clearhead predict", ABOUT)
    options.usage = "clearhead predict RUN IMAGE|WORD... [options]"
    options.epilog = EXAMPLES
    options.add_argument("run", metavar="RUN", help="the folder of a run, such as runs/mine")
    options.add_argument("asked", metavar="IMAGE|WORD", nargs="*", help="picture files and folders of them, or words")
    options.add_argument("--ids", metavar="N", nargs="+", type=int, help="digits, for a run of reverse or whole")
    options.add_argument("--beam", metavar="N", type=reader(int), help="words: answers followed and shown (now 5)")
    options.add_argument(
        "--with", metavar="RUN", nargs="+", default=[], dest="others", help="words: runs that answer together with it"
    )
    options.add_argument("--invert", action="store_true", help="dark becomes light: MNIST's digits are white on black")
    options.add_argument("--json", action="store_true", help="all probabilities, for programs")
    args = options.parse(argv)
    if bool(args.asked) == bool(args.ids):
        came = "both" if args.ids else "neither"
        raise ValueError(
            f"predict takes picture files, words or --ids, one of them, got {came}; they come before --with, see "
            "clearhead predict --help"
        )

    from clearhead.cli.terminal import warn
    from clearhead.serving.session import Session

    session = Session(args.run)
    if args.invert and not session.takes_pictures:
        raise ValueError(f"--invert is for pictures, got {args.run}, a run of {session.takes}; leave it out")
    if args.asked and session.takes == "words":
        print(spoken([session, *map(Session, args.others)], args.asked, args.beam, as_json=args.json))
        return
    if args.beam is not None or args.others:
        raise ValueError(f"--beam and --with are for words and runs of pronounce, got {args.run}; leave them out")
    if args.ids:
        answers = session.predict_ids(args.ids)
        if note := session.unlike_training(args.ids):
            warn(note)
        asked = [str(n) for n in args.ids] if len(answers) > 1 else [" ".join(map(str, args.ids))]
    else:
        if not session.takes_pictures:
            raise ValueError(f"{args.run} answers about {session.takes}, got {args.asked[0]!r}; {session.instead}")
        paths = [path for name in args.asked for path in pictures_at(Path(name))]
        answers, asked = session.predict(paths, invert=args.invert), [str(path) for path in paths]
    print(as_json(asked, answers) if args.json else as_text(asked, answers))


def spoken(sessions: Sequence["Session"], words: Sequence[str], beam: int | None, *, as_json: bool) -> str:
    """The beam's answers to each word, the best first, with their probabilities."""
    from clearhead.serving.pronouncing import beam_of, pronounce, together

    answers = pronounce(together(sessions), words, beam_of(beam))
    if as_json:
        rows = [
            {"input": word, "answers": [asdict(way) | {"probability": math.exp(way.score)} for way in ways]}
            for word, ways in zip(words, answers, strict=True)
        ]
        return json.dumps(rows, indent=2)
    size = max(map(len, words))
    width = max(len(str(way)) for ways in answers for way in ways)
    return "\n".join(
        f"{word if i == 0 else '':{size}}  {way!s:{width}}  {math.exp(way.score):6.1%}"
        for word, ways in zip(words, answers, strict=True)
        for i, way in enumerate(ways)
    )


def pictures_at(path: Path) -> list[Path]:
    """The file itself, or all pictures below a folder."""
    from clearhead.data.folder import is_picture

    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*") if is_picture(file))
    if not found:
        raise LookupError(f"a folder must have pictures in it, got none in {path}; name another")
    return found


def as_text(asked: Sequence[str], answers: Sequence["Answer"]) -> str:
    """A line for each; of a sequence with an answer for each digit, two lines below one another."""
    if len(answers) > 1 and all(len(what) == 1 for what in asked):
        least = min(answer.probability or 0 for answer in answers)
        found = " ".join(answer.answer for answer in answers)
        return f"digits   {' '.join(asked)}\nanswers  {found}   (the least likely {least:.1%})"
    size, answer_size = max(map(len, asked)), max(len(answer.answer) for answer in answers)
    return "\n".join(
        f"{what:{size}}  {answer.answer:{answer_size}}{likelihood(answer)}"
        for what, answer in zip(asked, answers, strict=True)
    )


def likelihood(answer: "Answer") -> str:
    """How likely the answer is, and the next best."""
    if answer.probability is None:
        return ""
    others = list(answer.probabilities.items())[1:2]
    next_best = "".join(f"  (then {name}, {share:.1%})" for name, share in others if share >= 0.001)
    return f"  {answer.probability:6.1%}{next_best}"


def as_json(asked: Sequence[str], answers: Sequence["Answer"]) -> str:
    rows = [{"input": what, **asdict(answer)} for what, answer in zip(asked, answers, strict=True)]
    return json.dumps(rows, indent=2)
