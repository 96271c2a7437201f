"""The first run: train on the embedded digits, then look at what came of it."""

from pathlib import Path

from clearhead.models.config import check_positive
from clearhead.recipes.all import config_of
from clearhead.recipes.start import train
from clearhead.serving.gallery import gallery_of_test
from clearhead.serving.session import Session
from clearhead.serving.testing import confusion
from clearhead.training.confusion import draw_confusion
from clearhead.training.curves import draw_curves, read_curves
from clearhead.training.figures import save_figure
from clearhead.training.loop import Outcome
from clearhead.training.run import RunDirectory

RECIPE, NAME = "mnist", "demo"


def demo(*, steps: int | None = None) -> tuple[Outcome, list[Path]]:
    """Trains runs/demo, or goes on with it; then draws its curves, its mistakes and its answers."""
    if steps is not None:
        check_positive(steps=steps)
    config = config_of(RECIPE, {"training.steps": steps} if steps else {})
    outcome = train(config, NAME, resume=True)
    return outcome, [] if outcome.reason == "stopped" else draw_all(Path("runs") / NAME)


def draw_all(run: Path) -> list[Path]:
    session, figures = Session(run), RunDirectory.open(run).path / "figures"
    return [
        save_figure(draw_curves([read_curves(run)]), figures / "curves.png"),
        save_figure(draw_confusion(confusion(session), session.classes), figures / "confusion.png"),
        save_figure(gallery_of_test(session), figures / "predictions.png"),
    ]
