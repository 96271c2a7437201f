"""Norms and layer scale, which keep the activations of a deep model at a moderate size.

    layer norm    (x - mean(x)) / sqrt(var(x) + eps) * weight + bias     torch.nn.LayerNorm, Ba et al. 2016
    RMS norm      x / sqrt(mean(x²) + eps) * weight                      Zhang & Sennrich 2019
    layer scale   gamma * x                                              Touvron et al. 2021

Mean and variance are taken over the width of each token by itself.
Dims: B batch, L length, E model width.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

NormLayer = Callable[[int], nn.Module]
"""from the width of the tokens to a module: nn.LayerNorm, RMSNorm, or nn.Identity for none"""


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x²) + eps) * weight: root mean square norm (Zhang & Sennrich 2019). (B,L,E) -> (B,L,E)

    Layer norm without its mean and its bias. As in layer norm, the scale of x does not matter; its mean does.
    """

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__(width, eps)


class LayerScale(nn.Module):
    """gamma * x with one learned gamma per channel (CaiT, Touvron et al. 2021). (B,L,E) -> (B,L,E)

    It scales what a sublayer adds to the residual stream: with a small `init`, a block begins close to the identity.
    """

    def __init__(self, width: int, init: float = 1e-5):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), float(init)))

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * x
