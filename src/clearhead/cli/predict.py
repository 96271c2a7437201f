"""`clearhead predict`: picture files, folders of them, words or digits; a run's answers, as text or as JSON."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from clearhead.cli.overrides import reader
from clearhead.cli.parser import Parser
from clearhead.messages import json_text, printable

ROUNDING = 1e-6
"""two scores that differ by less are the same, computed in two ways"""

if TYPE_CHECKING:
    from clearhead.serving.pronouncing import Spoken
    from clearhead.serving.session import Answer, Session

ABOUT = """\
Predict with a run's best checkpoint: classes of your own images, pronunciations
of words, or the answer to a sequence of digits. Images become squares and are
resized exactly as in training (the run's data.fit), and seen in as many views
as at the run's test (training.views).

For a word, all candidates of the beam search are listed with their probability
and their score. The list is ordered by score, the mean log-probability per
token (phones and end of sequence); the sum of log-probabilities alone would
favour short pronunciations. Candidates that are less probable than the greedy
one (--beam 1) are listed after it."""

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
    options.add_argument(
        "--beam", metavar="N", type=reader(int), help="words: beam size, and candidates shown (default: 5)"
    )
    options.add_argument(
        "--with", metavar="RUN", nargs="+", default=[], dest="others", help="words: other runs, to form an ensemble"
    )
    options.add_argument("--invert", action="store_true", help="invert images: MNIST's digits are white on black")
    options.add_argument("--json", action="store_true", help="machine-readable output with all probabilities")
    args = options.parse(argv)
    if bool(args.asked) == bool(args.ids):
        came = "both" if args.ids else "neither"
        raise ValueError(
            f"predict takes picture files, words or --ids, one of them, got {came}; they come before --with, see "
            "clearhead predict --help"
        )

    from clearhead.cli.terminal import warn, warn_if_unfinished
    from clearhead.serving.session import Session

    session = Session(args.run)
    if args.invert and not session.takes_pictures:
        raise ValueError(f"--invert is for pictures, got {args.run}, a run of {session.takes}; leave it out")
    warn_if_unfinished(session.path, session.step)
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
    """The beam's candidates for each word, the best first, with the score that orders them."""
    from clearhead.serving.pronouncing import beam_of, pronounce, together

    answers = pronounce(together(sessions), words, beam_of(beam))
    if not as_json:
        return candidates_text(words, answers)
    rows = [
        {
            "input": word,
            "answers": [
                asdict(way) | {"probability": math.exp(way.score), "score_per_token": way.score_per_token}
                for way in ways
            ],
        }
        for word, ways in zip(words, answers, strict=True)
    ]
    return json_text(rows)


def candidates_text(words: Sequence[str], answers: Sequence[Sequence["Spoken"]]) -> str:
    """A table, and below it what its order is."""
    words = [printable(word) for word in words]
    size = max(len("word"), *map(len, words))
    width = max(len("phones"), *(len(printable(way)) for ways in answers for way in ways))
    lines = [f"{'word':{size}}  {'phones':{width}}  probability   score"]
    for word, ways in zip(words, answers, strict=True):
        last = n_by_score(ways)
        for i, way in enumerate(ways):
            numbers = f"{math.exp(way.score):11.1%}  {way.score_per_token:6.3f}"
            lines.append(f"{word if i == 0 else '':{size}}  {printable(way):{width}}  {numbers}{' *' * (i >= last)}")
    if any(len(ways) > 1 for ways in answers):
        lines += ["", "Ordered by score, the mean log-probability per token (phones and end of sequence)."]
    if any(n_by_score(ways) < len(ways) for ways in answers):
        lines.append("* less probable than the greedy answer, and therefore listed after it")
    return "\n".join(lines)


def n_by_score(ways: Sequence["Spoken"]) -> int:
    """How many candidates from the first are in the order of their scores. The next has a higher score, and stands
    behind only because it is less probable than the greedy answer, as all after it are."""
    falls = [after.score_per_token <= way.score_per_token + ROUNDING for way, after in pairwise(ways)]
    return falls.index(False) + 1 if False in falls else len(ways)


def pictures_at(path: Path) -> list[Path]:
    """The file itself, or all pictures below a folder."""
    from clearhead.data.folder import is_picture
    from clearhead.data.own_files import entries_below

    if not path.is_dir():
        return [path]
    found = sorted(Path(entry.path) for entry in entries_below(path) if is_picture(entry))
    if not found:
        raise LookupError(f"a folder must have pictures in it, got none in {path}; name another")
    return found


def as_text(asked: Sequence[str], answers: Sequence["Answer"]) -> str:
    """A line for each; of a sequence with an answer for each digit, two lines below one another."""
    asked, names = [printable(what) for what in asked], [printable(answer.answer) for answer in answers]
    if len(answers) > 1 and all(len(what) == 1 for what in asked):
        least = min(answer.probability or 0 for answer in answers)
        return f"digits   {' '.join(asked)}\nanswers  {' '.join(names)}   (the least likely {least:.1%})"
    size, name_size = max(map(len, asked)), max(map(len, names))
    return "\n".join(
        f"{what:{size}}  {name:{name_size}}{likelihood(answer)}"
        for what, name, answer in zip(asked, names, answers, strict=True)
    )


def likelihood(answer: "Answer") -> str:
    """How likely the answer is, and the next best."""
    if answer.probability is None:
        return ""
    others = list(answer.probabilities.items())[1:2]
    next_best = "".join(f"  (then {printable(name)}, {share:.1%})" for name, share in others if share >= 0.001)
    return f"  {answer.probability:6.1%}{next_best}"


def as_json(asked: Sequence[str], answers: Sequence["Answer"]) -> str:
    rows = [{"input": what, **asdict(answer)} for what, answer in zip(asked, answers, strict=True)]
    return json_text(rows)
