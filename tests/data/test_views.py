import pytest
import torch

from clearhead.data.augment import tta_mean, tta_views
from clearhead.data.datasets import N_VIEWS, TTA

IMAGES = torch.arange(24.0).view(1, 2, 3, 4)


@pytest.mark.parametrize(("tta", "n"), [("none", 1), ("flip", 2), ("shift", 6)])
def test_each_view_has_the_shape_of_the_images_which_come_first(tta: TTA, n: int):
    found = tta_views(IMAGES, tta)
    assert len(found) == n == N_VIEWS[tta]
    assert found[0] is IMAGES
    assert all(view.shape == IMAGES.shape for view in found)
    assert len({tuple(view.flatten().tolist()) for view in found}) == n


def test_moved_images_have_moved_by_one_pixel_and_repeat_no_edge():
    _, down, up, *_ = tta_views(IMAGES, "shift")
    assert torch.equal(down[:, :, 1:, 1:], IMAGES[:, :, :-1, :-1])
    assert torch.equal(up[:, :, :-1, :-1], IMAGES[:, :, 1:, 1:])
    assert torch.equal(down[:, :, 0, 1:], IMAGES[:, :, 1, :-1])


def test_every_view_has_its_mirror_image():
    found = tta_views(IMAGES, "shift")
    for view, mirrored in zip(found[:3], found[3:], strict=True):
        assert torch.equal(view.flip(-1), mirrored)


def test_the_mean_is_over_the_answers_and_not_over_the_images():
    def largest(images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1).max(1).values

    answers = [largest(view) for view in tta_views(IMAGES, "shift")]
    assert torch.equal(tta_mean(largest, IMAGES, "shift"), torch.stack(answers).mean(0))
    assert torch.equal(tta_mean(largest, IMAGES, "none"), largest(IMAGES))
