"""Batched training augmentation (crop, flip, cutout, mixup) and test-time augmentation.

The random numbers of an image depend on a key and on its slot in the batch, so that a slice of a batch is augmented in
the same way as the full batch. Dims: B batch, C channels, H height, W width.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.data.dataset import Normalize
from clearhead.data.options import TTA, Augmentation
from clearhead.data.prng import fold_in, permutation, random_below


def augment(images: Tensor, slots: Tensor, config: Augmentation, normalize: Normalize, key: int) -> Tensor:
    """uint8 (B,C,H,W) at slots (B,) of a batch -> float (B,C,H,W): cropped, flipped, normalized, cut out."""
    height, width = images.shape[2:]
    if config.crop:
        top, left = (random_below(2 * config.crop + 1, fold_in(key, "crop", side), slots) for side in ("top", "left"))
        images = crop(images, config.crop, top, left)
    if config.flip:
        images = flip(images, random_below(2, fold_in(key, "flip"), slots).bool())
    normalized = normalize(images)
    if config.cutout:
        y, x = (
            random_below(height, fold_in(key, "cutout y"), slots),
            random_below(width, fold_in(key, "cutout x"), slots),
        )
        normalized = cutout(normalized, config.cutout, y, x)
    return normalized


def crop(images: Tensor, padding: int, top: Tensor, left: Tensor) -> Tensor:
    """Pads images with `padding` black pixels and crops them to their size at (top, left), each (B,)."""
    B, C, H, W = images.shape
    padded = F.pad(images, (padding,) * 4)
    _, _, rows, columns = padded.shape
    # Each row of a crop is contiguous in memory; gathering such rows is faster than indexing pixels.
    corners = torch.arange(B * C).view(B, C) * (rows * columns) + (top * columns + left)[:, None]
    starts = corners[:, :, None] + torch.arange(H) * columns
    return padded.view(-1).unfold(0, W, 1).index_select(0, starts.view(-1)).view(B, C, H, W)


def flip(images: Tensor, is_flipped: Tensor) -> Tensor:
    """Mirrors images horizontally where is_flipped (B,) is True."""
    return torch.where(is_flipped[:, None, None, None], images.flip(-1), images)


def cutout(images: Tensor, side: int, y: Tensor, x: Tensor) -> Tensor:
    """Sets a square around (y, x), each (B,), to 0, the mean; it may extend beyond the image."""
    H, W = images.shape[2:]
    rows, columns = torch.arange(H) - y[:, None] + side // 2, torch.arange(W) - x[:, None] + side // 2
    is_row, is_column = (rows >= 0) & (rows < side), (columns >= 0) & (columns < side)
    return images.masked_fill((is_row[:, :, None] & is_column[:, None, :])[:, None], 0.0)


def mixup_perm(n: int, key: int) -> Tensor:
    """The slot that each of the n slots is mixed with: a random permutation."""
    return permutation(fold_in(key, "partners"), n)


def mixup_lam(n: int, alpha: float, key: int) -> Tensor:
    """The weight of each of the n first images: float (n,) from Beta(alpha, alpha)."""
    lam = np.random.Generator(np.random.Philox(key=fold_in(key, "shares"))).beta(alpha, alpha, n)
    return torch.from_numpy(lam).float()


def mixup(images: Tensor, images_b: Tensor, lam: Tensor) -> Tensor:
    """lam * images + (1 - lam) * images_b, with lam (B,)."""
    return torch.lerp(images_b, images, lam[:, None, None, None])


TTA_DESCRIPTIONS: dict[TTA, str] = {
    "none": "",
    "flip": "mean over each image and its mirror image",
    "shift": "mean over each image, two copies shifted by a pixel, and their mirror images",
}


def tta_note(tta: TTA) -> str:
    """The note printed after an accuracy with test-time augmentation; "" without."""
    return f" ({TTA_DESCRIPTIONS[tta]})" if TTA_DESCRIPTIONS[tta] else ""


def tta_views(images: Tensor, tta: TTA) -> list[Tensor]:
    """(B,C,H,W) -> 1, 2 or 6 views of the same shape, beginning with the images themselves."""
    views = [images]
    if tta == "shift":
        padded = F.pad(images, (1,) * 4, mode="reflect")
        views += [padded[:, :, :-2, :-2], padded[:, :, 2:, 2:]]
    if tta != "none":
        views += [view.flip(-1) for view in views]
    return views


def tta_mean(predict: Callable[[Tensor], Tensor], images: Tensor, tta: TTA) -> Tensor:
    """The mean of `predict` over all views of the images."""
    if tta == "none":
        return predict(images)
    return torch.stack([predict(view) for view in tta_views(images, tta)]).mean(0)
