import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.nn.patch_embed import ConvEmbed, PatchEmbed, from_patches, patch_grid, to_patches

sizes = st.integers(1, 4)


@given(batch=st.integers(0, 3), channels=sizes, rows=sizes, columns=sizes, size=sizes)
@settings(deadline=None, max_examples=40, derandomize=True)
def test_cutting_and_joining_are_inverse_at_any_size(batch, channels, rows, columns, size):
    images = torch.randn(batch, channels, rows * size, columns * size)
    patches = to_patches(images, size)
    assert patches.shape == (batch, rows * columns, channels * size * size)
    assert torch.equal(from_patches(patches, size, (rows, columns)), images)
    assert torch.equal(to_patches(from_patches(patches, size, (rows, columns)), size), patches)
    assert patch_grid(images, size) == (rows, columns)


def test_patches_go_row_by_row_each_as_channel_height_width():
    images = torch.randn(2, 3, 4, 6)
    patches = to_patches(images, 2)
    for row in range(2):
        for column in range(3):
            cut = images[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            assert torch.equal(patches[:, 3 * row + column], cut.flatten(1))
    assert torch.equal(patches, F.unfold(images, 2, stride=2).mT)


def test_patch_tokens_equal_their_strided_convolution_in_values_and_gradients():
    """R4.15"""
    tokens = PatchEmbed(3, 5, 2).double()
    torch.nn.init.normal_(tokens.proj.bias)
    conv = tokens.as_convolution()
    images = torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    ours, theirs = tokens(images), conv(images).flatten(2).mT
    torch.testing.assert_close(ours, theirs)
    upstream = torch.randn_like(ours)
    (by_ours,) = torch.autograd.grad(ours, images, upstream)
    (by_theirs,) = torch.autograd.grad(theirs, images, upstream)
    torch.testing.assert_close(by_ours, by_theirs)
    assert tokens.grid(images) == conv(images).shape[-2:]


def test_the_convolution_is_a_copy():
    tokens = PatchEmbed(3, 5, 2)
    before = tokens.proj.weight.detach().clone()
    torch.nn.init.zeros_(tokens.as_convolution().weight)
    assert torch.equal(tokens.proj.weight, before)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_convolution_tokens_stand_on_the_same_grid_as_patches(size):
    tokens = ConvEmbed(3, 16, size)
    images = torch.randn(1, 3, 2 * size, 3 * size, requires_grad=True)
    out = tokens(images)
    assert tokens.grid(images) == (2, 3)
    assert out.shape == (1, 6, 16)
    assert len(tokens.stages) == size.bit_length() - 1
    for place in range(6):
        (gradient,) = torch.autograd.grad(out[0, place].abs().sum(), images, retain_graph=True)
        reach = to_patches(gradient, size)[0].abs().sum(-1)
        assert reach[place] > 0, "a token sees its own patch"
        if place % 3 == 2:
            assert reach[place - 2] == 0, "and nothing of the far side"


def test_convolution_tokens_overlap():
    images = torch.randn(1, 3, 8, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(ConvEmbed(3, 16, 4)(images)[0, 3].abs().sum(), images)
    assert (to_patches(gradient, 4)[0].abs().sum(-1) > 0).all()


@pytest.mark.parametrize("tokens", [PatchEmbed(3, 5, 4), ConvEmbed(3, 5, 4)], ids=["patches", "convolutions"])
def test_an_image_that_the_patch_does_not_divide_is_refused(tokens):
    for height, width in [(6, 8), (8, 6), (0, 4)]:
        with pytest.raises(ValueError, match=f"multiples of the patch size, got {height} x {width}, patch size 4; pad"):
            tokens.grid(torch.zeros(1, 3, height, width))
    with pytest.raises(ValueError, match=r"\(batch, channels, height, width\), got shape \(3, 8, 8\).*image\[None\]"):
        tokens.grid(torch.zeros(3, 8, 8))


def test_cutting_refuses_what_the_patch_does_not_divide():
    with pytest.raises(ValueError, match="got 28 x 28, patch size 5"):
        to_patches(torch.zeros(1, 1, 28, 28), 5)
    with pytest.raises(ValueError, match="got 28 x 28, patch size 0"):
        patch_grid(torch.zeros(1, 1, 28, 28), 0)


def test_joining_refuses_another_grid_or_size():
    patches = torch.zeros(1, 6, 12)
    with pytest.raises(ValueError, match=r"got \(1, 6, 12\) with grid \(2, 2\) and patch_size 2"):
        from_patches(patches, 2, (2, 2))
    with pytest.raises(ValueError, match=r"got \(1, 6, 12\) with grid \(2, 3\) and patch_size 5"):
        from_patches(patches, 5, (2, 3))


@pytest.mark.parametrize("size", [0, 1, 3, 6, -2])
def test_convolution_tokens_need_a_power_of_two(size):
    with pytest.raises(ValueError, match=rf"patch_size .*2, 4, 8, .* got {size}"):
        ConvEmbed(3, 16, size)
