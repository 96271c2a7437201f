import pytest
import torch

from clearhead.data import N_VIEWS, TTA, Augmentation
from clearhead.data.batches import augment, crop, cutout, flip, mixup, mixup_lam, mixup_perm, tta_mean, tta_views
from clearhead.data.dataset import Normalize

IMAGES = torch.randint(1, 256, (6, 3, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
ALL_AUGMENTATIONS = Augmentation(crop=2, flip=True, cutout=3)
UNIT_SCALE = Normalize((0.0,) * 3, (1 / 255,) * 3)


def test_crop_is_a_window_of_the_zero_padded_image():
    top, left = torch.tensor([0, 1, 2, 3, 4, 2]), torch.tensor([4, 3, 2, 1, 0, 2])
    padded = torch.nn.functional.pad(IMAGES, (2, 2, 2, 2))
    for i, image in enumerate(crop(IMAGES, 2, top, left)):
        assert torch.equal(image, padded[i, :, top[i] : top[i] + 5, left[i] : left[i] + 7])


def test_a_centered_crop_is_the_identity():
    middle = torch.full((6,), 3)
    assert torch.equal(crop(IMAGES, 3, middle, middle), IMAGES)


def test_flip_applies_only_to_the_selected_images():
    selected = torch.tensor([True, False, True, False, False, True])
    flipped = flip(IMAGES, selected)
    assert torch.equal(flipped[selected], IMAGES[selected].flip(3))
    assert torch.equal(flipped[~selected], IMAGES[~selected])


@pytest.mark.parametrize(
    ("side", "y", "x", "blank"), [(3, 2, 3, 9), (2, 2, 3, 4), (3, 0, 0, 4), (3, 4, 6, 4), (99, 2, 2, 35)]
)
def test_cutout_zeroes_a_square_around_its_center(side, y, x, blank):
    cut = cutout(IMAGES[:1].float(), side, torch.tensor([y]), torch.tensor([x]))
    is_blank = cut[0] == 0
    assert is_blank.sum((1, 2)).tolist() == [blank] * 3
    assert is_blank[:, y, x].all()
    assert torch.equal(cut[0][~is_blank], IMAGES[0].float()[~is_blank])


def test_a_slice_of_a_batch_gets_the_same_augmentation_as_the_full_batch():
    full = augment(IMAGES, torch.arange(6), ALL_AUGMENTATIONS, UNIT_SCALE, key=3)
    slots = torch.tensor([4, 1])
    assert torch.equal(augment(IMAGES[slots], slots, ALL_AUGMENTATIONS, UNIT_SCALE, key=3), full[slots])


def test_keys_give_different_augmentations_and_inputs_are_not_modified():
    before = IMAGES.clone()
    first, second = (augment(IMAGES, torch.arange(6), ALL_AUGMENTATIONS, UNIT_SCALE, key) for key in (1, 2))
    assert not torch.equal(first, second)
    assert torch.equal(IMAGES, before)


def test_without_augmentation_images_are_only_normalized():
    assert torch.equal(augment(IMAGES, torch.arange(6), Augmentation(), UNIT_SCALE, key=1), IMAGES.float())


def test_all_crop_offsets_and_both_flips_occur():
    one = torch.zeros(1, 3, 5, 5, dtype=torch.uint8)
    one[:, :, 2, 2] = 1
    seen = augment(one.expand(500, -1, -1, -1), torch.arange(500), Augmentation(crop=2), UNIT_SCALE, key=0)
    assert seen.sum((1, 2, 3)).unique().tolist() == [3]
    assert len(seen.unique(dim=0)) == 25
    asymmetric = IMAGES[:1].expand(500, -1, -1, -1)
    seen = augment(asymmetric, torch.arange(500), Augmentation(flip=True), UNIT_SCALE, key=0)
    is_flipped = (seen == asymmetric.flip(3)).all(3).all(2).all(1)
    assert 0.4 < is_flipped.float().mean() < 0.6


def test_mixup_lam_is_in_the_unit_interval_and_follows_alpha():
    narrow, wide = mixup_lam(4000, 20.0, key=1), mixup_lam(4000, 0.2, key=1)
    for lam in (narrow, wide):
        assert lam.min() >= 0
        assert lam.max() <= 1
        assert abs(lam.mean() - 0.5) < 0.04
    assert wide.std() > 3 * narrow.std()  # sqrt(1 / (4 (2 alpha + 1))): 0.423 against 0.078


def test_mixup_perm_is_a_permutation():
    assert mixup_perm(50, key=2).sort().values.tolist() == list(range(50))


def test_mixup_is_a_linear_interpolation():
    a, b = IMAGES.float(), IMAGES.flip(0).float()
    lam = torch.tensor([0.0, 1.0, 0.5, 0.25, 0.75, 0.1])
    mixed = mixup(a, b, lam)
    assert torch.equal(mixed[0], b[0])
    assert torch.equal(mixed[1], a[1])
    for i in range(6):
        torch.testing.assert_close(mixed[i], lam[i] * a[i] + (1 - lam[i]) * b[i])


RAMP = torch.arange(24.0).view(1, 2, 3, 4)


@pytest.mark.parametrize(("tta", "n"), [("none", 1), ("flip", 2), ("shift", 6)])
def test_tta_views_keep_the_shape_and_start_with_the_original(tta: TTA, n: int):
    found = tta_views(RAMP, tta)
    assert len(found) == n == N_VIEWS[tta]
    assert found[0] is RAMP
    assert all(view.shape == RAMP.shape for view in found)
    assert len({tuple(view.flatten().tolist()) for view in found}) == n


def test_shifted_views_move_by_one_pixel_with_reflection_padding():
    _, down, up, *_ = tta_views(RAMP, "shift")
    assert torch.equal(down[:, :, 1:, 1:], RAMP[:, :, :-1, :-1])
    assert torch.equal(up[:, :, :-1, :-1], RAMP[:, :, 1:, 1:])
    assert torch.equal(down[:, :, 0, 1:], RAMP[:, :, 1, :-1])


def test_each_shifted_view_has_a_flipped_counterpart():
    found = tta_views(RAMP, "shift")
    for view, mirrored in zip(found[:3], found[3:], strict=True):
        assert torch.equal(view.flip(-1), mirrored)


def test_tta_mean_averages_outputs_not_inputs():
    def largest(images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1).max(1).values

    outputs = [largest(view) for view in tta_views(RAMP, "shift")]
    assert torch.equal(tta_mean(largest, RAMP, "shift"), torch.stack(outputs).mean(0))
    assert torch.equal(tta_mean(largest, RAMP, "none"), largest(RAMP))
