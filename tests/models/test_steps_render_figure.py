"""Figures of the five steps of attention."""

import pytest
import torch

from clearhead.models.steps import EXAMPLE, EXAMPLE_HEADS, five_steps
from clearhead.models.steps_render import draw_steps


def matrices(steps):
    return {name: matrix for step in steps for name, matrix in step.matrices.items()}


def test_the_figure_shows_the_values_of_every_matrix():
    (axes,) = draw_steps(five_steps(**EXAMPLE_HEADS, heads=2, causal=True)).axes
    texts = [text.get_text() for text in axes.texts]
    assert "2  Score" in texts
    assert "scores, head 2 [3,3]" in texts
    output = matrices(five_steps(**EXAMPLE_HEADS, heads=2, causal=True))["output"]
    assert texts[-13:-1] == [f"{n:.3f}" for n in output.flatten().tolist()]
    assert texts.count("–") == 6  # three masked scores in each of two heads
    assert "gray: masked" in texts[-1]


def test_the_figure_states_what_is_truncated():
    torch.manual_seed(0)
    large = dict(zip(EXAMPLE, [torch.randn(*size) for size in [(20, 64), (64, 16), (64, 16), (64, 16)]], strict=True))
    (axes,) = draw_steps(five_steps(**large, heads=8)).axes
    assert axes.texts[-1].get_text().endswith("; showing the first 3 of 8 heads and 3 of 20 queries")
    titles = [text.get_text() for text in axes.texts]
    assert "scores, head 3 [20,20]…" in titles
    assert "scores, head 4 [20,20]…" not in titles


@pytest.mark.parametrize("heads", [1, 2])
def test_texts_do_not_overlap_or_exceed_the_figure(heads):
    figure = draw_steps(five_steps(**(EXAMPLE if heads == 1 else EXAMPLE_HEADS), heads=heads))
    renderer, (axes,) = figure.canvas.get_renderer(), figure.axes
    boxes = [text.get_window_extent(renderer) for text in axes.texts]
    assert min(box.x0 for box in boxes) >= 0
    assert max(box.x1 for box in boxes) <= figure.bbox.width
    overlaps = [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]
    assert not overlaps
