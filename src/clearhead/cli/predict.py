"""`clearhead predict` and `clearhead sample`: apply a trained run to the user's own inputs."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from clearhead.cli.options import Parser, reader
from clearhead.messages import json_text, printable
from clearhead.tasks.language import LanguageTask, Text, Words
from clearhead.tasks.pronounce import Pronounce

if TYPE_CHECKING:
    from clearhead.inference.run import Prediction, Run
    from clearhead.tasks.pronunciation import Pronunciation

TOLERANCE = 1e-6
"""scores that differ by less are equal up to rounding"""

PREDICT_DETAILS = """\
Images are squared and resized as in training (data.fit), with the test-time
augmentation of the run (training.tta).

For a word, all candidates of the beam search are listed with their probability
and their score. The list is ordered by score, the mean log-probability per
token (phones and end of sequence); the sum of log-probabilities alone would
favor short pronunciations. Candidates that are less probable than the greedy
one (--beam 1) are listed after it."""

SAMPLE_DETAILS = """\
A run of the recipe words generates new words, a run of text continues a text.
--temperature, --top-k and --top-p change the distribution that tokens are
drawn from."""


def predict(argv: Sequence[str]) -> None:
    options = Parser(
        "clearhead predict",
        "Predict the classes of your own images, the pronunciation of words, or the output for digits.",
        usage="clearhead predict RUN IMAGE|WORD... [options]",
        examples=(
            "clearhead predict runs/mine photo.jpg folder/",
            "clearhead predict runs/pronounce-0 thorough through",
        ),
        details=PREDICT_DETAILS,
    )
    options.add_run()
    options.add_argument("inputs", metavar="IMAGE|WORD", nargs="*", help="image files, folders of images, or words")
    options.add_argument("--ids", metavar="N", nargs="+", type=int, help="digits, for a run of reverse or digits")
    options.add_argument(
        "--beam", metavar="N", type=reader(int), help="words: beam size and number of candidates (default: 5)"
    )
    options.add_argument(
        "--ensemble", metavar="RUN", nargs="+", default=[], help="words: average the predictions with these runs"
    )
    options.add_argument("--invert", action="store_true", help="invert images: MNIST's digits are white on black")
    options.add_argument("--json", action="store_true", help="machine-readable output with all probabilities")
    args = options.parse(argv)
    if bool(args.inputs) == bool(args.ids):
        given = "both" if args.ids else "neither"
        raise ValueError(
            f"predict needs images or words (named before --ensemble), or --ids, got {given}; "
            "see clearhead predict --help"
        )

    from clearhead.cli.options import warn, warn_if_unfinished
    from clearhead.inference.run import Run

    run = Run(args.run)
    task = run.task
    if args.invert and task.input_option != "image":
        raise ValueError(f"--invert needs images, got {args.run}, which takes {task.input_kind}")
    warn_if_unfinished(run.path, run.step)
    if args.inputs and isinstance(task, Pronounce):
        print(pronunciations([run, *map(Run, args.ensemble)], args.inputs, args.beam, as_json=args.json))
        return
    if args.beam is not None or args.ensemble:
        raise ValueError(f"--beam and --ensemble need words and a run of pronounce, got {args.run}")
    if args.ids:
        predictions = task.predict(run, args.ids)
        if note := task.input_warning(run, args.ids):
            warn(note)
        names = [str(n) for n in args.ids] if len(predictions) > 1 else [" ".join(map(str, args.ids))]
    else:
        names = list(args.inputs)
        if task.input_option == "image":
            names = [str(path) for name in args.inputs for path in images_at(Path(name), run.path)]
        predictions = run.predict(names, invert=args.invert)
    print(as_json(names, predictions) if args.json else as_text(names, predictions))


def pronunciations(runs: Sequence["Run"], words: Sequence[str], beam: int | None, *, as_json: bool) -> str:
    """The candidates of the beam search for each word, best first."""
    from clearhead.tasks.pronunciation import beam_of, ensemble, pronounce

    candidates = pronounce(ensemble(runs), words, beam_of(beam))
    if not as_json:
        return candidates_text(words, candidates)
    rows = [
        {
            "input": word,
            "candidates": [
                asdict(one) | {"probability": math.exp(one.score), "score_per_token": one.score_per_token}
                for one in ranked
            ],
        }
        for word, ranked in zip(words, candidates, strict=True)
    ]
    return json_text(rows)


def candidates_text(words: Sequence[str], candidates: Sequence[Sequence["Pronunciation"]]) -> str:
    """A table, followed by an explanation of its order."""
    words = [printable(word) for word in words]
    size = max(len("word"), *map(len, words))
    width = max(len("phones"), *(len(printable(one)) for ranked in candidates for one in ranked))
    lines = [f"{'word':{size}}  {'phones':{width}}  probability   score"]
    for word, ranked in zip(words, candidates, strict=True):
        end = num_ordered(ranked)
        for i, one in enumerate(ranked):
            numbers = f"{math.exp(one.score):11.1%}  {one.score_per_token:6.3f}"
            lines.append(f"{word if i == 0 else '':{size}}  {printable(one):{width}}  {numbers}{' *' * (i >= end)}")
    if any(len(ranked) > 1 for ranked in candidates):
        lines += ["", "Ordered by score, the mean log-probability per token (phones and end of sequence)."]
    if any(num_ordered(ranked) < len(ranked) for ranked in candidates):
        lines.append("* less probable than the greedy candidate, and therefore listed after it")
    return "\n".join(lines)


def num_ordered(ranked: Sequence["Pronunciation"]) -> int:
    """How many candidates are in the order of their scores; the rest are less probable than the greedy candidate."""
    in_order = [b.score_per_token <= a.score_per_token + TOLERANCE for a, b in pairwise(ranked)]
    return in_order.index(False) + 1 if False in in_order else len(ranked)


def images_at(path: Path, run: Path) -> list[Path]:
    """The file itself, or all images below a folder. A word or a number that names no file is no image for `run`."""
    from clearhead.data.folder import is_image_file
    from clearhead.data.user_files import scandir_recursive

    if not path.is_dir():
        if not path.suffix and not path.exists():
            raise ValueError(f"{run} takes images, got {str(path)!r:.60}, which is neither a file nor a folder")
        return [path]
    images = sorted(Path(entry.path) for entry in scandir_recursive(path) if is_image_file(entry))
    if not images:
        raise LookupError(f"no images in {path}")
    return images


def as_text(names: Sequence[str], predictions: Sequence["Prediction"]) -> str:
    """One line per input; two lines in all if each digit has a prediction of its own."""
    names, labels = [printable(name) for name in names], [printable(one.label) for one in predictions]
    if len(predictions) > 1 and all(len(name) == 1 for name in names):
        lowest = min(prediction.probability or 0 for prediction in predictions)
        return f"digits       {' '.join(names)}\npredictions  {' '.join(labels)}   (lowest probability {lowest:.1%})"
    size, label_size = max(map(len, names)), max(map(len, labels))
    return "\n".join(
        f"{name:{size}}  {label:{label_size}}{probability_text(one)}"
        for name, label, one in zip(names, labels, predictions, strict=True)
    )


def probability_text(prediction: "Prediction") -> str:
    """The probability of the prediction, and the second best class."""
    if prediction.probability is None:
        return ""
    others = list(prediction.probabilities.items())[1:2]
    second = "".join(f"  (then {printable(name)}, {p:.1%})" for name, p in others if p >= 0.001)
    return f"  {prediction.probability:6.1%}{second}"


def as_json(names: Sequence[str], predictions: Sequence["Prediction"]) -> str:
    return json_text([{"input": name, **asdict(one)} for name, one in zip(names, predictions, strict=True)])


def sample(argv: Sequence[str]) -> None:
    options = Parser(
        "clearhead sample",
        "Generate words or text with a trained language model.",
        usage="clearhead sample RUN [options]",
        examples=(
            "clearhead sample runs/words-0 --prompt un --temperature 0.7",
            'clearhead sample runs/text-0 --prompt "Once upon a time" --tokens 500',
        ),
        details=SAMPLE_DETAILS,
    )
    options.add_run()
    options.add_argument("--prompt", metavar="TEXT", default="", help="text to continue (default: none)")
    options.add_argument(
        "--n",
        metavar="N",
        type=reader(int),
        help=f"number of samples (default: {Words.num_samples} words or {Text.num_samples} text)",
    )
    options.add_argument(
        "--tokens", metavar="N", type=reader(int), default=300, help="text: number of new tokens (default: 300)"
    )
    options.add_argument(
        "--temperature", metavar="X", type=reader(float), default=1.0, help="sampling temperature (default: 1.0)"
    )
    options.add_argument("--top-k", metavar="N", type=reader(int), help="sample only from the N most probable tokens")
    options.add_argument(
        "--top-p",
        metavar="X",
        type=reader(float),
        help="sample only from the smallest set of tokens whose total probability is at least X",
    )
    options.add_argument("--seed", metavar="N", type=reader(int), help="random seed, for reproducible samples")
    options.add_argument("--json", action="store_true", help="machine-readable output")
    args = options.parse(argv)

    from clearhead.inference.run import Run
    from clearhead.models.generate import Sampling

    strategy = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    run = Run(args.run)
    n = args.n
    if n is None:
        n = run.task.num_samples if isinstance(run.task, LanguageTask) else 1
    samples = run.sample(args.prompt, n=n, max_new_tokens=args.tokens, strategy=strategy)
    if args.json:
        print(json_text(samples))
    else:
        keep = "" if isinstance(run.task, Words) else "\n\t"  # a word is one line
        print("\n".join(printable(sample, keep=keep) for sample in samples))
