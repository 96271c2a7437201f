import numpy as np
import pytest
import torch

from clearhead.insight.plots import (
    add_colorbar,
    draw_alignment,
    draw_head,
    draw_head_grid,
    draw_heatmap,
    draw_over_image,
    draw_tokens,
    label_tokens,
    new_figure,
    to_numpy,
    value_range,
)


def test_to_numpy_accepts_tensors_and_lists():
    assert np.array_equal(to_numpy(torch.ones(2, requires_grad=True)), to_numpy([1, 1]))


def test_value_range_ignores_non_finite_values():
    assert value_range([np.array([1.0, np.nan]), np.array([[-2.0, np.inf]])]) == (-2.0, 1.0)


def test_the_colorbar_labels_its_limits():
    figure = new_figure(4, 3)
    axes = figure.subplots()
    add_colorbar(figure, draw_heatmap(axes, np.eye(3) * 0.37, 0, 0.37), axes, "weight")
    labels = [text.get_text() for text in figure.axes[-1].get_yticklabels()]
    assert (labels[0], labels[-1]) == ("0.00", "0.37")


def test_only_long_token_labels_are_rotated():
    figure = new_figure(4, 3)
    axes = figure.subplots()
    axes.imshow(np.zeros((2, 3)))
    label_tokens(axes, None, ["<begin>", "b", "TH"], (2, 3))
    figure.canvas.draw()
    assert [text.get_rotation() for text in axes.get_xticklabels()] == [90, 0, 0]


def test_tick_labels_are_thinned_and_label_counts_are_checked():
    axes = new_figure(4, 3).subplots()
    axes.imshow(np.zeros((50, 3)))
    label_tokens(axes, None, ["a", "b", "c"], (50, 3))
    assert len(axes.get_yticks()) < 10
    assert [text.get_text() for text in axes.get_xticklabels()] == ["a", "b", "c"]
    with pytest.raises(ValueError, match=r"one name for each of 3 tokens.*, got 2 names"):
        label_tokens(axes, None, ["a", "b"], (50, 3))


WEIGHTS = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).softmax(-1)


def drawn(figure):
    figure.canvas.draw()  # warnings are errors, so the layout must fit
    return figure


def images_of(figure):
    return [image for axes in figure.axes for image in axes.get_images()]


def texts_of(figure):
    return [figure._suptitle, *[axes.title for axes in figure.axes], *[axes.xaxis.label for axes in figure.axes]]


LONG = "blocks.11.attn · predicted: a class with a name as long as this one (31%) · actual: " + "x" * 80


@pytest.mark.parametrize(
    "draw",
    [
        lambda: draw_head(WEIGHTS, title=LONG),
        lambda: draw_alignment(WEIGHTS, list("uvwxyz"), list("abcd"), title=LONG),
        lambda: draw_tokens(WEIGHTS, list("abcd"), list("uvwxyz"), title=LONG),
        lambda: draw_head_grid([torch.rand(1, 5, 5)], ["blocks.0"], title=LONG),
        lambda: draw_head_grid([torch.rand(1, 5, 5)] * 3, [LONG] * 3, title=LONG),
        lambda: draw_head_grid([torch.rand(2, 5, 5)], ["blocks.0"], title=LONG),
        lambda: draw_over_image(torch.zeros(3, 8, 8), {"head 0": torch.rand(2, 2)}, title=LONG),
    ],
)
def test_titles_are_not_clipped(draw):
    figure = drawn(draw())
    width, height = figure.canvas.get_width_height()
    for text in texts_of(figure):
        box = text.get_window_extent()
        assert not text.get_text() or (box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height)


@pytest.mark.parametrize("n_layers", [1, 2, 4, 6])
def test_a_single_head_grid_fills_the_figure(n_layers):
    figure = drawn(draw_head_grid([torch.rand(1, 9, 9)] * n_layers, [f"blocks.{i}" for i in range(n_layers)]))
    boxes = [image.get_window_extent() for image in images_of(figure)]
    assert len(boxes) == n_layers
    width, height = figure.canvas.get_width_height()
    assert min(box.x0 for box in boxes) < 0.1 * width
    assert max(box.x1 for box in boxes) > 0.75 * width
    assert sum(box.width * box.height for box in boxes) > 0.4 * width * height


