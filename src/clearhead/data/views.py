"""An image seen in more than one way: the mean of a model's answers for all of them is better than its answer for one.

Only at a test, and named beside its number. Dims: B batch, C channels, H, W.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.data.config import Views

NAMES: dict[Views, str] = {
    "one": "",
    "mirror": "mean over each image and its mirror image",
    "moved": "mean over each image, the same moved by a pixel to two sides, and their mirror images",
}


def views_note(views: Views) -> str:
    """What to write behind a number; "" where the number is of the images alone."""
    return f" ({NAMES[views]})" if NAMES[views] else ""


def views_of(images: Tensor, views: Views) -> list[Tensor]:
    """(B,C,H,W) -> 1, 2 or 6 of the same shape, the images themselves first."""
    found = [images]
    if views == "moved":
        wider = F.pad(images, (1,) * 4, mode="reflect")
        found += [wider[:, :, :-2, :-2], wider[:, :, 2:, 2:]]
    if views != "one":
        found += [view.flip(-1) for view in found]
    return found


def mean_over_views(ask: Callable[[Tensor], Tensor], images: Tensor, views: Views) -> Tensor:
    """What `ask` answers to the images, or the mean of what it answers to each of their views."""
    if views == "one":
        return ask(images)
    return torch.stack([ask(view) for view in views_of(images, views)]).mean(0)
