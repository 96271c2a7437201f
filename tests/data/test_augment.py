import pytest
import torch

from clearhead.data.augment import augment, crop, cutout, flip, mixup, mixup_lam, mixup_perm, tta_mean, tta_views
from clearhead.data.dataset import Normalize
from clearhead.data.datasets import N_VIEWS, TTA, Augmentation

IMAGES = torch.randint(1, 256, (6, 3, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
EVERYTHING = Augmentation(crop=2, flip=True, cutout=3)
PLAIN = Normalize((0.0,) * 3, (1 / 255,) * 3)


def test_a_crop_is_cut_out_of_the_padded_image():
    top, left = torch.tensor([0, 1, 2, 3, 4, 2]), torch.tensor([4, 3, 2, 1, 0, 2])
    padded = torch.nn.functional.pad(IMAGES, (2, 2, 2, 2))
    for i, image in enumerate(crop(IMAGES, 2, top, left)):
        assert torch.equal(image, padded[i, :, top[i] : top[i] + 5, left[i] : left[i] + 7])


def test_a_crop_in_the_middle_changes_nothing():
    middle = torch.full((6,), 3)
    assert torch.equal(crop(IMAGES, 3, middle, middle), IMAGES)


def test_only_the_chosen_are_flipped():
    chosen = torch.tensor([True, False, True, False, False, True])
    flipped = flip(IMAGES, chosen)
    assert torch.equal(flipped[chosen], IMAGES[chosen].flip(3))
    assert torch.equal(flipped[~chosen], IMAGES[~chosen])


@pytest.mark.parametrize(
    ("side", "y", "x", "blank"), [(3, 2, 3, 9), (2, 2, 3, 4), (3, 0, 0, 4), (3, 4, 6, 4), (99, 2, 2, 35)]
)
def test_a_square_around_the_centre_is_blank(side, y, x, blank):
    cut = cutout(IMAGES[:1].float(), side, torch.tensor([y]), torch.tensor([x]))
    is_blank = cut[0] == 0
    assert is_blank.sum((1, 2)).tolist() == [blank] * 3
    assert is_blank[:, y, x].all()
    assert torch.equal(cut[0][~is_blank], IMAGES[0].float()[~is_blank])


def test_a_part_of_a_batch_is_augmented_as_in_the_whole():
    whole = augment(IMAGES, torch.arange(6), EVERYTHING, PLAIN, key=3)
    places = torch.tensor([4, 1])
    assert torch.equal(augment(IMAGES[places], places, EVERYTHING, PLAIN, key=3), whole[places])


def test_another_key_augments_differently_and_none_changes_the_images_given():
    before = IMAGES.clone()
    first, second = (augment(IMAGES, torch.arange(6), EVERYTHING, PLAIN, key) for key in (1, 2))
    assert not torch.equal(first, second)
    assert torch.equal(IMAGES, before)


def test_without_augmentation_images_are_only_normalised():
    assert torch.equal(augment(IMAGES, torch.arange(6), Augmentation(), PLAIN, key=1), IMAGES.float())


def test_every_offset_and_both_directions_come_up():
    one = torch.zeros(1, 3, 5, 5, dtype=torch.uint8)
    one[:, :, 2, 2] = 1
    seen = augment(one.expand(500, -1, -1, -1), torch.arange(500), Augmentation(crop=2), PLAIN, key=0)
    assert seen.sum((1, 2, 3)).unique().tolist() == [3]
    assert len(seen.unique(dim=0)) == 25
    lopsided = IMAGES[:1].expand(500, -1, -1, -1)
    seen = augment(lopsided, torch.arange(500), Augmentation(flip=True), PLAIN, key=0)
    is_flipped = (seen == lopsided.flip(3)).all(3).all(2).all(1)
    assert 0.4 < is_flipped.float().mean() < 0.6


def test_shares_are_between_0_and_1_and_follow_alpha():
    narrow, wide = mixup_lam(4000, 20.0, key=1), mixup_lam(4000, 0.2, key=1)
    for share in (narrow, wide):
        assert share.min() >= 0
        assert share.max() <= 1
        assert abs(share.mean() - 0.5) < 0.04
    assert wide.std() > 3 * narrow.std()  # sqrt(1 / (4 (2 alpha + 1))): 0.423 against 0.078


def test_every_image_has_a_partner_of_its_own():
    assert mixup_perm(50, key=2).sort().values.tolist() == list(range(50))


def test_a_blend_is_linear():
    a, b = IMAGES.float(), IMAGES.flip(0).float()
    share = torch.tensor([0.0, 1.0, 0.5, 0.25, 0.75, 0.1])
    mixed = mixup(a, b, share)
    assert torch.equal(mixed[0], b[0])
    assert torch.equal(mixed[1], a[1])
    for i in range(6):
        torch.testing.assert_close(mixed[i], share[i] * a[i] + (1 - share[i]) * b[i])


RAMP = torch.arange(24.0).view(1, 2, 3, 4)


@pytest.mark.parametrize(("tta", "n"), [("none", 1), ("flip", 2), ("shift", 6)])
def test_each_view_has_the_shape_of_the_images_which_come_first(tta: TTA, n: int):
    found = tta_views(RAMP, tta)
    assert len(found) == n == N_VIEWS[tta]
    assert found[0] is RAMP
    assert all(view.shape == RAMP.shape for view in found)
    assert len({tuple(view.flatten().tolist()) for view in found}) == n


def test_moved_images_have_moved_by_one_pixel_and_repeat_no_edge():
    _, down, up, *_ = tta_views(RAMP, "shift")
    assert torch.equal(down[:, :, 1:, 1:], RAMP[:, :, :-1, :-1])
    assert torch.equal(up[:, :, :-1, :-1], RAMP[:, :, 1:, 1:])
    assert torch.equal(down[:, :, 0, 1:], RAMP[:, :, 1, :-1])


def test_every_view_has_its_mirror_image():
    found = tta_views(RAMP, "shift")
    for view, mirrored in zip(found[:3], found[3:], strict=True):
        assert torch.equal(view.flip(-1), mirrored)


def test_the_mean_is_over_the_answers_and_not_over_the_images():
    def largest(images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1).max(1).values

    answers = [largest(view) for view in tta_views(RAMP, "shift")]
    assert torch.equal(tta_mean(largest, RAMP, "shift"), torch.stack(answers).mean(0))
    assert torch.equal(tta_mean(largest, RAMP, "none"), largest(RAMP))
