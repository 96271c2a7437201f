"""From images to tokens, and from tokens to the vector that enters the head: patch embeddings and pooling.

    PatchEmbed   cut the image into patches and project each one (Dosovitskiy et al. 2021). This is a convolution whose
                 stride equals its kernel size: `as_convolution` returns it.
    ConvEmbed    strided 3x3 convolutions, so that tokens overlap.
    ConvStem     convolutions, max pooling and residual connections: learns fastest from small data sets.

`Pooling.prepend_tokens` may add a token before the encoder; `Pooling.forward` reads the encoder's output. `valid` (B,L)
is True at real tokens and False at padding. Register tokens stand between the tokens of the pooling and the sequence;
they take part in attention and are left out before pooling.
Dims: B batch, C channels, P patches, L length, E model width; images are (B,C,height,width).
"""

import math
from abc import ABC, abstractmethod
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.nn.attention import Linear, MultiHeadAttention
from clearhead.validation import check_power_of_two


class PatchEmbed(nn.Module):
    """One token for each patch: a linear projection of its pixels. (B,C,height,width) -> (B,P,E)"""

    def __init__(self, in_channels: int, width: int, patch_size: int):
        super().__init__()
        self.in_channels, self.patch_size = in_channels, patch_size
        self.proj = Linear(in_channels * patch_size * patch_size, width)

    def grid(self, images: Tensor) -> tuple[int, int]:
        return patch_grid(images, self.patch_size)

    def forward(self, images: Tensor) -> Tensor:
        check_images(images, self.in_channels)
        return self.proj(to_patches(images, self.patch_size))

    def as_convolution(self) -> nn.Conv2d:
        """The strided convolution with the same weights; its output is (B,E,rows,columns)."""
        width = self.proj.out_features
        conv = nn.Conv2d(self.in_channels, width, kernel_size=self.patch_size, stride=self.patch_size)
        conv = conv.to(self.proj.weight)
        shape = (width, self.in_channels, self.patch_size, self.patch_size)
        conv.load_state_dict({"weight": self.proj.weight.reshape(shape), "bias": self.proj.bias})
        return conv


def to_patches(images: Tensor, patch_size: int) -> Tensor:
    """(B,C,rows*size,columns*size) -> (B,P,C*size*size), row by row"""
    rows, columns = patch_grid(images, patch_size)
    tiles = images.unflatten(3, (columns, patch_size)).unflatten(2, (rows, patch_size))  # (B,C,rows,size,columns,size)
    return tiles.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def from_patches(patches: Tensor, patch_size: int, grid: tuple[int, int]) -> Tensor:
    """The inverse of `to_patches`. (B,P,C*size*size) -> (B,C,rows*size,columns*size)"""
    if patches.shape[-2] != grid[0] * grid[1] or patches.shape[-1] % (patch_size * patch_size):
        raise ValueError(
            "patches must be (B, rows*columns, channels*patch_size*patch_size), "
            f"got {tuple(patches.shape)} with grid {grid} and patch_size {patch_size}"
        )
    tiles = patches.unflatten(-1, (-1, patch_size, patch_size)).unflatten(1, grid)  # (B,rows,columns,C,size,size)
    return tiles.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def patch_grid(images: Tensor, patch_size: int) -> tuple[int, int]:
    """The number of rows and columns of patches."""
    if images.dim() != 4:
        raise ValueError(
            f"images must be (batch, channels, height, width), got shape {tuple(images.shape)}; "
            "add a batch dimension with image[None], or a channel dimension with images[:, None]"
        )
    height, width = images.shape[-2:]
    if patch_size < 1 or height % patch_size or width % patch_size or not height or not width:
        raise ValueError(
            f"image height and width must be multiples of the patch size, got {height} x {width}, "
            f"patch size {patch_size}; pad or resize the images"
        )
    return height // patch_size, width // patch_size


def check_images(images: Tensor, in_channels: int) -> None:
    if not images.is_floating_point():
        raise ValueError(f"images must be floating point, got {images.dtype}; convert bytes with images.float() / 255")
    if images.dim() == 4 and images.shape[1] != in_channels:
        raise ValueError(
            f"images must be (batch, channels, height, width) with {in_channels} channels, "
            f"got shape {tuple(images.shape)}"
        )


