from itertools import pairwise

import numpy as np
import pytest
import torch

from clearhead.inference.evaluate import (
    COLUMNS,
    PredictedImage,
    confusion,
    draw_report,
    draw_sets,
    loss_and_accuracy,
    outputs_on,
    plot_predictions,
    plot_test_predictions,
    report,
)
from clearhead.inference.run import Run
from clearhead.models.generate import Beam
from clearhead.tasks.objectives import Classification
from clearhead.tasks.pronunciation import error_rates, report_words, words_to_score
from clearhead.tasks.report import Row
from clearhead.training.run_directory import RunDirectory


@pytest.mark.parametrize(("name", "n"), [("mnist", 10_000), ("reverse", 160_000), ("repeat", 10_000)])
def test_the_trace_of_the_confusion_matrix_is_the_test_accuracy(trained, name, n):
    run = Run(trained / name)
    matrix = confusion(run)
    (record,) = [r for r in RunDirectory.open(trained / name).records() if r["kind"] == "test"]
    assert matrix.shape == (len(run.classes),) * 2
    assert matrix.sum() == n
    assert matrix.trace().item() / n == record["accuracy"]


def test_regression_has_no_confusion_matrix(trained):
    with pytest.raises(
        ValueError, match=r"a confusion matrix needs classes, got .*sum, .*Regression; try clearhead evaluate"
    ):
        confusion(Run(trained / "sum"))


@pytest.mark.parametrize("name", ["mnist", "reverse", "repeat"])
def test_the_confusion_matrix_and_evaluate_agree_to_the_last_digit(trained, name):
    run = Run(trained / name)
    matrix = confusion(run)
    assert matrix.trace().item() / matrix.sum().item() == loss_and_accuracy(run, "test")["accuracy"]


@pytest.mark.parametrize("part", ["test", "validation"])
@pytest.mark.parametrize("name", ["mnist", "reverse", "odd-one-out", "sum", "repeat", "words"])
def test_predictions_and_evaluate_agree_to_the_last_digit(trained, monkeypatch, name, part):
    monkeypatch.chdir(trained.parent)
    run = Run(trained / name)
    found, metrics = report(run, part, n=3), loss_and_accuracy(run, part)
    assert found.metrics == metrics
    key = "exact_match" if name == "reverse" else "accuracy"
    assert 1 - found.wrong / found.total == pytest.approx(metrics[key], abs=1e-12)


def test_the_prediction_is_the_argmax_of_logits_not_of_rounded_probabilities():
    logits = torch.tensor([[0.0, 1e-8, -50.0]])
    assert logits.softmax(-1)[0, 0] == logits.softmax(-1)[0, 1]
    assert Classification().decode(logits, torch.tensor([0]))[0].tolist() == [1]


@pytest.mark.parametrize("name", ["mnist", "reverse", "odd-one-out", "repeat"])
def test_mistakes_are_the_most_confident_ones_in_order(trained, name):
    run = Run(trained / name)
    outputs, found = outputs_on(run), report(run, n=5)
    assert [row.index for row in found.first] == list(range(5))
    assert all(not row.correct and row.predicted != row.actual for row in found.mistakes)
    sure = [row.probability for row in found.mistakes]
    assert sure == sorted(sure, reverse=True)
    others = set(range(found.total)) - {row.index for row in found.mistakes}
    wrong = [i for i in others if not outputs.correct[i].all()]
    assert max(float(outputs.confidence[i].prod()) for i in wrong) <= sure[-1]


def test_regression_mistakes_are_ordered_by_error(trained):
    rows = report(Run(trained / "sum"), n=4).mistakes
    errors = [abs(float(row.predicted) - float(row.actual)) for row in rows]
    assert errors == pytest.approx(sorted(errors, reverse=True), abs=0.1)
    assert all(row.probability is None for row in rows)


def test_the_context_of_a_mistake_is_the_input_before_it(trained, monkeypatch):
    monkeypatch.chdir(trained.parent)
    run = Run(trained / "words")
    data = run.config.data.load(run.config.seed)
    found = report(run, n=5)
    assert found.unit == "tokens"
    for row in found.mistakes:
        inputs, targets = data.test.get_batch(torch.tensor([row.index]))
        word = "".join(run.vocab[i] for i in inputs[0].tolist())
        assert word.startswith(row.input)
        n_read = 1 + len(row.input.removeprefix("<bos>"))
        assert run.vocab[int(targets[0, n_read - 1])] == row.actual != row.predicted
        logits = run.logits(inputs)[0, n_read - 1]
        assert run.vocab[int(logits.argmax())] == row.predicted


