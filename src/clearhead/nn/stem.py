"""Convolutional tokens: what a vision transformer from scratch on small images learns fastest from.

Patches of a small data set are hard to learn from: everything about edges and textures has to come from attention.
A few convolutions know from the start that neighbours belong together. The first one begins as what is known of all
photographs: neighbouring pixels are alike, so their sums are large and their differences small. `even_filters` measures
both, each divided by the spread that it has. An image's tokens depend on nothing but the image: there is no batch norm.
Dims: B batch, C channels, P patches, E model width; images are (B,C,height,width).
"""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.nn.patches import check_images, grid_of
from clearhead.nn.sizes import check_halvings

NEIGHBOURS, COLOURS = 0.92, 0.88
"""correlation of neighbouring pixels, and of a pixel's channels, in photographs (measured on CIFAR-10: 0.90 to 0.92
and 0.78 to 0.91)"""
NOISE = 0.005
"""variance below which a filter is not made louder"""


def cosines(n: int) -> Tensor:
    """Rows are the mean, the slope, the bend ... of n numbers: an orthonormal basis (the discrete cosine transform)."""
    basis = torch.cos(math.pi / n * torch.outer(torch.arange(n), torch.arange(n) + 0.5))
    return F.normalize(basis, dim=1)


def even_filters(channels: int) -> Tensor:
    """Filters whose answers to photographs have equal variance and no correlation, the plainest first:
    colour x row x column cosines over the square root of their variance. (9C,C,3,3)"""
    along, across = cosines(3), cosines(channels)
    near = NEIGHBOURS ** (torch.arange(3)[:, None] - torch.arange(3)).abs()
    alike = torch.full((channels, channels), COLOURS).fill_diagonal_(1.0)
    place, colour = ((basis @ matrix @ basis.T).diagonal() for basis, matrix in ((along, near), (across, alike)))
    variance = torch.einsum("c,y,x->cyx", colour, place, place).flatten()
    filters = torch.einsum("ci,yj,xk->cyxijk", across, along, along).flatten(0, 2)
    order = variance.argsort(descending=True, stable=True)
    return (filters / (variance + NOISE).sqrt()[:, None, None, None])[order]


class Stage(nn.Module):
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
        filters = even_filters(weight.shape[1])[: len(weight) // 2].to(weight)
        weight[: 2 * len(filters)] = torch.cat([filters, -filters])


class StemTokens(nn.Module):
    """One token for each place that is left after halving the image; each stage has twice the channels of the one
    before, and the last the model's width. The first, where pixels are many, has no more than one for each even filter
    and sign, in multiples of 8. (B,C,height,width) -> (B,P,E)"""

    def __init__(self, channels: int, width: int, size: int):
        super().__init__()
        check_halvings(size)
        self.channels, self.size = channels, size
        last = size.bit_length() - 2
        widths = [channels, *(max(8, width >> (last - i)) for i in range(last)), width]
        if last:
            widths[1] = min(widths[1], 8 * math.ceil(2 * 9 * channels / 8))
        stages = [Stage(before, after) for before, after in pairwise(widths)]
        stages[0].begin_even()
        self.stages = nn.Sequential(*stages)

    def grid(self, images: Tensor) -> tuple[int, int]:
        return grid_of(images, self.size)

    def forward(self, images: Tensor) -> Tensor:
        check_images(images, self.channels)
        x = self.stages(images.contiguous(memory_format=torch.channels_last))
        return x.flatten(2).transpose(1, 2)  # (B,E,rows,columns) -> (B,P,E)
