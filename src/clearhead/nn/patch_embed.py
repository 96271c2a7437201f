"""Images to tokens and back.

Cutting an image into patches and projecting each one is a convolution whose stride is its kernel's size:
`PatchTokens` does the first, `PatchTokens.as_convolution` gives the second, with the same weights.
Dims: B batch, C channels, P patches, E model width; images are (B,C,height,width).
"""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.nn.attention import Linear
from clearhead.validation import check_power_of_two


def check_images(images: Tensor, channels: int) -> None:
    if not images.is_floating_point():
        raise ValueError(f"images must be floating point, got {images.dtype}; turn bytes into images.float() / 255")
    if images.dim() == 4 and images.shape[1] != channels:
        raise ValueError(
            f"images must have {channels} channels, got shape {tuple(images.shape)}; "
            "order them (batch, channels, height, width), or build the model with channels="
            f"{images.shape[1]}"
        )


def grid_of(images: Tensor, size: int) -> tuple[int, int]:
    """Rows and columns of patches in these images."""
    if images.dim() != 4:
        raise ValueError(
            f"images must be (batch, channels, height, width), got shape {tuple(images.shape)}; "
            "add a batch of one with image[None], or the channel of grey images with images[:, None]"
        )
    height, width = images.shape[-2:]
    if size < 1 or height % size or width % size or not height or not width:
        raise ValueError(
            f"image height and width must be multiples of the patch size, got {height} x {width}, patch size {size}; "
            "pad or resize the images, or choose a size that divides both"
        )
    return height // size, width // size


def to_patches(images: Tensor, size: int) -> Tensor:
    """(B,C,rows*size,columns*size) -> (B,P,C*size*size), row by row"""
    rows, columns = grid_of(images, size)
    tiles = images.unflatten(3, (columns, size)).unflatten(2, (rows, size))  # (B,C,rows,size,columns,size)
    return tiles.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def from_patches(patches: Tensor, size: int, grid: tuple[int, int]) -> Tensor:
    """The images again: the inverse of `to_patches`. (B,P,C*size*size) -> (B,C,rows*size,columns*size)"""
    if patches.shape[-2] != grid[0] * grid[1] or patches.shape[-1] % (size * size):
        raise ValueError(
            f"patches must be (B, rows*columns, channels*size*size), got {tuple(patches.shape)} with grid {grid} "
            f"and size {size}; pass the grid and the size that cut them"
        )
    tiles = patches.unflatten(-1, (-1, size, size)).unflatten(1, grid)  # (B,rows,columns,C,size,size)
    return tiles.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


class PatchEmbed(nn.Module):
    """One token for each patch: its pixels, projected. (B,C,height,width) -> (B,P,E)"""

    def __init__(self, channels: int, width: int, size: int):
        super().__init__()
        self.channels, self.size = channels, size
        self.project = Linear(channels * size * size, width)

    def grid(self, images: Tensor) -> tuple[int, int]:
        return grid_of(images, self.size)

    def forward(self, images: Tensor) -> Tensor:
        check_images(images, self.channels)
        return self.project(to_patches(images, self.size))

    def as_convolution(self) -> nn.Conv2d:
        """The strided convolution with the same weights: its output is (B,E,rows,columns)."""
        width = self.project.out_features
        conv = nn.Conv2d(self.channels, width, kernel_size=self.size, stride=self.size)
        conv = conv.to(self.project.weight)
        shape = (width, self.channels, self.size, self.size)
        conv.load_state_dict({"weight": self.project.weight.reshape(shape), "bias": self.project.bias})
        return conv


def downsampling_conv(before: int, after: int) -> nn.Conv2d:
    conv = nn.Conv2d(before, after, 3, stride=2, padding=1)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
    return conv


class ConvEmbed(nn.Module):
    """Overlapping tokens: 3x3 convolutions of stride 2, each halving the image, until one place is one patch."""

    def __init__(self, channels: int, width: int, size: int):
        super().__init__()
        check_power_of_two(size)
        halvings = size.bit_length() - 1
        self.channels, self.size = channels, size
        widths = [channels] + [max(8, width >> (halvings - 1 - i)) for i in range(halvings - 1)] + [width]
        self.stages = nn.ModuleList(downsampling_conv(before, after) for before, after in pairwise(widths))

    def grid(self, images: Tensor) -> tuple[int, int]:
        return grid_of(images, self.size)

    def forward(self, images: Tensor) -> Tensor:
        check_images(images, self.channels)
        x = images
        for i, stage in enumerate(self.stages):
            x = stage(F.relu(x) if i else x)
        return x.flatten(2).transpose(1, 2)  # (B,E,rows,columns) -> (B,P,E)


