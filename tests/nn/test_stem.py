import pytest
import torch
import torch.nn.functional as F

from clearhead.nn.patch_embed import (
    CHANNEL_CORRELATION,
    NOISE_VARIANCE,
    PIXEL_CORRELATION,
    ConvStage,
    ConvStem,
    cosine_basis,
    dct_filters,
    to_patches,
)


@pytest.mark.parametrize(("size", "widths"), [(2, [32]), (4, [16, 32]), (8, [8, 16, 32])])
def test_tokens_stand_on_the_same_grid_as_patches(size, widths):
    tokens, images = ConvStem(3, 32, size), torch.randn(2, 3, 2 * size, 3 * size)
    assert tokens.grid(images) == (2, 3)
    assert tokens(images).shape == (2, 6, 32)
    assert [stage.conv1.out_channels for stage in tokens.stages] == widths


@pytest.mark.parametrize(("channels", "first"), [(1, 24), (3, 56)])
def test_the_first_stage_has_a_channel_for_each_filter_and_sign_and_hardly_more(channels, first):
    tokens = ConvStem(channels, 256, 4)
    assert tokens.stages[0].conv1.out_channels == first
    assert 0 <= first - 2 * len(dct_filters(channels)) < 8


def test_tokens_see_their_patch_and_overlap():
    images = torch.randn(1, 3, 32, 32, requires_grad=True)
    out = ConvStem(3, 16, 4)(images)
    (gradient,) = torch.autograd.grad(out[0, 9].abs().sum(), images)
    seen = to_patches(gradient, 4)[0].abs().sum(-1) > 0
    assert seen[9]
    assert seen.sum() > 1
    assert not seen[63], "and nothing of the far corner"


def test_a_stage_is_its_formula():
    stage, x = ConvStage(3, 8).double(), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    answers = F.pad(F.conv2d(x, stage.conv1.weight, padding=1).relu(), (1, 1, 1, 1))
    halved = answers.unfold(2, 3, 2).unfold(3, 3, 2).amax((-1, -2))
    torch.testing.assert_close(stage(x), halved + F.conv2d(halved, stage.conv2.weight, padding=1).relu())


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_cosines_are_an_orthonormal_basis_that_begins_with_the_mean(n):
    basis = cosine_basis(n)
    torch.testing.assert_close(basis @ basis.T, torch.eye(n))
    torch.testing.assert_close(basis[0], torch.full((n,), n**-0.5))


@pytest.mark.parametrize("channels", [1, 3])
def test_filters_answer_evenly_to_pixels_that_are_alike_as_in_photographs(channels):
    near = PIXEL_CORRELATION ** (torch.arange(3)[:, None] - torch.arange(3)).abs()
    alike = torch.full((channels, channels), CHANNEL_CORRELATION).fill_diagonal_(1.0)
    pixels = torch.kron(alike, torch.kron(near, near)).double()
    filters = dct_filters(channels).flatten(1).double()
    spread = filters @ pixels @ filters.T
    loud = spread.diagonal() > 0.5  # where photographs say more than noise
    assert loud.sum() > 5
    assert (spread.diagonal() <= 1.001).all()
    among = spread - spread.diagonal().diag()
    assert among.abs().max() < 0.12, "cosines are nearly, not quite, what makes such pixels independent"
    plain = torch.eye(9 * channels, dtype=torch.float64)
    raw = plain @ pixels @ plain.T
    assert (raw - raw.diagonal().diag()).abs().max() > 0.9, "as the pixels themselves are not"
    variances = 1 / filters.square().sum(1) - NOISE_VARIANCE
    assert (variances[:-1] >= variances[1:] - 1e-6).all(), "the plainest first"


def test_the_first_stage_begins_with_each_filter_in_both_signs():
    (first, second) = (stage.conv1.weight for stage in ConvStem(3, 128, 4).stages)
    torch.testing.assert_close(first[:27], dct_filters(3))
    torch.testing.assert_close(first[27:54], -dct_filters(3))
    assert second.abs().max() < 0.1, "later stages begin at random"
    few = ConvStem(3, 16, 4).stages[0].conv1.weight
    torch.testing.assert_close(few[:4], dct_filters(3)[:4])
    torch.testing.assert_close(few[4:], -dct_filters(3)[:4])


def test_an_images_tokens_do_not_depend_on_its_batch():
    tokens, images = ConvStem(3, 16, 4).double(), torch.randn(3, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(tokens(images)[:1], tokens(images[:1]), rtol=0, atol=1e-12)


def test_sizes_that_no_halving_reaches_are_refused():
    with pytest.raises(ValueError, match=r"patch_size .*2, 4, 8, .* got 3"):
        ConvStem(3, 16, 3)
    with pytest.raises(ValueError, match="with 3 channels"):
        ConvStem(3, 16, 4)(torch.zeros(1, 1, 8, 8))
