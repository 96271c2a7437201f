"""The linear layer as every part of this package starts it."""

import torch.nn.functional as F
from torch import Tensor, nn


class XavierLinear(nn.Linear):
    """x Wᵀ + b, with W drawn so that the variance is kept forwards and backwards (Xavier, uniform), and b = 0."""

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class TiedLinear(nn.Module):
    """x Wᵀ with the W of another layer, passed in beside x: it is stored, saved and counted there."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)
