"""Occlusion: hide a patch and see the probability of the class move.

It changes the input and asks the model, so it is evidence of cause where attention is none; and it is the judge of the
other maps: hide the patches that a map ranks first, and the better the map, the sooner the probability falls.
What is hidden must be replaced by something, and that too is an input that the model has not been trained on.
Dims: B images, C channels, P patches, V classes.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

AT_ONCE = 256
"""images in one pass"""

Fill = Literal["grey", "mean", "black"]
Logits = Callable[[Any], Tensor]
"""from what a model returns to logits (B,V)"""


def occlusion(
    model: nn.Module,
    images: Tensor,
    grid: tuple[int, int],
    classes: Tensor | int | None = None,
    *,
    fill: Fill = "grey",
    logits: Logits = lambda output: output,
) -> Tensor:
    """How much of a class's probability each patch holds up: before minus after hiding it, (B,rows,columns).

    images (B,C,height,width) as the model takes them, cut into `grid` = (rows, columns); classes is one for all or one
    for each, the model's answers unless given. Negative where hiding helps.
    """
    cells = cells_of(images, grid)
    classes = class_of_each(model, images, classes, logits)
    before = probability(model, images, classes, logits)
    hidden = replacement(images, fill)
    after = [
        probability(model, torch.where(cells[:, None], hidden[i], images[i]), classes[i].expand(len(cells)), logits)
        for i in range(len(images))
    ]
    return (before[:, None] - torch.stack(after)).unflatten(1, grid)


def deletion_curve(
    model: nn.Module,
    images: Tensor,
    ranking: Tensor,
    classes: Tensor | int | None = None,
    *,
    fill: Fill = "grey",
    logits: Logits = lambda output: output,
) -> Tensor:
    """The probability of a class as patches are hidden, those with the largest number in `ranking` first: (B,P+1).

    ranking (B,rows,columns); of equal numbers the earlier place goes first.
    """
    if ranking.dim() != 3 or len(ranking) != len(images):
        raise ValueError(
            f"a ranking is (images, rows, columns), got {tuple(ranking.shape)} for {len(images)} images; "
            "of one image, take ranking[None]"
        )
    cells = cells_of(images, (ranking.shape[1], ranking.shape[2]))
    classes = class_of_each(model, images, classes, logits)
    hidden = replacement(images, fill)
    order = ranking.flatten(1).argsort(dim=1, descending=True, stable=True)
    covered, curve = torch.zeros_like(images[:, 0], dtype=torch.bool), []
    for step in range(len(cells) + 1):
        if step:
            covered = covered | cells[order[:, step - 1]]
        curve.append(probability(model, torch.where(covered[:, None], hidden, images), classes, logits))
    return torch.stack(curve, dim=1)


def deletion_area(curve: Tensor) -> Tensor:
    """The area under a deletion curve (B,P+1), of a whole that is 1 wide and 1 high: (B,). Smaller is the better
    ranking."""
    return torch.trapezoid(curve, dx=1 / (curve.shape[1] - 1), dim=1)


def cells_of(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """(P,height,width): True in each cell of the grid."""
    height, width = images.shape[-2:]
    rows, columns = grid
    if images.dim() != 4 or height % rows or width % columns:
        raise ValueError(
            f"images are (B,C,height,width), cut into rows and columns that divide them, got {tuple(images.shape)} and "
            f"{rows} x {columns}; of one image, take image[None]"
        )
    cells = torch.eye(rows * columns, dtype=torch.bool, device=images.device).view(-1, rows, columns)
    return cells.repeat_interleave(height // rows, 1).repeat_interleave(width // columns, 2)


def replacement(images: Tensor, fill: Fill) -> Tensor:
    """What stands in for a hidden patch, (B,C,1,1): the 0 of normalised images, or an image's own mean or darkest."""
    if fill == "mean":
        return images.mean((2, 3), keepdim=True)
    if fill == "black":
        return images.amin((2, 3), keepdim=True)
    if fill != "grey":
        raise ValueError(
            f"fill must be one of grey, mean, black, got {fill!r}; grey is 0, the mean of normalised images"
        )
    return images.new_zeros(len(images), images.shape[1], 1, 1)


def class_of_each(model: nn.Module, images: Tensor, classes: Tensor | int | None, logits: Logits) -> Tensor:
    if classes is None:
        return answers(model, images, logits).argmax(-1)
    return torch.as_tensor(classes, device=images.device).expand(len(images))


def probability(model: nn.Module, images: Tensor, classes: Tensor, logits: Logits) -> Tensor:
    """Of one class for each image: (B,)"""
    return F.softmax(answers(model, images, logits), dim=-1).gather(1, classes[:, None])[:, 0]


@torch.no_grad()
def answers(model: nn.Module, images: Tensor, logits: Logits) -> Tensor:
    return torch.cat([logits(model(part)) for part in images.split(AT_ONCE)])
