from itertools import pairwise

import numpy as np
import torch

from clearhead.data import datasets
from clearhead.inference.predictions import (
    COLUMNS,
    PredictedImage,
    Row,
    draw_report,
    draw_sets,
    plot_predictions,
    plot_test_predictions,
    report,
)
from clearhead.inference.run import Run


def texts(figure):
    return [text.get_text() for block in figure.subfigs for axes in block.axes for text in axes.texts]


def test_each_picture_has_its_prediction_and_a_wrong_one_the_truth():
    image = torch.zeros(1, 4, 4, dtype=torch.uint8)
    colour = torch.zeros(3, 4, 4, dtype=torch.uint8)
    figure = plot_predictions(
        {"a": [PredictedImage(image, "7", 0.98, "7")] * (COLUMNS + 1), "b": [PredictedImage(colour, "1", 0.5, "2")]}
    )
    assert texts(figure) == ["7  98%"] * (COLUMNS + 1) + ["1  50%\nactual: 2"]


def test_without_mistakes_there_is_one_block():
    figure = plot_predictions({"a": [PredictedImage(torch.zeros(1, 4, 4, dtype=torch.uint8), "7", 0.98)], "b": []})
    assert len(figure.subfigs) == 1


def test_the_worst_mistakes_come_first(trained):
    figure = plot_test_predictions(Run(trained / "mnist"), n=3)
    mistakes = texts(figure)[3:]
    assert len(mistakes) == 3
    assert all("actual:" in text for text in mistakes)
    sure = [int(text.split()[1].removesuffix("%")) for text in mistakes]
    assert sure == sorted(sure, reverse=True)


def test_long_names_neither_overlap_nor_leave_the_figure():
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


def test_pictures_are_those_of_the_rows(trained):
    run = Run(trained / "mnist")
    found = report(run, n=2)
    figure = draw_report(run, found, "test")
    images, _ = datasets.load_dataset(run.config.data, 0).test.get_batch(
        torch.tensor([row.index for row in found.mistakes])
    )
    shown = [axes.get_images()[0].get_array() for axes in figure.subfigs[1].axes[:2]]
    assert all(np.array_equal(pixels, image[0]) for pixels, image in zip(shown, images, strict=True))


def test_sets_have_a_frame_around_the_predicted_and_the_actual_odd_one(trained):
    rows = [Row(0, None, "image 1", "image 2", 0.75, False), Row(1, None, "image 0", "image 0", 0.5, True)]
    figure = draw_sets({"sets": (rows, torch.rand(2, 3, 784))})
    labels = [axes.get_xlabel() for axes in figure.subfigs[0].axes]
    assert labels == ["", "predicted 75%", "actual", "predicted 50%", "", ""]
    run = Run(trained / "odd-one-out")
    assert draw_report(run, report(run, n=2), "test").subfigs
