import math

import numpy as np
import pytest
import torch
from PIL import Image

from clearhead.insight.head_plots import (
    LAST_FRAME,
    MAX_BARS,
    draw_attributions,
    draw_head_entropy,
    draw_head_importance,
    draw_training_strip,
    save_animation,
)


def drawn(figure):
    figure.canvas.draw()
    return figure


def test_heads_are_ranked_by_absolute_change():
    changes = torch.tensor([[0.1, -0.5], [0.3, math.nan]])
    axes = drawn(draw_head_importance(changes, ["first", "second"])).axes[0]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([-0.5, 0.3, 0.1])
    assert [text.get_text() for text in axes.get_yticklabels()] == ["first  head 1", "second  head 0", "first  head 0"]


def test_the_smallest_changes_of_many_heads_are_omitted_with_a_count():
    axes = drawn(draw_head_importance(torch.rand(12, 12), [f"block {i}" for i in range(12)])).axes[0]
    assert len(axes.patches) == MAX_BARS
    assert f"({144 - MAX_BARS} smaller changes omitted)" in axes.get_xlabel()


def test_each_map_has_its_own_scale_and_occlusion_is_symmetric_about_zero():
    image = torch.randint(0, 256, (1, 28, 28), dtype=torch.uint8)
    maps = {"mean": torch.rand(7, 7), "rollout": 5 * torch.rand(7, 7), "relevance": torch.rand(7, 7)}
    occluded = torch.rand(7, 7) - 0.1
    figure = drawn(draw_attributions(image, maps, occluded, {"mean": 0.25, "occlusion": 0.1}))
    shown = [i for axes in figure.axes for i in axes.get_images() if i.get_array().shape == (7, 7)]
    ranges = [(m.mean().item(), max(m.max().item(), 2 * m.mean().item())) for m in maps.values()]
    assert np.allclose([i.get_clim() for i in shown[:3]], ranges)
    assert shown[3].get_clim() == (-occluded.abs().double().max(), occluded.abs().double().max())
    assert {axes.get_xlabel() for axes in figure.axes} >= {"deletion AUC 0.250", "deletion AUC 0.100"}


def test_deletion_auc_is_explained_in_the_figure():
    image, maps = torch.zeros(1, 28, 28), {"mean": torch.rand(7, 7)}
    with_areas = drawn(draw_attributions(image, maps, torch.rand(7, 7), {"mean": 0.25}))
    note = with_areas._supxlabel.get_text().replace("\n", " ")
    assert "Deletion AUC: patches are hidden one by one, the highest ranked first" in note
    assert "The smaller it is, the better the map" in note
    box = with_areas._supxlabel.get_window_extent()
    assert min(box.x0, box.y0) >= 0
    assert box.x1 <= with_areas.canvas.get_width_height()[0]
    without = drawn(draw_attributions(image, maps, torch.rand(7, 7)))
    assert "Deletion AUC" not in without._supxlabel.get_text()


def test_occlusion_is_colored_by_sign():
    figure = drawn(
        draw_attributions(torch.zeros(3, 8, 8), {"mean": torch.rand(2, 2)}, torch.tensor([[1.0, 0.0], [0.0, -1.0]]))
    )
    image = figure.axes[2].get_images()[1]
    colors = image.to_rgba(image.get_array())
    assert colors[0, 1, 3] == pytest.approx(0, abs=0.01)
    assert colors[0, 0, 3] == colors[1, 1, 3] > 0.5
    assert colors[0, 0, 0] > colors[0, 0, 1]  # magenta
    assert colors[1, 1, 0] < colors[1, 1, 1]  # green


def test_titles_of_head_plots_are_not_clipped():
    long = "predicted: a class with a name as long as this one (31%), actual: " + "x" * 80
    name = "model.vision_tower.encoder.layers.11.self_attention.attention"
    for figure in (
        draw_head_importance(torch.rand(2, 2), [name, name], title=long),
        draw_head_entropy([0, 10], torch.rand(2, 3, 2), [name] * 3),
        draw_training_strip([0, 10], torch.rand(2, 4, 4), title=long),
    ):
        width, height = drawn(figure).canvas.get_width_height()
        for text in [figure._suptitle, *[axes.title for axes in figure.axes], *figure.axes[0].get_yticklabels()]:
            box = text.get_window_extent()
            assert not text.get_text() or (box.x0 >= 0 and box.x1 <= width and box.y1 <= height)


def test_entropy_plot_has_one_line_per_head_and_the_maximum():
    table = torch.rand(5, 2, 3)
    figure = drawn(draw_head_entropy([0, 10, 20, 30, 40], table, ["a", "b"], maximum=math.log(16)))
    for layer, axes in enumerate(figure.axes[:2]):
        assert [line.get_ydata().tolist() for line in axes.get_lines()[:3]] == table[:, layer].T.double().tolist()
        assert axes.get_lines()[3].get_ydata()[0] == math.log(16)


def test_training_strip_spans_first_to_last_step_on_one_scale():
    maps = torch.rand(20, 4, 4)
    figure = drawn(draw_training_strip(list(range(0, 200, 10)), maps, max_panels=5))
    titles = [axes.get_title() for axes in figure.axes[:5]]
    assert (titles[0], titles[-1]) == ("step 0", "step 190")
    images = [image for axes in figure.axes for image in axes.get_images()]
    assert np.allclose(images[4].get_array(), maps[-1])
    assert {image.get_clim() for image in images[:5]} == {(0, maps.max().item())}


def test_animation_has_one_frame_per_step_and_holds_the_last(tmp_path):
    path = save_animation([0, 10, 20], torch.eye(4) * torch.tensor([0.1, 0.5, 1.0])[:, None, None], tmp_path / "a.gif")
    with Image.open(path) as animation:
        assert animation.n_frames == 3
        assert animation.info["loop"] == 0
        frames, pauses = [], []
        for i in range(3):
            animation.seek(i)
            frames.append(np.asarray(animation.convert("RGB")))
            pauses.append(animation.info["duration"])
    assert not np.array_equal(frames[0], frames[1])
    assert pauses[2] == LAST_FRAME * pauses[0]


def test_only_the_weights_and_the_step_change_between_frames(tmp_path):
    constant = torch.full((3, 4, 4), 0.25)
    with Image.open(save_animation([0, 500, 12_000], constant, tmp_path / "a.gif")) as animation:
        frames = []
        for i in range(3):
            animation.seek(i)
            frames.append(np.asarray(animation.convert("RGB")).astype(int))
    changed_rows = [np.nonzero(np.abs(frame - frames[-1]).max((1, 2)) > 40)[0] for frame in frames[:-1]]
    title = 80  # pixel rows above the map, with the title and the step
    assert all(len(rows) and rows.max() < title for rows in changed_rows)


def test_invalid_animations_raise(tmp_path):
    with pytest.raises(ValueError, match=r"saved as \.gif, got 'a\.png'; try a\.gif"):
        save_animation([0], torch.zeros(1, 2, 2), tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"one matrix for each step, got \(1, 2, 2\) for 2 steps"):
        save_animation([0, 1], torch.zeros(1, 2, 2), tmp_path / "a.gif")
