"""`clearhead predict`: picture files, folders of them, words or digits; a run's answers, as text or as JSON."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from clearhead.cli.options import Parser, reader
from clearhead.messages import json_text, printable

if TYPE_CHECKING:
    from clearhead.inference.g2p import Pronunciation
    from clearhead.inference.run import Prediction, Run

ROUNDING = 1e-6
"""two scores that differ by less are the same, computed in two ways"""


ABOUT_PREDICT = """\
Predict with a run's best checkpoint: classes of your own images, pronunciations
of words, or the answer to a sequence of digits. Images become squares and are
resized exactly as in training (the run's data.fit), and seen in as many views
as at the run's test (training.tta).

For a word, all candidates of the beam search are listed with their probability
and their score. The list is ordered by score, the mean log-probability per
token (phones and end of sequence); the sum of log-probabilities alone would
favour short pronunciations. Candidates that are less probable than the greedy
one (--beam 1) are listed after it."""

PREDICT_EXAMPLES = """\
examples
  clearhead predict runs/mine photo.jpg more/ --json
  clearhead predict runs/demo my-digit.png --invert
  clearhead predict runs/pronounce-0 thorough through --beam 10
  clearhead predict runs/pronounce-0 thorough --ensemble runs/pronounce-1
  clearhead predict runs/reverse-0 --ids 3 1 4 1 5 9 2 6 5 3 5 8 9 7 9 3"""


def predict(argv: Sequence[str]) -> None:
    options = Parser("clearhead predict", ABOUT_PREDICT)
    options.usage = "clearhead predict RUN IMAGE|WORD... [options]"
    options.epilog = PREDICT_EXAMPLES
    options.add_argument("run", metavar="RUN", help="the folder of a run, such as runs/mine")
    options.add_argument("asked", metavar="IMAGE|WORD", nargs="*", help="picture files and folders of them, or words")
    options.add_argument("--ids", metavar="N", nargs="+", type=int, help="digits, for a run of reverse or whole")
    options.add_argument(
        "--beam", metavar="N", type=reader(int), help="words: beam size, and candidates shown (default: 5)"
    )
    options.add_argument(
        "--ensemble",
        metavar="RUN",
        nargs="+",
        default=[],
        dest="ensemble",
        help="words: other runs, to form an ensemble",
    )
    options.add_argument("--invert", action="store_true", help="invert images: MNIST's digits are white on black")
    options.add_argument("--json", action="store_true", help="machine-readable output with all probabilities")
    args = options.parse(argv)
    if bool(args.asked) == bool(args.ids):
        came = "both" if args.ids else "neither"
        raise ValueError(
            f"predict takes picture files, words or --ids, one of them, got {came}; they come before --ensemble, see "
            "clearhead predict --help"
        )

    from clearhead.cli.options import warn, warn_if_unfinished
    from clearhead.inference.run import Run

    run = Run(args.run)
    if args.invert and run.input_kind != "images":
        raise ValueError(f"--invert is for pictures, got {args.run}, a run of {run.input_kind}; leave it out")
    warn_if_unfinished(run.path, run.step)
    if args.asked and run.input_kind == "words":
        print(spoken([run, *map(Run, args.ensemble)], args.asked, args.beam, as_json=args.json))
        return
    if args.beam is not None or args.ensemble:
        raise ValueError(f"--beam and --ensemble are for words and runs of pronounce, got {args.run}; leave them out")
    if args.ids:
        answers = run.predict_ids(args.ids)
        if note := run.length_warning(args.ids):
            warn(note)
        asked = [str(n) for n in args.ids] if len(answers) > 1 else [" ".join(map(str, args.ids))]
    else:
        if run.input_kind != "images":
            raise ValueError(f"{args.run} takes {run.input_kind}, got {args.asked[0]!r}; {run.hint}")
        paths = [path for name in args.asked for path in pictures_at(Path(name))]
        answers, asked = run.predict(paths, invert=args.invert), [str(path) for path in paths]
    print(as_json(asked, answers) if args.json else as_text(asked, answers))


def spoken(runs: Sequence["Run"], words: Sequence[str], beam: int | None, *, as_json: bool) -> str:
    """The beam's candidates for each word, the best first, with the score that orders them."""
    from clearhead.inference.g2p import beam_of, ensemble, pronounce

    answers = pronounce(ensemble(runs), words, beam_of(beam))
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


def candidates_text(words: Sequence[str], answers: Sequence[Sequence["Pronunciation"]]) -> str:
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


def n_by_score(ways: Sequence["Pronunciation"]) -> int:
    """How many candidates from the first are in the order of their scores. The next has a higher score, and stands
    behind only because it is less probable than the greedy answer, as all after it are."""
    falls = [after.score_per_token <= way.score_per_token + ROUNDING for way, after in pairwise(ways)]
    return falls.index(False) + 1 if False in falls else len(ways)


def pictures_at(path: Path) -> list[Path]:
    """The file itself, or all pictures below a folder."""
    from clearhead.data.folder import is_image_file
    from clearhead.data.user_files import scandir_recursive

    if not path.is_dir():
        return [path]
    found = sorted(Path(entry.path) for entry in scandir_recursive(path) if is_image_file(entry))
    if not found:
        raise LookupError(f"a folder must have pictures in it, got none in {path}; name another")
    return found


def as_text(asked: Sequence[str], answers: Sequence["Prediction"]) -> str:
    """A line for each; of a sequence with an answer for each digit, two lines below one another."""
    asked, names = [printable(what) for what in asked], [printable(answer.label) for answer in answers]
    if len(answers) > 1 and all(len(what) == 1 for what in asked):
        least = min(answer.probability or 0 for answer in answers)
        return f"digits   {' '.join(asked)}\nanswers  {' '.join(names)}   (the least likely {least:.1%})"
    size, name_size = max(map(len, asked)), max(map(len, names))
    return "\n".join(
        f"{what:{size}}  {name:{name_size}}{likelihood(answer)}"
        for what, name, answer in zip(asked, names, answers, strict=True)
    )


def likelihood(answer: "Prediction") -> str:
    """How likely the answer is, and the next best."""
    if answer.probability is None:
        return ""
    others = list(answer.probabilities.items())[1:2]
    next_best = "".join(f"  (then {printable(name)}, {share:.1%})" for name, share in others if share >= 0.001)
    return f"  {answer.probability:6.1%}{next_best}"


def as_json(asked: Sequence[str], answers: Sequence["Prediction"]) -> str:
    rows = [{"input": what, **asdict(answer)} for what, answer in zip(asked, answers, strict=True)]
    return json_text(rows)


# `clearhead sample`: a run of words or text writes something of its own.


ABOUT_SAMPLE = """\
What a language model writes: new words (a run of words), or how a text goes on
(a run of text). Tokens are drawn by their probability: a temperature below 1
prefers likely ones, --top-k and --top-p leave unlikely ones out."""

SAMPLE_EXAMPLES = """\
examples
  clearhead sample runs/words-0
  clearhead sample runs/words-0 --prompt un --n 5 --temperature 0.7 --seed 1
  clearhead sample runs/text-0 --prompt "Once upon a time" --tokens 500 --top-k 40"""

WORDS, TEXTS = 10, 1
"""how many are written unless said"""


def sample(argv: Sequence[str]) -> None:
    options = Parser("clearhead sample", ABOUT_SAMPLE)
    options.usage = "clearhead sample RUN [options]"
    options.epilog = SAMPLE_EXAMPLES
    options.add_argument("run", metavar="RUN", help="the folder of a run, such as runs/words-0")
    options.add_argument("--prompt", metavar="TEXT", default="", help="how it begins (now nothing)")
    options.add_argument("--n", metavar="N", type=reader(int), help=f"how many (words: {WORDS}, text: {TEXTS})")
    options.add_argument("--tokens", metavar="N", type=reader(int), default=300, help="text: how long (now 300)")
    options.add_argument(
        "--temperature", metavar="X", type=reader(float), default=1.0, help="below 1 likelier, above 1 bolder (now 1)"
    )
    options.add_argument("--top-k", metavar="N", type=reader(int), help="only the N likeliest tokens")
    options.add_argument("--top-p", metavar="X", type=reader(float), help="only the fewest that hold this share")
    options.add_argument("--seed", metavar="N", type=reader(int), help="the same number writes the same again")
    options.add_argument("--json", action="store_true", help="for programs")
    args = options.parse(argv)

    from clearhead.inference.run import Run
    from clearhead.inference.sample import draw_samples
    from clearhead.models.generate import Sampling

    how = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    run = Run(args.run)
    usual = TEXTS if run.config.data.name == "text" else WORDS
    n = usual if args.n is None else args.n
    written = draw_samples(run, args.prompt, how, n=n, n_tokens=args.tokens)
    if args.json:
        print(json_text(written))
    elif run.config.data.name == "text":
        print("\n".join(written))
    else:
        print("\n".join(map(printable, written)))  # a word is one line
