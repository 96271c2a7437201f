import pytest
import torch
import torch.nn.functional as F

from clearhead.nn.patches import to_patches
from clearhead.nn.stem import NormedConvolution, StemTokens


@pytest.mark.parametrize(("size", "strides"), [(2, [2]), (4, [2, 1, 2]), (8, [2, 1, 2, 1, 2])])
def test_tokens_stand_on_the_same_grid_as_patches(size, strides):
    tokens, images = StemTokens(3, 32, size), torch.randn(2, 3, 2 * size, 3 * size)
    assert tokens.grid(images) == (2, 3)
    assert tokens(images).shape == (2, 6, 32)
    assert [stage.convolution.stride[0] for stage in tokens.stages] == strides


def test_each_convolution_doubles_the_channels_up_to_the_width():
    widths = [stage.convolution.out_channels for stage in StemTokens(1, 128, 4).stages]
    assert widths == [32, 64, 128]
    assert [stage.convolution.out_channels for stage in StemTokens(1, 16, 8).stages] == [8, 8, 8, 8, 16]


def test_tokens_see_their_patch_and_overlap():
    images = torch.randn(1, 3, 16, 16, requires_grad=True)
    out = StemTokens(3, 16, 4)(images)
    (gradient,) = torch.autograd.grad(out[0, 5].abs().sum(), images)
    seen = to_patches(gradient, 4)[0].abs().sum(-1) > 0
    assert seen[5]
    assert seen.sum() > 1
    assert not seen[15], "and nothing of the far corner"


def test_a_stage_is_its_formula():
    stage, x = NormedConvolution(3, 8, 2).double(), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    places = F.conv2d(x, stage.convolution.weight, stride=2, padding=1).permute(0, 2, 3, 1)
    expected = F.gelu(F.layer_norm(places, (8,))).permute(0, 3, 1, 2)
    torch.testing.assert_close(stage(x), expected)


def test_an_images_tokens_do_not_depend_on_its_batch():
    tokens, images = StemTokens(3, 16, 4).double(), torch.randn(3, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(tokens(images)[:1], tokens(images[:1]), rtol=0, atol=1e-12)


def test_sizes_that_no_halving_reaches_are_refused():
    with pytest.raises(ValueError, match=r"patch size must be 2, 4, 8, \.\.\., got 3; try 4"):
        StemTokens(3, 16, 3)
    with pytest.raises(ValueError, match="images must have 3 channels"):
        StemTokens(3, 16, 4)(torch.zeros(1, 1, 8, 8))
