"""Augmentation of a whole batch at once. What happens to an image depends on a key and on its place in the batch.

So a part of the batch, augmented alone, comes out as it does in the whole. Dims: B batch, C channels, H, W.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.data.config import TTA, Augmentation
from clearhead.data.dataset import Normalize
from clearhead.data.prng import fold_in, permutation, random_below


def augment(images: Tensor, places: Tensor, how: Augmentation, normalize: Normalize, key: int) -> Tensor:
    """uint8 (B,C,H,W) at places (B,) of the batch -> float (B,C,H,W): cropped, flipped, normalised, cut out."""
    height, width = images.shape[2:]
    if how.crop:
        top, left = (random_below(2 * how.crop + 1, fold_in(key, "crop", side), places) for side in ("top", "left"))
        images = crop(images, how.crop, top, left)
    if how.flip:
        images = flip(images, random_below(2, fold_in(key, "flip"), places).bool())
    normal = normalize(images)
    if how.cutout:
        y, x = (
            random_below(height, fold_in(key, "cutout y"), places),
            random_below(width, fold_in(key, "cutout x"), places),
        )
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
    return permutation(fold_in(key, "partners"), n)


def shares(n: int, alpha: float, key: int) -> Tensor:
    """How much of itself each of n blended images keeps: float (n,) from Beta(alpha, alpha)."""
    drawn = np.random.Generator(np.random.Philox(key=fold_in(key, "shares"))).beta(alpha, alpha, n)
    return torch.from_numpy(drawn).float()


def blend(images: Tensor, others: Tensor, share: Tensor) -> Tensor:
    """share * image + (1 - share) * other, with a share (B,) for each."""
    return torch.lerp(others, images, share[:, None, None, None])


# An image seen in more than one way: the mean of a model's answers for all of them is better than its answer for one.
#
# Only at a test, and named beside its number. Dims: B batch, C channels, H, W.


NAMES: dict[TTA, str] = {
    "none": "",
    "flip": "mean over each image and its mirror image",
    "shift": "mean over each image, the same moved by a pixel to two sides, and their mirror images",
}


def tta_note(tta: TTA) -> str:
    """What to write behind a number; "" where the number is of the images alone."""
    return f" ({NAMES[tta]})" if NAMES[tta] else ""


def tta_views(images: Tensor, tta: TTA) -> list[Tensor]:
    """(B,C,H,W) -> 1, 2 or 6 of the same shape, the images themselves first."""
    found = [images]
    if tta == "shift":
        wider = F.pad(images, (1,) * 4, mode="reflect")
        found += [wider[:, :, :-2, :-2], wider[:, :, 2:, 2:]]
    if tta != "none":
        found += [view.flip(-1) for view in found]
    return found


def tta_mean(ask: Callable[[Tensor], Tensor], images: Tensor, tta: TTA) -> Tensor:
    """What `ask` answers to the images, or the mean of what it answers to each of their views."""
    if tta == "none":
        return ask(images)
    return torch.stack([ask(view) for view in tta_views(images, tta)]).mean(0)
