import pytest
import torch
from torch import nn

from clearhead.insight import attribution as module
from clearhead.insight.attribution import deletion_auc, deletion_curve, grid_cells, occlusion


class Corner(nn.Module):
    """Sees the upper left quarter of 4 x 4 images, and nothing else; its logit for class 1 is that quarter's sum."""

    def forward(self, images):
        total = images[:, :, :2, :2].sum((1, 2, 3))
        return torch.stack([torch.zeros_like(total), total], dim=1)


IMAGES = torch.ones(3, 1, 4, 4) * torch.tensor([0.5, 1.0, 2.0])[:, None, None, None]


def test_hiding_what_the_model_does_not_see_changes_nothing():
    moved = occlusion(Corner(), IMAGES, (2, 2), 1)
    assert moved.shape == (3, 2, 2)
    assert moved.flatten(1)[:, 1:].abs().max() == 0
    assert torch.allclose(moved[:, 0, 0], (IMAGES[:, 0, 0, 0] * 4).sigmoid() - 0.5)


def test_what_speaks_against_a_class_has_a_negative_number():
    assert torch.allclose(occlusion(Corner(), IMAGES, (2, 2), 0), -occlusion(Corner(), IMAGES, (2, 2), 1))


def test_the_default_class_is_the_prediction():
    both = torch.cat([IMAGES, -IMAGES])
    named = occlusion(Corner(), both, (2, 2), torch.tensor([1, 1, 1, 0, 0, 0]))
    assert torch.equal(occlusion(Corner(), both, (2, 2)), named)
    assert (named[:, 0, 0] > 0).all()


def test_a_patch_of_the_mean_colour_is_hidden_by_nothing():
    assert occlusion(Corner(), IMAGES, (2, 2), 1, fill="mean").abs().max() == 0
    with pytest.raises(ValueError, match="fill must be one of gray, mean, black, got 'white'"):
        occlusion(Corner(), IMAGES, (2, 2), 1, fill="white")


def test_black_is_the_darkest_of_the_image_itself():
    images = IMAGES.clone()
    images[:, :, 3, 3] = -1
    moved = occlusion(Corner(), images, (2, 2), 1, fill="black")
    assert torch.allclose(moved[:, 0, 0], (IMAGES[:, 0, 0, 0] * 4).sigmoid() - torch.tensor(-4.0).sigmoid())


def test_cells_cover_the_image_once():
    cells = grid_cells(torch.zeros(1, 3, 6, 8), (3, 2))
    assert cells.shape == (6, 6, 8)
    assert torch.equal(cells.sum(0), torch.ones(6, 8, dtype=torch.long))
    assert cells[1, :2, 4:].all()
    with pytest.raises(ValueError, match=r"got \(1, 3, 6, 8\) and 4 x 2"):
        grid_cells(torch.zeros(1, 3, 6, 8), (4, 2))


def test_the_curve_falls_when_the_patch_that_counts_is_hidden():
    first = torch.tensor([[4.0, 3.0], [2.0, 1.0]]).expand(3, 2, 2)
    before = (IMAGES[:, 0, 0, 0] * 4).sigmoid()
    curve = deletion_curve(Corner(), IMAGES, first, 1)
    assert torch.allclose(curve[:, 0], before)
    assert torch.equal(curve[:, 1:], torch.full((3, 4), 0.5))
    assert torch.allclose(deletion_curve(Corner(), IMAGES, -first, 1)[:, :4], before[:, None].expand(3, 4))


def test_a_better_ranking_has_a_smaller_area():
    first = torch.tensor([[4.0, 3.0], [2.0, 1.0]]).expand(3, 2, 2)
    good, bad = (deletion_auc(deletion_curve(Corner(), IMAGES, ranking, 1)) for ranking in (first, -first))
    assert (good < bad).all()
    before = (IMAGES[:, 0, 0, 0] * 4).sigmoid()
    assert torch.allclose(good, 0.5 + (before - 0.5) / 8)
    assert torch.allclose(bad, before - (before - 0.5) / 8)


def test_rankings_need_one_map_for_each_image():
    with pytest.raises(ValueError, match=r"ranking must be \(images, rows, columns\), got \(2, 2\) for 3 images"):
        deletion_curve(Corner(), IMAGES, torch.zeros(2, 2))


def test_images_are_processed_in_chunks_and_logits_can_be_extracted(monkeypatch):
    whole = occlusion(Corner(), IMAGES, (4, 4), 1)
    monkeypatch.setattr(module, "MAX_BATCH", 5)
    assert torch.equal(occlusion(Corner(), IMAGES, (4, 4), 1), whole)

    class Wrapped(nn.Module):
        def forward(self, images):
            return {"logits": Corner()(images)}

    assert torch.equal(occlusion(Wrapped(), IMAGES, (4, 4), 1, logits=lambda output: output["logits"]), whole)


def test_no_graph_is_kept_and_the_images_stay_as_they_were():
    images = IMAGES.clone().requires_grad_()
    assert not occlusion(Corner(), images.detach(), (2, 2), 1).requires_grad
    assert torch.equal(images, IMAGES)
