import numpy as np
import pytest
import torch

from clearhead.insight.figures import draw_alignment, draw_head, draw_over_image, draw_tokens, draw_wall

WEIGHTS = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).softmax(-1)


def drawn(figure):
    figure.canvas.draw()  # with warnings as errors: everything fits
    return figure


def images_of(figure):
    return [image for axes in figure.axes for image in axes.get_images()]


def test_one_head_shows_its_weights_from_zero_to_the_largest():
    figure = drawn(draw_head(WEIGHTS, queries=list("abcd")))
    (image,) = images_of(figure)
    assert np.allclose(image.get_array(), WEIGHTS)
    assert image.get_clim() == (0, WEIGHTS.max().item())
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == list("abcd")


def test_the_wall_has_a_panel_for_each_head_and_a_scale_for_each_layer():
    layers = [torch.rand(3, 5, 5), torch.rand(2, 1, 5)]
    figure = drawn(draw_wall(layers, ["encoder.blocks.0.attention", "pool"]))
    images = images_of(figure)
    assert len(images) == 5
    assert np.allclose(images[4].get_array(), layers[1][1])
    assert {image.get_clim() for image in images[:3]} == {(0, layers[0].max().item())}
    assert {image.get_clim() for image in images[3:]} == {(0, layers[1].max().item())}
    with pytest.raises(ValueError, match="got 1 names for 2"):
        draw_wall(layers, ["encoder"])


@pytest.mark.parametrize("channels", [1, 3])
def test_maps_lie_over_the_image_patch_by_patch(channels):
    image = torch.randint(0, 256, (channels, 28, 28), dtype=torch.uint8)
    maps = {f"head {i}": torch.rand(7, 7) for i in range(6)}
    figure = drawn(draw_over_image(image, maps))
    shown = [image for image in images_of(figure) if image.get_array().shape == (7, 7)]
    assert len(shown) == 6
    assert {tuple(image.get_extent()) for image in shown} == {(-0.5, 27.5, 27.5, -0.5)}
    assert len({image.get_clim() for image in shown}) == 1


def test_token_to_token_draws_the_strongest_widest():
    figure = drawn(draw_tokens(WEIGHTS, list("abcd"), list("uvwxyz")))
    lines = figure.axes[0].get_lines()
    assert len(lines) == 24
    assert lines[0].get_linewidth() == max(line.get_linewidth() for line in lines)
    assert {text.get_text() for text in figure.axes[0].texts} == set("abcduvwxyz")
    assert f"{WEIGHTS.max():.2f}" in figure.axes[0].get_xlabel()


def test_alignment_rings_the_largest_of_each_row():
    figure = drawn(draw_alignment(WEIGHTS, list("uvwxyz"), list("abcd"), names=("letter", "phone")))
    axes = figure.axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("letter", "phone")
    rings = axes.collections[0].get_offsets()
    assert rings[:, 0].tolist() == WEIGHTS.argmax(1).tolist()


def test_what_is_no_matrix_is_refused():
    with pytest.raises(ValueError, match=r"draws one matrix, got an array of shape \(2, 4, 6\)"):
        draw_head(WEIGHTS.expand(2, 4, 6))
