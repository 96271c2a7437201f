"""The feed-forward net of a block: the same small net at each position.

Dims: B batch, L length, E model width.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.nn.checks import check_width
from clearhead.nn.linear import XavierLinear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


class FeedForward(nn.Module):
    """activation(x W_1 + b_1) W_2 + b_2, with dropout between. (B,L,E) -> (B,L,E)"""

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        dropout: float = 0.0,
        *,
        n_out: int | None = None,
        bias: bool = True,
    ):
        super().__init__()
        self.widen = XavierLinear(width, hidden, bias)
        self.activation = activation
        self.dropout = nn.Dropout(dropout)
        self.narrow = XavierLinear(hidden, n_out or width, bias)

    def forward(self, x: Tensor) -> Tensor:
        check_width(x, self.widen.in_features, "x")
        return self.narrow(self.dropout(self.activation(self.widen(x))))
