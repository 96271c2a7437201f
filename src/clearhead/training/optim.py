"""Which optimizer takes which weights, and the pair of them as one."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.models.embeddings import OneHotLinear
from clearhead.nn.blocks import DecoderBlock, EncoderBlock
from clearhead.nn.pooling import Pooling
from clearhead.nn.positions import PosEmbed, PosEmbed2d
from clearhead.training.config import OptimizerConfig
from clearhead.training.distributed import full_tensor, local, own_part, split_like

LEARNED_INPUTS = (nn.Embedding, OneHotLinear, PosEmbed, PosEmbed2d, Pooling)
"""what holds vectors that stand for something (a token, a place, a question): they are not pulled to 0"""


def param_groups(model: nn.Module, kind: str) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Weights for Muon, for AdamW with weight decay, and for AdamW without.

    Muon gets the matrices inside blocks and convolution kernels; norms, biases and learned inputs have no decay.
    """
    inside = {
        weight
        for module in model.modules()
        if isinstance(module, EncoderBlock | DecoderBlock)
        for weight in module.parameters()
    }
    inputs = {
        weight
        for module in model.modules()
        if isinstance(module, LEARNED_INPUTS)
        for weight in module.parameters(recurse=False)
    }
    hidden: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for weight in model.parameters():
        is_hidden = (weight in inside and weight.dim() == 2) or weight.dim() > 2
        if kind == "muon" and is_hidden:
            hidden.append(weight)
        else:
            (kept if weight.dim() < 2 or weight in inputs else decayed).append(weight)
    return hidden, decayed, kept


class Optimizers:
    """AdamW, and Muon beside it if so configured, with one learning-rate multiplier and one flat state."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, muon_dtype: torch.dtype = torch.float32):
        hidden, decayed, kept = param_groups(model, config.name)
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": kept, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        betas = (config.beta1, config.beta2)
        self.members: list[torch.optim.Optimizer] = []
        if groups:
            self.members.append(torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True))
        if hidden:
            self.members.append(Muon(hidden, config.muon_lr, config.momentum, config.weight_decay, muon_dtype))
        self.weights = dict(model.named_parameters())
        self.peaks = [(group, group["lr"]) for member in self.members for group in member.param_groups]

    def step(self, multiplier: float) -> None:
        """One update with the learning rates times this."""
        for group, peak in self.peaks:
            group["lr"] = peak * multiplier
        for member in self.members:
            member.step()

    def zero_grad(self) -> None:
        for weight in self.weights.values():
            weight.grad = None

    def gradients(self) -> list[Tensor]:
        """This process's part of every gradient there is."""
        return [local(weight.grad) for weight in self.weights.values() if weight.grad is not None]

    def squared_norm(self) -> Tensor:
        """|g|², over this process's part of all gradients."""
        return torch.stack(torch._foreach_norm(self.gradients())).square().sum()

    def scale_grads_(self, factor: float) -> None:
        """All gradients times this."""
        torch._foreach_mul_(self.gradients(), factor)

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything that the next update depends on beside weights and gradients: `<weight>.<what>` -> tensor."""
        names: dict[Tensor, str] = {weight: name for name, weight in self.weights.items()}
        return {
            f"{names[weight]}.{what}": tensor
            for member in self.members
            for weight, state in member.state.items()
            for what, tensor in state.items()
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse, from whole tensors, into optimizers that have not made a step. ValueError, and nothing is
        loaded, where the tensors are not those of these optimizers."""
        owner = {weight: member for member in self.members for g in member.param_groups for weight in g["params"]}
        found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            weight_name, _, what = name.rpartition(".")
            found.setdefault(weight_name, {})[what] = tensor
        for name, state in found.items():
            if name not in self.weights:
                raise ValueError(f"the optimizer state in the checkpoint is for other weights, got {name!r}")
            check_optimizer_state(name, state, owner[self.weights[name]], self.weights[name])
        for name, state in found.items():
            weight = self.weights[name]
            for what, tensor in state.items():
                copied = tensor.to(weight.device, copy=True)
                owner[weight].state[weight][what] = split_like(copied, weight) if tensor.dim() else copied


def check_optimizer_state(name: str, state: dict[str, Tensor], member: torch.optim.Optimizer, weight: Tensor) -> None:
    """AdamW keeps two moments of each weight and a count of its steps, Muon a momentum."""
    shape = tuple(weight.shape)
    adamw: dict[str, tuple[int, ...]] = {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
    expected = {"momentum": shape} if isinstance(member, Muon) else adamw
    found = {what: tuple(tensor.shape) for what, tensor in state.items()}
    if found != expected:
        raise ValueError(f"the optimizer state of {name} in the checkpoint must be {expected}, got {found}")


# Muon: the momentum of a matrix, made orthogonal, is its update. All directions of a layer learn at one speed.
#
# The orthogonal matrix nearest to M = U S Vᵀ is U Vᵀ. It is not computed by a decomposition but by five steps of a
# polynomial that sends every singular value between 0 and 1 to about 1 (Newton-Schulz): matrix products only.


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
            full = [full_tensor(part, weight) for part, weight in zip(ahead, weights, strict=True)]
            updates = orthogonalised(full, self.dtype)
            parts = [own_part(update, weight) for update, weight in zip(updates, weights, strict=True)]
            own = [local(weight) for weight in weights]
            torch._foreach_mul_(own, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(own, parts, alpha=-group["lr"])


# The moving average of the weights: less noisy than the weights of the last step, and so what gets evaluated.


class WeightEMA:
    """average <- d average + (1 - d) weights after each step, with d = min(decay, (1 + step) / (10 + step)).

    The smaller d of the first steps lets the average forget where the weights began.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.weights = dict(model.named_parameters())
        self.averages = {name: weight.detach().clone() for name, weight in self.weights.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After the update number `step`, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.parts(self.averages), self.parts(self.weights), 1 - decay)

    @contextmanager
    @torch.no_grad()
    def average_parameters(self) -> Iterator[None]:
        """The model has the averaged weights inside this, and its own again after it, bit for bit."""
        weights, averages = self.parts(self.weights), self.parts(self.averages)
        own = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, averages)
        try:
            yield
        finally:
            torch._foreach_copy_(weights, own)

    @staticmethod
    def parts(tensors: Mapping[str, Tensor]) -> list[Tensor]:
        return [local(tensor.detach()) for tensor in tensors.values()]


def weights_to_use(model: dict[str, Tensor], optimizer: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a checkpoint's tensors those that were evaluated: the averages, where there are any."""
    averages = {name.removeprefix("ema."): tensor for name, tensor in optimizer.items() if name.startswith("ema.")}
    return model | averages
