"""`clearhead look`: one example, and pictures of all that a run looks at."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from clearhead.cli.overrides import reader
from clearhead.cli.parser import Parser

ABOUT = """\
What a run's best checkpoint looks at when it answers about one example: every
layer and head, one head, what is lost with each head; for images the patches
over the image, and what attention adds up to beside hiding each patch; for a
word that is pronounced, which letters each phone looks at."""

EXAMPLES = """\
examples
  clearhead look runs/demo --sample 3
  clearhead look runs/demo --image my-digit.png --invert
  clearhead look runs/reverse-0 --ids 3 1 4 1 5 9 2 6 5 3 5 8 9 7 9 3
  clearhead look runs/pronounce-0 --text thorough
  clearhead look runs/text-0 --text "Once upon a time"
  clearhead train reverse --name watched --probe 4
  clearhead look runs/watched --over-time"""


def run(argv: Sequence[str]) -> None:
    options = Parser("clearhead look", ABOUT)
    options.usage = "clearhead look RUN (--sample N | --image FILE | --ids N... | --text TEXT | --over-time) [options]"
    options.epilog = EXAMPLES
    options.add_argument("run", metavar="RUN", help="the folder of a run, such as runs/mine")
    options.add_argument("--sample", metavar="N", type=reader(int), help="an example of the test set, counted from 0")
    options.add_argument("--image", metavar="FILE", type=Path, help="a picture file")
    options.add_argument("--ids", metavar="N", nargs="+", type=int, help="digits, for a run of reverse or whole")
    options.add_argument(
        "--text", metavar="TEXT", help="a word, for a run of pronounce; or any text, for words and text"
    )
    options.add_argument("--over-time", action="store_true", help="heads while they formed, in a run with --probe")
    options.add_argument("--invert", action="store_true", help="dark becomes light: MNIST's digits are white on black")
    options.add_argument("--out", metavar="FOLDER", type=Path, help="where to (now figures/look in the run's folder)")
    args = options.parse(argv)
    check_one(args)
    if args.over_time:
        from clearhead.serving.over_time import look_over_time

        print_pictures(look_over_time(args.run, args.out))
        return

    from clearhead.cli.terminal import warn
    from clearhead.serving import looking
    from clearhead.serving.session import Session

    session = Session(args.run)
    if args.image is not None:
        example = looking.file(session, args.image, invert=args.invert)
    elif args.text is not None:
        example = looking.text(session, args.text)
    elif args.ids is not None:
        example = looking.digits(session, args.ids)
        if note := session.unlike_training(args.ids):
            warn(note)
    else:
        example = looking.sample(session, args.sample)
    print(f"{example.sentence}\n")
    print("Drawing figures ...", flush=True)
    print_pictures(looking.look_at(session, example, args.out))


def check_one(args: Namespace) -> None:
    """Exactly one kind of example is asked for."""
    given = [name for name in ("sample", "image", "ids", "text") if getattr(args, name) is not None]
    given += ["over-time"] * args.over_time
    if len(given) != 1:
        came = " and ".join(f"--{name}" for name in given) or "none of them"
        raise ValueError(
            f"look takes one of --sample, --image, --ids, --text and --over-time, got {came}; try --sample 0"
        )


def print_pictures(pictures: Sequence[tuple[Path, str]]) -> None:
    print("Open")
    for path, what in pictures:
        print(f"  {path!s:40}  {what}")
