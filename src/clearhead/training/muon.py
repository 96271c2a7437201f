"""Muon: the momentum of a matrix, made orthogonal, is its update. All directions of a layer learn at one speed.

The orthogonal matrix nearest to M = U S Vᵀ is U Vᵀ. It is not computed by a decomposition but by five steps of a
polynomial that sends every singular value between 0 and 1 to about 1 (Newton-Schulz): matrix products only.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from clearhead.training.sharding import local, own_part, whole

QUINTIC = (3.4445, -4.7750, 2.0315)
"""a, b, c of a x + b x³ + c x⁵: steep at 0, and never far from 1 again. Found by K. Jordan, 2024"""


def newton_schulz(matrices: Tensor, n_steps: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    """U Vᵀ of each matrix U S Vᵀ, roughly: singular values between about 0.7 and 1.2. (n,rows,columns), rows <= columns

    The products are computed in `dtype`: bfloat16 is faster on a GPU, and twenty times slower on most processors.
    """
    a, b, c = QUINTIC
    norms = torch.linalg.matrix_norm(matrices, keepdim=True)
    x = matrices / norms.clamp(min=1e-30)  # no singular value is above 1 now, and zeros stay zeros
    x = x.to(dtype)
    for _ in range(n_steps):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)


def orthogonalised(updates: list[Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Each update, as a matrix with a row for each output, made orthogonal; a tall one grows by sqrt(rows/columns).

    Matrices of equal shape, a tall one lying on its side, share one call: many small products are slow one by one.
    """
    matrices = [update.flatten(1) for update in updates]
    lying = [matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix for matrix in matrices]
    alike: dict[torch.Size, list[int]] = {}
    for i, matrix in enumerate(lying):
        alike.setdefault(matrix.shape, []).append(i)
    results = list(updates)
    for places in alike.values():
        stack = newton_schulz(torch.stack([lying[i] for i in places]), dtype=dtype)
        for i, matrix in zip(places, stack, strict=True):
            rows, columns = matrices[i].shape
            upright = matrix.mT * (rows / columns) ** 0.5 if rows > columns else matrix
            results[i] = upright.reshape(updates[i].shape)
    return results


class Muon(torch.optim.Optimizer):
    """w <- (1 - lr decay) w - lr orthogonal(Nesterov momentum), for matrices and for convolution kernels."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.dim() < 2:
                    raise ValueError(
                        f"Muon updates matrices and convolutions, got a parameter of shape {tuple(weight.shape)}; "
                        "leave vectors to AdamW"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for weight in weights:
                if "momentum" not in self.state[weight]:
                    self.state[weight]["momentum"] = torch.zeros_like(weight)
            gradients = [local(weight.grad) for weight in weights]
            momenta = [local(self.state[weight]["momentum"]) for weight in weights]
            if not weights:
                continue
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])
            full = [whole(part, weight) for part, weight in zip(ahead, weights, strict=True)]
            updates = orthogonalised(full, self.dtype)
            parts = [own_part(update, weight) for update, weight in zip(updates, weights, strict=True)]
            own = [local(weight) for weight in weights]
            torch._foreach_mul_(own, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(own, parts, alpha=-group["lr"])
