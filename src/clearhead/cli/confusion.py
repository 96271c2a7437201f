"""`clearhead confusion`: from the name of a run to its confusion matrix, as a picture."""

import sys
from collections.abc import Sequence
from pathlib import Path

from clearhead.cli.parser import Parser

ABOUT = """\
Plots the confusion matrix of a run's best checkpoint on its test set: a row for
each class, a column for each predicted class."""


def run(argv: Sequence[str]) -> None:
    options = Parser("clearhead confusion", ABOUT)
    options.usage = "clearhead confusion RUN [options]"
    options.add_argument("run", metavar="RUN", help="the path of a run, or its name in runs/")
    options.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="a .png, .svg or .pdf (default: figures/confusion.png in the run's folder)",
    )
    args = options.parse(argv)

    from clearhead.cli.terminal import say, warn_if_unfinished
    from clearhead.data.config import N_VIEWS
    from clearhead.drawing import check_suffix, save_figure
    from clearhead.serving.session import Session
    from clearhead.serving.testing import confusion
    from clearhead.training.confusion import draw_confusion

    if args.out:
        check_suffix(args.out)
    session = Session(args.run)
    warn_if_unfinished(session.path, session.step)
    n_views = N_VIEWS[session.config.training.views]
    note = "" if n_views == 1 else f"mean of {n_views} views"
    figure = draw_confusion(confusion(session, announce), session.classes, note)
    say(save_figure(figure, args.out or session.path / "figures/confusion.png"))


def announce() -> None:
    print("Evaluating the test set, then drawing 1 figure ...", file=sys.stderr, flush=True)
