"""The feed-forward net of a block: the same small net at each position.

Dims: B batch, L length, E model width.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.nn.checks import check_width
from clearhead.nn.linear import XavierLinear

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Activation] = {"relu": F.relu, "gelu": F.gelu}
IN_PLACE: dict[Activation, Activation] = {F.relu: F.relu_, F.gelu: torch.ops.aten.gelu_}


class FeedForward(nn.Module):
    """activation(norm(x W_1 + b_1)) W_2 + b_2, with dropout after the activation. (B,L,E) -> (B,L,E)

    Blocks have no norm here; the output net of some predictors does.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: Activation = F.gelu,
        dropout: float = 0.0,
        *,
        n_out: int | None = None,
        bias: bool = True,
        norm: nn.Module | None = None,
    ):
        super().__init__()
        self.widen = XavierLinear(width, hidden, bias)
        self.norm = norm
        self.activation = activation
        self.dropout = nn.Dropout(dropout)
        self.narrow = XavierLinear(hidden, width if n_out is None else n_out, bias)

    def forward(self, x: Tensor) -> Tensor:
        check_width(x, self.widen.in_features, "x")
        return self.narrow(self.dropout(self.activate(self.widen(x))))

    def activate(self, hidden: Tensor) -> Tensor:
        """In place where nobody else needs what was there: no gradient, no hook. The widest tensor is made once."""
        if self.norm is not None:
            return self.activation(self.norm(hidden))
        if torch.is_grad_enabled() or self.widen._forward_hooks:
            return self.activation(hidden)
        return IN_PLACE.get(self.activation, self.activation)(hidden)