# Convolutional tokens: what a vision transformer from scratch on small images learns fastest from.
#
# Patches of a small data set are hard to learn from: everything about edges and textures has to come from attention.
# A few convolutions know from the start that neighbours belong together. The first one begins as what is known of all
# photographs: neighbouring pixels are alike, so their sums are large and their differences small. `even_filters`
# measures
# both, each divided by the spread that it has. An image's tokens depend on nothing but the image: there is no batch
# norm.
# Dims: B batch, C channels, P patches, E model width; images are (B,C,height,width).


NEIGHBOURS, COLOURS = 0.92, 0.88
"""correlation of neighbouring pixels, and of a pixel's channels, in photographs (measured on CIFAR-10: 0.90 to 0.92
and 0.78 to 0.91)"""
NOISE = 0.005
"""variance below which a filter is not made louder"""


def cosine_basis(n: int) -> Tensor:
    """Rows are the mean, the slope, the bend ... of n numbers: an orthonormal basis (the discrete cosine transform)."""
    basis = torch.cos(math.pi / n * torch.outer(torch.arange(n), torch.arange(n) + 0.5))
    return F.normalize(basis, dim=1)


def dct_filters(channels: int) -> Tensor:
    """Filters whose answers to photographs have equal variance and no correlation, the plainest first:
    colour x row x column cosines over the square root of their variance. (9C,C,3,3)"""
    along, across = cosine_basis(3), cosine_basis(channels)
    near = NEIGHBOURS ** (torch.arange(3)[:, None] - torch.arange(3)).abs()
    alike = torch.full((channels, channels), COLOURS).fill_diagonal_(1.0)
    place, colour = ((basis @ matrix @ basis.T).diagonal() for basis, matrix in ((along, near), (across, alike)))
    variance = torch.einsum("c,y,x->cyx", colour, place, place).flatten()
    filters = torch.einsum("ci,yj,xk->cyxijk", across, along, along).flatten(0, 2)
    order = variance.argsort(descending=True, stable=True)
    return (filters / (variance + NOISE).sqrt()[:, None, None, None])[order]


class ConvStage(nn.Module):
    """y = relu(maxpool(conv3x3(x))), half as high and wide, then y + relu(conv3x3(y)). (B,C,h,w) -> (B,C',h/2,w/2)

    maxpool(relu(x)) would be the same as relu(maxpool(x)), and four times the work for relu.
    """

    def __init__(self, before: int, after: int):
        super().__init__()
        self.halve = nn.Conv2d(before, after, 3, padding=1, bias=False)
        self.look_around = nn.Conv2d(after, after, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(F.max_pool2d(self.halve(x), 3, stride=2, padding=1))
        return y + F.relu(self.look_around(y))

    @torch.no_grad()
    def begin_even(self) -> None:
        """Each filter twice, with either sign, since relu hides what is negative; those left over stay random."""
        weight = self.halve.weight
        filters = dct_filters(weight.shape[1])[: len(weight) // 2].to(weight)
        weight[: 2 * len(filters)] = torch.cat([filters, -filters])


class ConvStem(nn.Module):
    """One token for each place that is left after halving the image; each stage has twice the channels of the one
    before, and the last the model's width. The first, where pixels are many, has no more than one for each even filter
    and sign, in multiples of 8. (B,C,height,width) -> (B,P,E)"""

    def __init__(self, channels: int, width: int, size: int):
        super().__init__()
        check_power_of_two(size)
        self.channels, self.size = channels, size
        last = size.bit_length() - 2
        widths = [channels, *(max(8, width >> (last - i)) for i in range(last)), width]
        if last:
            widths[1] = min(widths[1], 8 * math.ceil(2 * 9 * channels / 8))
        stages = [ConvStage(before, after) for before, after in pairwise(widths)]
        stages[0].begin_even()
        self.stages = nn.Sequential(*stages)

    def grid(self, images: Tensor) -> tuple[int, int]:
        return grid_of(images, self.size)

    def forward(self, images: Tensor) -> Tensor:
        check_images(images, self.channels)
        x = self.stages(images.contiguous(memory_format=torch.channels_last))
        return x.flatten(2).transpose(1, 2)  # (B,E,rows,columns) -> (B,P,E)
