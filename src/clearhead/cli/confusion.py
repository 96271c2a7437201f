"""`clearhead confusion`: from the name of a run to a picture of its mistakes."""

import sys
from collections.abc import Sequence
from pathlib import Path

from clearhead.cli.parser import Parser

ABOUT = """\
Which class is taken for which: the best checkpoint of a run on its test set,
one row for each right answer, one column for each given one."""


def run(argv: Sequence[str]) -> None:
    options = Parser("clearhead confusion", ABOUT)
    options.usage = "clearhead confusion RUN [options]"
    options.add_argument("run", metavar="RUN", help="the folder of a run, such as runs/mine")
    options.add_argument(
        "--out", metavar="FILE", type=Path, help="a .png, .svg or .pdf (now figures/confusion.png in the run's folder)"
    )
    args = options.parse(argv)

    from clearhead.data.config import N_VIEWS
    from clearhead.drawing import check_suffix, save_figure
    from clearhead.serving.session import Session
    from clearhead.serving.testing import confusion
    from clearhead.training.confusion import draw_confusion

    out = args.out or Path(args.run) / "figures/confusion.png"
    check_suffix(out)
    session = Session(args.run)
    n_views = N_VIEWS[session.config.training.views]
    note = "" if n_views == 1 else f"mean of {n_views} views"
    print(save_figure(draw_confusion(confusion(session, announce), session.classes, note), out))


def announce() -> None:
    print("Evaluating the test set, then drawing 1 figure ...", file=sys.stderr, flush=True)