def test_draw_head_scales_from_zero_to_the_maximum():
    figure = drawn(draw_head(WEIGHTS, queries=list("abcd")))
    (image,) = images_of(figure)
    assert np.allclose(image.get_array(), WEIGHTS)
    assert image.get_clim() == (0, WEIGHTS.max().item())
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == list("abcd")


def test_the_head_grid_has_one_panel_per_head_and_one_scale_per_layer():
    layers = [torch.rand(3, 5, 5), torch.rand(2, 1, 5)]
    figure = drawn(draw_head_grid(layers, ["blocks.0.attn", "pool"]))
    images = images_of(figure)
    assert len(images) == 5
    assert np.allclose(images[4].get_array(), layers[1][1])
    assert {image.get_clim() for image in images[:3]} == {(0, layers[0].max().item())}
    assert {image.get_clim() for image in images[3:]} == {(0, layers[1].max().item())}
    with pytest.raises(ValueError, match=r"for each of 2 .* got 1 names"):
        draw_head_grid(layers, ["encoder"])


@pytest.mark.parametrize("channels", [1, 3])
def test_maps_are_aligned_with_the_image_patches(channels):
    image = torch.randint(0, 256, (channels, 28, 28), dtype=torch.uint8)
    maps = {f"head {i}": torch.rand(7, 7) for i in range(6)}
    figure = drawn(draw_over_image(image, maps))
    shown = [image for image in images_of(figure) if image.get_array().shape == (7, 7)]
    assert len(shown) == 6
    assert {tuple(image.get_extent()) for image in shown} == {(-0.5, 27.5, 27.5, -0.5)}
    assert len({image.get_clim() for image in shown}) == 1


def test_overlays_are_transparent_where_weights_do_not_exceed_the_mean():
    image = torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8)
    weights = torch.tensor([[0.1, 0.1], [0.1, 0.7]])
    axes = drawn(draw_over_image(image, {"head 0": weights})).axes[1]
    below, above = axes.get_images()
    assert np.allclose(below.get_array(), image.permute(1, 2, 0) / 255)
    opacity = above.to_rgba(above.get_array())[..., 3]
    assert opacity[0, 0] == opacity[0, 1] == opacity[1, 0] == 0
    assert 0 < opacity[1, 1] < 1
    (outline, _) = axes.collections
    assert len(outline.get_segments()) == 4  # the single patch with a large weight


def test_nearly_uniform_weights_are_nearly_transparent():
    weights = 1 / 64 + 1e-4 * torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    axes = drawn(draw_over_image(torch.zeros(3, 32, 32), {"head 0": weights})).axes[1]
    above = axes.get_images()[1]
    assert above.to_rgba(above.get_array())[..., 3].max() < 0.05
    assert not axes.collections[0].get_segments()


def test_draw_tokens_draws_the_largest_weight_widest():
    figure = drawn(draw_tokens(WEIGHTS, list("abcd"), list("uvwxyz")))
    lines = figure.axes[0].get_lines()
    assert len(lines) == 24
    assert lines[0].get_linewidth() == max(line.get_linewidth() for line in lines)
    assert {text.get_text() for text in figure.axes[0].texts} == set("abcduvwxyz")
    assert f"{WEIGHTS.max():.2f}" in figure.axes[0].get_xlabel()


def test_draw_alignment_marks_the_maximum_of_each_row():
    figure = drawn(draw_alignment(WEIGHTS, list("uvwxyz"), list("abcd"), names=("letter", "phone")))
    axes = figure.axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("letter", "phone")
    markers = axes.collections[0].get_offsets()
    assert markers[:, 0].tolist() == WEIGHTS.argmax(1).tolist()


def test_only_matrices_are_accepted():
    with pytest.raises(ValueError, match=r"must be one matrix .* got shape \(2, 4, 6\)"):
        draw_head(WEIGHTS.expand(2, 4, 6))