def test_error_rates_equal_those_of_evaluate(trained, monkeypatch):
    monkeypatch.chdir(trained.parent)
    run = Run(trained / "pronounce")
    found = report_words(run.task, run, "validation", 3, Beam(2), lambda: None)
    rates = error_rates(run, words_to_score(run.task, run, "validation"), Beam(2))
    assert (found.wrong, found.total) == (rates.wrong, rates.words)
    assert found.metrics["word_error_rate"] == rates.word_error_rate
    assert all(row.correct == (row.predicted in row.actual.split(" or ")) for row in found.first)


def test_n_must_be_positive(trained):
    with pytest.raises(ValueError, match="at least 1, got 0"):
        report(Run(trained / "mnist"), n=0)


def texts(figure):
    return [text.get_text() for block in figure.subfigs for axes in block.axes for text in axes.texts]


def test_images_show_their_prediction_and_mistakes_the_actual_class():
    image = torch.zeros(1, 4, 4, dtype=torch.uint8)
    color = torch.zeros(3, 4, 4, dtype=torch.uint8)
    figure = plot_predictions(
        {"a": [PredictedImage(image, "7", 0.98, "7")] * (COLUMNS + 1), "b": [PredictedImage(color, "1", 0.5, "2")]}
    )
    assert texts(figure) == ["7  98%"] * (COLUMNS + 1) + ["1  50%\nactual: 2"]


def test_empty_groups_are_left_out():
    figure = plot_predictions({"a": [PredictedImage(torch.zeros(1, 4, 4, dtype=torch.uint8), "7", 0.98)], "b": []})
    assert len(figure.subfigs) == 1


def test_drawn_mistakes_are_the_most_confident_first(trained):
    figure = plot_test_predictions(Run(trained / "mnist"), n=3)
    mistakes = texts(figure)[3:]
    assert len(mistakes) == 3
    assert all("actual:" in text for text in mistakes)
    sure = [int(text.split()[1].removesuffix("%")) for text in mistakes]
    assert sure == sorted(sure, reverse=True)


def test_long_class_names_fit_into_the_figure():
    image = torch.zeros(3, 4, 4, dtype=torch.uint8)
    long = PredictedImage(image, "a class with a rather long name", 0.98, "another_class_whose_name_has_no_blanks", 3)
    figure = plot_predictions({"a title as long as the figure is wide, and then some more of it " * 3: [long] * 16})
    figure.canvas.draw()
    width, height = figure.canvas.get_width_height()
    boxes = [text.get_window_extent() for block in figure.subfigs for axes in block.axes for text in axes.texts]
    assert all(box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 for box in boxes)
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes[:8]))
    title = figure.subfigs[0]._suptitle.get_window_extent()
    assert title.x0 >= 0
    assert title.x1 <= width
    assert title.y1 <= height


def test_drawn_images_are_those_of_the_rows(trained):
    run = Run(trained / "mnist")
    found = report(run, n=2)
    figure = draw_report(run, found, "test")
    images, _ = run.config.data.load(0).test.get_batch(torch.tensor([row.index for row in found.mistakes]))
    shown = [axes.get_images()[0].get_array() for axes in figure.subfigs[1].axes[:2]]
    assert all(np.array_equal(pixels, image[0]) for pixels, image in zip(shown, images, strict=True))


def test_sets_frame_the_predicted_and_the_actual_odd_one(trained):
    rows = [Row(0, None, "image 1", "image 2", 0.75, False), Row(1, None, "image 0", "image 0", 0.5, True)]
    figure = draw_sets({"sets": (rows, torch.rand(2, 3, 784))})
    labels = [axes.get_xlabel() for axes in figure.subfigs[0].axes]
    assert labels == ["", "predicted 75%", "actual", "predicted 50%", "", ""]
    run = Run(trained / "odd-one-out")
    assert draw_report(run, report(run, n=2), "test").subfigs
