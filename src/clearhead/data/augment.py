"""Augmentation of a whole batch at once. What happens to an image depends on a key and on its place in the batch.

So a part of the batch, augmented alone, comes out as it does in the whole. Dims: B batch, C channels, H, W.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.data.config import Augmentation
from clearhead.data.dataset import Normalise
from clearhead.data.draws import below, key_of, order


def augment(images: Tensor, places: Tensor, how: Augmentation, normalise: Normalise, key: int) -> Tensor:
    """uint8 (B,C,H,W) at places (B,) of the batch -> float (B,C,H,W): cropped, flipped, normalised, cut out."""
    height, width = images.shape[2:]
    if how.crop:
        top, left = (below(2 * how.crop + 1, key_of(key, "crop", side), places) for side in ("top", "left"))
        images = crop(images, how.crop, top, left)
    if how.flip:
        images = flip(images, below(2, key_of(key, "flip"), places).bool())
    normal = normalise(images)
    if how.cutout:
        y, x = below(height, key_of(key, "cutout y"), places), below(width, key_of(key, "cutout x"), places)
        normal = cutout(normal, how.cutout, y, x)
    return normal


def crop(images: Tensor, padding: int, top: Tensor, left: Tensor) -> Tensor:
    """Images with a black border of `padding` pixels, cut to their old size at (top, left), each (B,)."""
    B, C, H, W = images.shape
    padded = F.pad(images, (padding,) * 4)
    _, _, rows, columns = padded.shape
    # Each row of a cut is a run of W bytes that starts somewhere in memory: copying runs is the fastest way.
    corners = torch.arange(B * C).view(B, C) * (rows * columns) + (top * columns + left)[:, None]
    starts = corners[:, :, None] + torch.arange(H) * columns
    return padded.view(-1).unfold(0, W, 1).index_select(0, starts.view(-1)).view(B, C, H, W)


def flip(images: Tensor, is_flipped: Tensor) -> Tensor:
    """Mirrors left and right where is_flipped (B,) says so."""
    return torch.where(is_flipped[:, None, None, None], images.flip(-1), images)


def cutout(images: Tensor, side: int, y: Tensor, x: Tensor) -> Tensor:
    """0, the mean, in a square around (y, x), each (B,); it may reach over the edge."""
    H, W = images.shape[2:]
    rows, columns = torch.arange(H) - y[:, None] + side // 2, torch.arange(W) - x[:, None] + side // 2
    is_row, is_column = (rows >= 0) & (rows < side), (columns >= 0) & (columns < side)
    return images.masked_fill((is_row[:, :, None] & is_column[:, None, :])[:, None], 0.0)


def partners(n: int, key: int) -> Tensor:
    """The place in the batch that each of its n places is blended with: a random order of all."""
    return order(key_of(key, "partners"), n)


def shares(n: int, alpha: float, key: int) -> Tensor:
    """How much of itself each of n blended images keeps: float (n,) from Beta(alpha, alpha)."""
    drawn = np.random.Generator(np.random.Philox(key=key_of(key, "shares"))).beta(alpha, alpha, n)
    return torch.from_numpy(drawn).float()


def blend(images: Tensor, others: Tensor, share: Tensor) -> Tensor:
    """share * image + (1 - share) * other, with a share (B,) for each."""
    return torch.lerp(others, images, share[:, None, None, None])