class ConvEmbed(nn.Module):
    """3x3 convolutions of stride 2, each halving the image, until one position is one patch. -> (B,P,E)"""

    def __init__(self, in_channels: int, width: int, patch_size: int):
        super().__init__()
        check_power_of_two(patch_size=patch_size)
        n_stages = patch_size.bit_length() - 1
        self.in_channels, self.patch_size = in_channels, patch_size
        widths = [in_channels] + [max(8, width >> (n_stages - 1 - i)) for i in range(n_stages - 1)] + [width]
        self.stages = nn.ModuleList(downsampling_conv(before, after) for before, after in pairwise(widths))

    def grid(self, images: Tensor) -> tuple[int, int]:
        return patch_grid(images, self.patch_size)

    def forward(self, images: Tensor) -> Tensor:
        check_images(images, self.in_channels)
        x = images
        for i, stage in enumerate(self.stages):
            x = stage(F.relu(x) if i else x)
        return x.flatten(2).transpose(1, 2)  # (B,E,rows,columns) -> (B,P,E)


def downsampling_conv(in_channels: int, out_channels: int) -> nn.Conv2d:
    conv = nn.Conv2d(in_channels, out_channels, 3, stride=2, padding=1)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
    return conv


class ConvStem(nn.Module):
    """One token for each position that is left after halving the image. (B,C,height,width) -> (B,P,E)

    On a small data set, attention has to learn edges and textures from scratch, whereas convolutions are local from
    the start. Each stage has twice the channels of the one before, up to the model's width. The first one, which sees
    the most pixels, has at most two channels per DCT filter, rounded up to a multiple of 8. There is no batch norm: the
    tokens of an image depend on that image alone.
    """

    def __init__(self, in_channels: int, width: int, patch_size: int):
        super().__init__()
        check_power_of_two(patch_size=patch_size)
        self.in_channels, self.patch_size = in_channels, patch_size
        last = patch_size.bit_length() - 2
        widths = [in_channels, *(max(8, width >> (last - i)) for i in range(last)), width]
        if last:
            widths[1] = min(widths[1], 8 * math.ceil(2 * 9 * in_channels / 8))
        stages = [ConvStage(before, after) for before, after in pairwise(widths)]
        stages[0].init_dct_()
        self.stages = nn.Sequential(*stages)

    def grid(self, images: Tensor) -> tuple[int, int]:
        return patch_grid(images, self.patch_size)

    def forward(self, images: Tensor) -> Tensor:
        check_images(images, self.in_channels)
        x = self.stages(images.contiguous(memory_format=torch.channels_last))
        return x.flatten(2).transpose(1, 2)  # (B,E,rows,columns) -> (B,P,E)


