"""Images to tokens and back.

Cutting an image into patches and projecting each one is a convolution whose stride is its kernel's size:
`PatchTokens` does the first, `PatchTokens.as_convolution` gives the second, with the same weights.
Dims: B batch, C channels, P patches, E model width; images are (B,C,height,width).
"""

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.nn.linear import XavierLinear
from clearhead.nn.sizes import check_halvings


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


class PatchTokens(nn.Module):
    """One token for each patch: its pixels, projected. (B,C,height,width) -> (B,P,E)"""

    def __init__(self, channels: int, width: int, size: int):
        super().__init__()
        self.channels, self.size = channels, size
        self.project = XavierLinear(channels * size * size, width)

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


def halving(before: int, after: int) -> nn.Conv2d:
    conv = nn.Conv2d(before, after, 3, stride=2, padding=1)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
    return conv


class ConvolutionTokens(nn.Module):
    """Overlapping tokens: 3x3 convolutions of stride 2, each halving the image, until one place is one patch."""

    def __init__(self, channels: int, width: int, size: int):
        super().__init__()
        check_halvings(size)
        halvings = size.bit_length() - 1
        self.channels, self.size = channels, size
        widths = [channels] + [max(8, width >> (halvings - 1 - i)) for i in range(halvings - 1)] + [width]
        self.stages = nn.ModuleList(halving(before, after) for before, after in pairwise(widths))

    def grid(self, images: Tensor) -> tuple[int, int]:
        return grid_of(images, self.size)

    def forward(self, images: Tensor) -> Tensor:
        check_images(images, self.channels)
        x = images
        for i, stage in enumerate(self.stages):
            x = stage(F.relu(x) if i else x)
        return x.flatten(2).transpose(1, 2)  # (B,E,rows,columns) -> (B,P,E)
