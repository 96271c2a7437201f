"""Softargmax: from scores to shares. PyTorch calls it softmax; here it has a temperature, down to zero and beyond."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead.nn.checks import check_bool
from clearhead.nn.sizes import check_beta

if TYPE_CHECKING:
    from clearhead.nn.masks import Mask


def softargmax(z: Tensor, beta: float = 1.0, dim: int = -1, where: "Mask | None" = None) -> Tensor:
    """e^(beta z_i) / sum_j e^(beta z_j): shares that sum to 1, the larger the larger z_i. beta is 1 / temperature.

    beta = 0 shares equally, +inf gives all to the largest, -inf all to the smallest; ties share.
    Entries that are False in `where` take no part; a row without any True gets zeros.
    """
    check_beta(beta)
    if z.is_complex() or z.dim() == 0:
        raise ValueError(f"softargmax needs real numbers in at least one dimension, got {z!r}; choose a dimension")
    if where is not None:
        check_bool(where)
    if not z.is_floating_point():
        z = z.to(torch.get_default_dtype())
    if z.shape[dim] == 0:
        return z
    if beta < 0:
        return softargmax(-z, -beta, dim, where)  # the smallest of z is the largest of -z

    # The largest and lowest numbers stand for inf and -inf, which would make NaN: 0 * -inf, inf - inf.
    lowest, highest = torch.finfo(z.dtype).min, torch.finfo(z.dtype).max
    z = z.clamp(lowest, highest)
    if where is not None:
        z = z.masked_fill(~where, lowest)  # so that the largest is one that takes part
    largest = z.amax(dim, keepdim=True).detach()  # taking it from all of z changes no share, and so no gradient
    if beta > highest:  # infinite, for numbers of this dtype
        nothing = 0 * z.clamp(-1, 1)  # zeros through which gradients of zero flow
        logits = nothing.masked_fill(z < largest, lowest)
    else:
        logits = beta * (z - largest).clamp(min=lowest)  # at most 0, so that e^logits cannot overflow
    if where is None:
        return logits.softmax(dim)
    return logits.masked_fill(~where, lowest).softmax(dim).masked_fill(~where, 0.0)