class ConvStage(nn.Module):
    """y = relu(maxpool(conv1(x))), then y + relu(conv2(y)). (B,C,h,w) -> (B,C',h/2,w/2)

    relu(maxpool(x)) equals maxpool(relu(x)) and applies relu to a quarter of the values.
    """

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(F.max_pool2d(self.conv1(x), 3, stride=2, padding=1))
        return y + F.relu(self.conv2(y))

    @torch.no_grad()
    def init_dct_(self) -> None:
        """Sets conv1 to the DCT filters, each with both signs because of the relu; the other filters stay random."""
        weight = self.conv1.weight
        filters = dct_filters(weight.shape[1])[: len(weight) // 2].to(weight)
        weight[: 2 * len(filters)] = torch.cat([filters, -filters])


PIXEL_CORRELATION, CHANNEL_CORRELATION = 0.92, 0.88
"""correlation of neighboring pixels, and of a pixel's channels, in photographs (on CIFAR-10: 0.90 to 0.92 and 0.78 to
0.91)"""
NOISE_VARIANCE = 0.005
"""added to a filter's variance, so that filters which respond to noise alone are not amplified"""


def dct_filters(channels: int) -> Tensor:
    """Filters with uncorrelated outputs of equal variance on photographs, lowest frequencies first. (9C,C,3,3)

    Neighboring pixels are alike, so their sums vary much and their differences little. Each filter is a product of
    cosines over channels, rows and columns, divided by the standard deviation of its output.
    """
    pixel_basis, channel_basis = cosine_basis(3), cosine_basis(channels)
    pixel_corr = PIXEL_CORRELATION ** (torch.arange(3)[:, None] - torch.arange(3)).abs()
    channel_corr = torch.full((channels, channels), CHANNEL_CORRELATION).fill_diagonal_(1.0)
    pixel_var = (pixel_basis @ pixel_corr @ pixel_basis.T).diagonal()
    channel_var = (channel_basis @ channel_corr @ channel_basis.T).diagonal()
    variance = torch.einsum("c,y,x->cyx", channel_var, pixel_var, pixel_var).flatten()
    filters = torch.einsum("ci,yj,xk->cyxijk", channel_basis, pixel_basis, pixel_basis).flatten(0, 2)
    order = variance.argsort(descending=True, stable=True)
    return (filters / (variance + NOISE_VARIANCE).sqrt()[:, None, None, None])[order]


def cosine_basis(n: int) -> Tensor:
    """The orthonormal basis of the discrete cosine transform, lowest frequency first. (n,n), one vector per row"""
    basis = torch.cos(math.pi / n * torch.outer(torch.arange(n), torch.arange(n) + 0.5))
    return F.normalize(basis, dim=1)


class Pooling(nn.Module, ABC):
    """Puts `num_prefix_tokens` tokens before the sequence and reduces the encoder's output."""

    num_prefix_tokens = 0

    def prepend_tokens(self, x: Tensor) -> Tensor:
        return x

    @abstractmethod
    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor: ...


class NoPooling(Pooling):
    """One output for each token. (B,L,E) -> (B,L,E)"""

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return x


class ClassToken(Pooling):
    """The output at a learned token that is put before the sequence. (B,1+L,E) -> (B,E)"""

    num_prefix_tokens = 1

    def __init__(self, width: int):
        super().__init__()
        self.cls_token = nn.Parameter(torch.empty(width))
        nn.init.normal_(self.cls_token, std=0.02)

    def prepend_tokens(self, x: Tensor) -> Tensor:
        return torch.cat([self.cls_token.expand(x.shape[0], 1, -1), x], dim=1)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return x[:, 0]


class MeanPooling(Pooling):
    """The mean over real tokens; zeros if there are none. (B,L,E) -> (B,E)"""

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        if valid is None:
            return x.sum(dim=1) / max(1, x.shape[1])
        counts = valid.sum(dim=1, keepdim=True).clamp(min=1)
        return x.masked_fill(~valid[..., None], 0.0).sum(dim=1) / counts


class AttentionPooling(Pooling):
    """Attention from one learned query to the real tokens. (B,L,E) -> (B,E)"""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.query = nn.Parameter(torch.empty(width))
        nn.init.normal_(self.query, std=0.02)
        self.attn = MultiHeadAttention(width, num_heads)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        mask = None if valid is None else valid[:, None, None, :]
        return self.attn(self.query.expand(x.shape[0], 1, -1), x, mask=mask)[:, 0]


class RegisterTokens(nn.Module):
    """Learned tokens for a model to compute with (Darcet et al. 2024). No output is read from them.

    Without them, vision transformers use patches of the background for this, whose own content is lost.
    """

    def __init__(self, num_tokens: int, width: int):
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(num_tokens, width))
        nn.init.normal_(self.tokens, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Puts the R register tokens before the sequence. (B,L,E) -> (B,R+L,E)"""
        return torch.cat([self.tokens.expand(x.shape[0], -1, -1), x], dim=1)

    def remove(self, x: Tensor, num_prefix_tokens: int) -> Tensor:
        """Removes them from behind the tokens of the pooling. (B,prefix+R+L,E) -> (B,prefix+L,E)"""
        return torch.cat([x[:, :num_prefix_tokens], x[:, num_prefix_tokens + len(self.tokens) :]], dim=1)
