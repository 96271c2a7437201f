import numpy as np
import pytest
import torch

from clearhead.insight.plots import add_colorbar, draw_heatmap, label_tokens, new_figure, to_numpy, value_range


def test_tensors_and_arrays_alike():
    assert np.array_equal(to_numpy(torch.ones(2, requires_grad=True)), to_numpy([1, 1]))


def test_limits_are_those_of_finite_numbers():
    assert value_range([np.array([1.0, np.nan]), np.array([[-2.0, np.inf]])]) == (-2.0, 1.0)


def test_the_bar_names_its_true_ends():
    figure = new_figure(4, 3)
    axes = figure.subplots()
    add_colorbar(figure, draw_heatmap(axes, np.eye(3) * 0.37, 0, 0.37), axes, "weight")
    labels = [text.get_text() for text in figure.axes[-1].get_yticklabels()]
    assert (labels[0], labels[-1]) == ("0.00", "0.37")


def test_only_long_names_are_turned():
    figure = new_figure(4, 3)
    axes = figure.subplots()
    axes.imshow(np.zeros((2, 3)))
    label_tokens(axes, None, ["<begin>", "b", "TH"], (2, 3))
    figure.canvas.draw()
    assert [text.get_rotation() for text in axes.get_xticklabels()] == [90, 0, 0]


def test_many_places_get_few_numbers_and_names_must_fit():
    axes = new_figure(4, 3).subplots()
    axes.imshow(np.zeros((50, 3)))
    label_tokens(axes, None, ["a", "b", "c"], (50, 3))
    assert len(axes.get_yticks()) < 10
    assert [text.get_text() for text in axes.get_xticklabels()] == ["a", "b", "c"]
    with pytest.raises(ValueError, match=r"one name for each of 3 tokens.*, got 2 names"):
        label_tokens(axes, None, ["a", "b"], (50, 3))
