"""The first run: train on the embedded digits, then look at what came of it."""

from collections.abc import Callable
from pathlib import Path

from clearhead.drawing import save_figure
from clearhead.models.config import check_positive
from clearhead.recipes.all import config_of
from clearhead.recipes.start import train
from clearhead.serving.gallery import gallery_of_test
from clearhead.serving.looking import look_at, sample
from clearhead.serving.session import Session
from clearhead.serving.testing import confusion
from clearhead.training.confusion import draw_confusion
from clearhead.training.curves import draw_curves, read_curves
from clearhead.training.loop import Outcome
from clearhead.training.run import RunDirectory

RECIPE, NAME = "mnist", "demo"


def demo(
    *, steps: int | None = None, before_drawing: Callable[[], None] = lambda: None
) -> tuple[Outcome, list[tuple[Path, str]]]:
    """Trains runs/demo, or goes on with it; then draws its curves, its mistakes, its answers and what it looks at."""
    if steps is not None:
        check_positive(steps=steps)
    config = config_of(RECIPE, {"training.steps": steps} if steps else {})
    outcome = train(config, NAME, resume=True)
    if outcome.reason == "stopped":
        return outcome, []
    before_drawing()
    return outcome, draw_all(Path("runs") / NAME)


def draw_all(run: Path) -> list[tuple[Path, str]]:
    """Each picture, and what it shows."""
    session, figures = Session(run), RunDirectory.open(run).path / "figures"
    drawn = {
        "curves.png": ("loss and accuracy against epochs", draw_curves([read_curves(run)])),
        "confusion.png": ("which digit was taken for which", draw_confusion(confusion(session), session.classes)),
        "predictions.png": ("predictions, and the worst mistakes", gallery_of_test(session)),
    }
    saved = [(save_figure(figure, figures / name), what) for name, (what, figure) in drawn.items()]
    return saved + look_at(session, sample(session, 0))
