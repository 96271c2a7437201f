"""The first run: train on the embedded digits, then look at what came of it."""

from collections.abc import Callable
from pathlib import Path

from clearhead.drawing import save_figure
from clearhead.inference.evaluate import draw_confusion
from clearhead.inference.explain import explain_input, sample
from clearhead.inference.predictions import confusion, plot_test_predictions
from clearhead.inference.run import Run
from clearhead.recipes.launch import train
from clearhead.recipes.registry import config_of
from clearhead.training.curves import draw_curves, read_curves
from clearhead.training.loop import Outcome
from clearhead.training.run_directory import RunDirectory
from clearhead.validation import check_positive

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
    session, figures = Run(run), RunDirectory.open(run).path / "figures"
    drawn = {
        "curves.png": ("loss and accuracy against epochs", draw_curves([read_curves(run)])),
        "confusion.png": ("which digit was taken for which", draw_confusion(confusion(session), session.classes)),
        "predictions.png": ("predictions, and the worst mistakes", plot_test_predictions(session)),
    }
    saved = [(save_figure(figure, figures / name), what) for name, (what, figure) in drawn.items()]
    return saved + explain_input(session, sample(session, 0))
