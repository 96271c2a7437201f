"""`clearhead demo`: train on the embedded digits, then draw the results."""

from collections.abc import Callable
from pathlib import Path

from clearhead.drawing import save_figure
from clearhead.inference.evaluate import draw_confusion
from clearhead.inference.explain import dataset_example, explain_input
from clearhead.inference.predictions import confusion, plot_test_predictions
from clearhead.inference.run import Run
from clearhead.recipes.launch import train
from clearhead.recipes.registry import config_of
from clearhead.training.curves import draw_curves, read_curves
from clearhead.training.loop import TrainResult
from clearhead.validation import check_positive

RECIPE, NAME = "mnist", "demo"


def demo(
    *, steps: int | None = None, before_drawing: Callable[[], None] = lambda: None
) -> tuple[TrainResult, list[tuple[Path, str]]]:
    """Trains runs/demo, or resumes it; then draws its figures: the path and the title of each."""
    if steps is not None:
        check_positive(steps=steps)
    config = config_of(RECIPE, {"training.steps": steps} if steps else {})
    outcome = train(config, NAME, resume=True)
    if outcome.reason == "stopped":
        return outcome, []
    before_drawing()
    return outcome, draw_all(Run(Path("runs") / NAME))


def draw_all(run: Run) -> list[tuple[Path, str]]:
    figures = {
        "curves.png": ("loss and accuracy against epochs", draw_curves([read_curves(run.path)])),
        "confusion.png": ("the confusion matrix on the test set", draw_confusion(confusion(run), run.classes)),
        "predictions.png": ("predictions, and the most confident mistakes", plot_test_predictions(run)),
    }
    saved = [(save_figure(figure, run.path / "figures" / name), title) for name, (title, figure) in figures.items()]
    return saved + explain_input(run, dataset_example(run, 0))
