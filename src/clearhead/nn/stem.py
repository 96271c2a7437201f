"""Convolutional tokens with norms: what a vision transformer from scratch on small images learns fastest from.

Patches of a small data set are hard to learn from: everything about edges and textures has to come from attention.
A few convolutions know from the start that neighbours belong together. Layer norm over the channels of each place,
not batch norm: an image's tokens do not depend on its batch, nor on how many processes share the batch.
Dims: B batch, C channels, P patches, E model width; images are (B,C,height,width).
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.nn.patches import check_images, grid_of
from clearhead.nn.sizes import check_halvings


class NormedConvolution(nn.Module):
    """gelu(LN(conv3x3(x))), the norm over the channels of each place. (B,C,h,w) -> (B,C',h/stride,w/stride)"""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.convolution = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm = nn.LayerNorm(after)

    def forward(self, x: Tensor) -> Tensor:
        channels_last = self.convolution(x).permute(0, 2, 3, 1)
        return F.gelu(self.norm(channels_last)).permute(0, 3, 1, 2)


class StemTokens(nn.Module):
    """One token for each place that is left after halving the image; between two halvings, one more convolution.

    Each convolution doubles the channels, up to the model's width. (B,C,height,width) -> (B,P,E)
    """

    def __init__(self, channels: int, width: int, size: int):
        super().__init__()
        check_halvings(size)
        strides = [2] + [1, 2] * (size.bit_length() - 2)
        widths = [max(8, width >> (len(strides) - 1 - i)) for i in range(len(strides) - 1)]
        self.channels, self.size = channels, size
        self.stages = nn.Sequential(
            *(
                NormedConvolution(before, after, stride)
                for (before, after), stride in zip(pairwise([channels, *widths, width]), strides, strict=True)
            )
        )

    def grid(self, images: Tensor) -> tuple[int, int]:
        return grid_of(images, self.size)

    def forward(self, images: Tensor) -> Tensor:
        check_images(images, self.channels)
        x = self.stages(images.contiguous(memory_format=torch.channels_last))
        return x.flatten(2).transpose(1, 2)  # (B,E,rows,columns) -> (B,P,E)
