import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.nn.tokens import (
    CHANNEL_CORRELATION,
    NOISE_VARIANCE,
    PIXEL_CORRELATION,
    ConvEmbed,
    ConvStage,
    ConvStem,
    PatchEmbed,
    cosine_basis,
    dct_filters,
    from_patches,
    patch_grid,
    to_patches,
)

sizes = st.integers(1, 4)


@given(batch=st.integers(0, 3), channels=sizes, rows=sizes, columns=sizes, size=sizes)
@settings(deadline=None, max_examples=40, derandomize=True)
def test_to_patches_and_from_patches_are_inverse(batch, channels, rows, columns, size):
    images = torch.randn(batch, channels, rows * size, columns * size)
    patches = to_patches(images, size)
    assert patches.shape == (batch, rows * columns, channels * size * size)
    assert torch.equal(from_patches(patches, size, (rows, columns)), images)
    assert torch.equal(to_patches(from_patches(patches, size, (rows, columns)), size), patches)
    assert patch_grid(images, size) == (rows, columns)


def test_patches_are_in_row_major_order_and_flattened_as_chw():
    images = torch.randn(2, 3, 4, 6)
    patches = to_patches(images, 2)
    for row in range(2):
        for column in range(3):
            cut = images[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            assert torch.equal(patches[:, 3 * row + column], cut.flatten(1))
    assert torch.equal(patches, F.unfold(images, 2, stride=2).mT)


def test_patch_embed_equals_a_strided_convolution_in_values_and_gradients():
    embed = PatchEmbed(3, 5, 2).double()
    torch.nn.init.normal_(embed.proj.bias)
    conv = embed.as_convolution()
    images = torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    ours, theirs = embed(images), conv(images).flatten(2).mT
    torch.testing.assert_close(ours, theirs)
    upstream = torch.randn_like(ours)
    (by_ours,) = torch.autograd.grad(ours, images, upstream)
    (by_theirs,) = torch.autograd.grad(theirs, images, upstream)
    torch.testing.assert_close(by_ours, by_theirs)
    assert embed.grid(images) == conv(images).shape[-2:]


def test_as_convolution_copies_the_weights():
    embed = PatchEmbed(3, 5, 2)
    before = embed.proj.weight.detach().clone()
    torch.nn.init.zeros_(embed.as_convolution().weight)
    assert torch.equal(embed.proj.weight, before)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_conv_embed_has_the_patch_grid_and_a_local_receptive_field(size):
    embed = ConvEmbed(3, 16, size)
    images = torch.randn(1, 3, 2 * size, 3 * size, requires_grad=True)
    out = embed(images)
    assert embed.grid(images) == (2, 3)
    assert out.shape == (1, 6, 16)
    assert len(embed.stages) == size.bit_length() - 1
    for position in range(6):
        (gradient,) = torch.autograd.grad(out[0, position].abs().sum(), images, retain_graph=True)
        receptive_field = to_patches(gradient, size)[0].abs().sum(-1)
        assert receptive_field[position] > 0, "a token sees its own patch"
        if position % 3 == 2:
            assert receptive_field[position - 2] == 0, "and not the far side"


def test_conv_embed_receptive_fields_overlap():
    images = torch.randn(1, 3, 8, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(ConvEmbed(3, 16, 4)(images)[0, 3].abs().sum(), images)
    assert (to_patches(gradient, 4)[0].abs().sum(-1) > 0).all()


@pytest.mark.parametrize("embed", [PatchEmbed(3, 5, 4), ConvEmbed(3, 5, 4)], ids=["patches", "convolutions"])
def test_image_sizes_not_divisible_by_the_patch_size_are_rejected(embed):
    for height, width in [(6, 8), (8, 6), (0, 4)]:
        with pytest.raises(ValueError, match=f"multiples of the patch size, got {height} x {width}, patch size 4; pad"):
            embed.grid(torch.zeros(1, 3, height, width))
    with pytest.raises(ValueError, match=r"\(batch, channels, height, width\), got shape \(3, 8, 8\).*image\[None\]"):
        embed.grid(torch.zeros(3, 8, 8))


def test_to_patches_rejects_indivisible_sizes():
    with pytest.raises(ValueError, match="got 28 x 28, patch size 5"):
        to_patches(torch.zeros(1, 1, 28, 28), 5)
    with pytest.raises(ValueError, match="got 28 x 28, patch size 0"):
        patch_grid(torch.zeros(1, 1, 28, 28), 0)


def test_from_patches_rejects_a_wrong_grid_or_patch_size():
    patches = torch.zeros(1, 6, 12)
    with pytest.raises(ValueError, match=r"got \(1, 6, 12\) with grid \(2, 2\) and patch_size 2"):
        from_patches(patches, 2, (2, 2))
    with pytest.raises(ValueError, match=r"got \(1, 6, 12\) with grid \(2, 3\) and patch_size 5"):
        from_patches(patches, 5, (2, 3))


@pytest.mark.parametrize("size", [0, 1, 3, 6, -2])
def test_conv_embed_requires_a_power_of_two_patch_size(size):
    with pytest.raises(ValueError, match=rf"patch_size .*2, 4, 8, .* got {size}"):
        ConvEmbed(3, 16, size)


@pytest.mark.parametrize(("size", "widths"), [(2, [32]), (4, [16, 32]), (8, [8, 16, 32])])
def test_conv_stem_has_the_patch_grid(size, widths):
    embed, images = ConvStem(3, 32, size), torch.randn(2, 3, 2 * size, 3 * size)
    assert embed.grid(images) == (2, 3)
    assert embed(images).shape == (2, 6, 32)
    assert [stage.conv1.out_channels for stage in embed.stages] == widths


@pytest.mark.parametrize(("channels", "first"), [(1, 24), (3, 56)])
def test_the_first_conv_stem_stage_has_two_channels_per_filter(channels, first):
    embed = ConvStem(channels, 256, 4)
    assert embed.stages[0].conv1.out_channels == first
    assert 0 <= first - 2 * len(dct_filters(channels)) < 8


def test_conv_stem_receptive_fields_are_local_and_overlap():
    images = torch.randn(1, 3, 32, 32, requires_grad=True)
    out = ConvStem(3, 16, 4)(images)
    (gradient,) = torch.autograd.grad(out[0, 9].abs().sum(), images)
    seen = to_patches(gradient, 4)[0].abs().sum(-1) > 0
    assert seen[9]
    assert seen.sum() > 1
    assert not seen[63], "and not the far corner"


def test_conv_stage_matches_its_formula():
    stage, x = ConvStage(3, 8).double(), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    activations = F.pad(F.conv2d(x, stage.conv1.weight, padding=1).relu(), (1, 1, 1, 1))
    halved = activations.unfold(2, 3, 2).unfold(3, 3, 2).amax((-1, -2))
    torch.testing.assert_close(stage(x), halved + F.conv2d(halved, stage.conv2.weight, padding=1).relu())


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_cosine_basis_is_orthonormal_and_starts_with_the_mean(n):
    basis = cosine_basis(n)
    torch.testing.assert_close(basis @ basis.T, torch.eye(n))
    torch.testing.assert_close(basis[0], torch.full((n,), n**-0.5))


@pytest.mark.parametrize("channels", [1, 3])
def test_dct_filters_decorrelate_and_whiten_natural_image_statistics(channels):
    pixel_covariance = PIXEL_CORRELATION ** (torch.arange(3)[:, None] - torch.arange(3)).abs()
    channel_covariance = torch.full((channels, channels), CHANNEL_CORRELATION).fill_diagonal_(1.0)
    pixels = torch.kron(channel_covariance, torch.kron(pixel_covariance, pixel_covariance)).double()
    filters = dct_filters(channels).flatten(1).double()
    response_covariance = filters @ pixels @ filters.T
    above_noise = response_covariance.diagonal() > 0.5  # components with more signal than noise
    assert above_noise.sum() > 5
    assert (response_covariance.diagonal() <= 1.001).all()
    off_diagonal = response_covariance - response_covariance.diagonal().diag()
    assert off_diagonal.abs().max() < 0.12, "the cosine basis decorrelates such pixels approximately"
    plain = torch.eye(9 * channels, dtype=torch.float64)
    raw = plain @ pixels @ plain.T
    assert (raw - raw.diagonal().diag()).abs().max() > 0.9, "raw pixels are strongly correlated"
    variances = 1 / filters.square().sum(1) - NOISE_VARIANCE
    assert (variances[:-1] >= variances[1:] - 1e-6).all(), "filters are sorted by decreasing variance"


def test_the_first_conv_stem_stage_is_initialized_with_signed_dct_filters():
    (first, second) = (stage.conv1.weight for stage in ConvStem(3, 128, 4).stages)
    torch.testing.assert_close(first[:27], dct_filters(3))
    torch.testing.assert_close(first[27:54], -dct_filters(3))
    assert second.abs().max() < 0.1, "later stages are initialized randomly"
    few = ConvStem(3, 16, 4).stages[0].conv1.weight
    torch.testing.assert_close(few[:4], dct_filters(3)[:4])
    torch.testing.assert_close(few[4:], -dct_filters(3)[:4])


def test_conv_stem_output_does_not_depend_on_the_batch():
    embed, images = ConvStem(3, 16, 4).double(), torch.randn(3, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(embed(images)[:1], embed(images[:1]), rtol=0, atol=1e-12)


def test_conv_stem_rejects_unsupported_patch_sizes_and_channels():
    with pytest.raises(ValueError, match=r"patch_size .*2, 4, 8, .* got 3"):
        ConvStem(3, 16, 3)
    with pytest.raises(ValueError, match="with 3 channels"):
        ConvStem(3, 16, 4)(torch.zeros(1, 1, 8, 8))
