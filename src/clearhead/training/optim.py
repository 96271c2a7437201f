"""AdamW and Muon as one optimizer, and the exponential moving average of the weights.

Muon (Jordan, 2024) updates a matrix with its orthogonalized momentum, so that all directions of a layer learn at the
same speed. The nearest orthogonal matrix to M = U S Vᵀ is U Vᵀ. It is approximated without a decomposition: five
Newton-Schulz steps, which are matrix products only, move every singular value between 0 and 1 close to 1.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.models.stack import OneHotLinear
from clearhead.nn.positions import PosEmbed, PosEmbed2d
from clearhead.nn.tokens import Pooling, RegisterTokens
from clearhead.training.config import FACTORY, OptimizerConfig
from clearhead.training.distributed import blocks_of, full_tensor, local_shard, shard_like, to_local

EMBEDDINGS = (nn.Embedding, OneHotLinear, PosEmbed, PosEmbed2d, Pooling, RegisterTokens)
"""modules whose own parameters are learned vectors (tokens, positions, queries), which get no weight decay"""
QUINTIC = (3.4445, -4.7750, 2.0315)
"""a, b, c of a x + b x³ + c x⁵ (Jordan, 2024): steep at 0, and close to 1 from there on"""


class Optimizers:
    """AdamW, and optionally Muon for hidden matrices, with one learning-rate multiplier and one flat state."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, muon_dtype: torch.dtype = torch.float32):
        if config.name == FACTORY:
            raise ValueError(f"the optimizer {FACTORY!r} is a function that was given to clearhead.fit; pass it again")
        muon, decay, no_decay = param_groups(model, config.name)
        groups = [
            {"params": decay, "weight_decay": config.weight_decay},
            {"params": no_decay, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        betas = (config.beta1, config.beta2)
        self.optimizers: list[torch.optim.Optimizer] = []
        if groups:
            self.optimizers.append(torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True))
        if muon:
            self.optimizers.append(Muon(muon, config.muon_lr, config.momentum, config.weight_decay, muon_dtype))
        self.attach(model)

    def attach(self, model: nn.Module) -> None:
        self.weights = dict(model.named_parameters())
        self.base_lrs = [(group, group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, lr_multiplier: float) -> None:
        """Make one update, with all learning rates multiplied by `lr_multiplier`."""
        for group, base_lr in self.base_lrs:
            group["lr"] = base_lr * lr_multiplier
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for weight in self.weights.values():
            weight.grad = None

    def gradients(self) -> list[Tensor]:
        """This rank's shard of each gradient."""
        return [to_local(weight.grad) for weight in self.weights.values() if weight.grad is not None]

    def squared_norm(self) -> Tensor:
        """|g|², over this rank's shards of all gradients."""
        return torch.stack(torch._foreach_norm(self.gradients())).square().sum()

    def scale_grads_(self, factor: float) -> None:
        """Multiply all gradients by a factor, in place."""
        torch._foreach_mul_(self.gradients(), factor)

    def state_tensors(self) -> dict[str, Tensor]:
        """The state of the optimizers: `<weight name>.<key>` -> tensor."""
        names: dict[Tensor, str] = {weight: name for name, weight in self.weights.items()}
        return {
            f"{names[weight]}.{key}": tensor
            for optimizer in self.optimizers
            for weight, state in optimizer.state.items()
            for key, tensor in state.items()
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Load full tensors, as `state_tensors` returns them, into optimizers that have not made a step.

        ValueError, before anything is loaded, if the tensors do not match these optimizers.
        """
        owners = {weight: opt for opt in self.optimizers for group in opt.param_groups for weight in group["params"]}
        states: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            weight_name, _, key = name.rpartition(".")
            states.setdefault(weight_name, {})[key] = tensor
        for name, state in states.items():
            if name not in self.weights:
                raise ValueError(f"the optimizer state in the checkpoint is for other weights, got {name!r}")
            check_optimizer_state(name, state, owners[self.weights[name]], self.weights[name])
        for name, state in states.items():
            weight = self.weights[name]
            for key, tensor in state.items():
                copied = tensor.to(weight.device, copy=True)
                owners[weight].state[weight][key] = shard_like(copied, weight) if tensor.dim() else copied


class UserOptimizer(Optimizers):
    """Any torch.optim.Optimizer, made by the user's function of the model.

    Numbers that it keeps, for each weight or in its parameter groups, are saved as tensors of no dimensions, under a
    name that ends with their type. The schedule multiplies the learning rate that each group had at the beginning.
    """

    def __init__(self, model: nn.Module, factory: Callable[[nn.Module], torch.optim.Optimizer]):
        optimizer = factory(model)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"optimizer must be a function from the model to a torch.optim.Optimizer, got a "
                f"{type(optimizer).__name__} from it"
            )
        self.optimizer, self.optimizers = optimizer, [optimizer]
        self.attach(model)
        known = set(self.weights.values())
        if any(weight not in known for group in optimizer.param_groups for weight in group["params"]):
            raise ValueError("the optimizer must train parameters of the model that it was given, got others")

    def state_tensors(self) -> dict[str, Tensor]:
        names: dict[Tensor, str] = {weight: name for name, weight in self.weights.items()}
        values = {
            f"{names[weight]}.{key}": value
            for weight, state in self.optimizer.state.items()
            for key, value in state.items()
        }
        for i, group in enumerate(self.optimizer.param_groups):
            numbers = {key: value for key, value in group.items() if isinstance(value, bool | int | float)}
            values |= {f"{GROUP}{i}.{key}": value for key, value in numbers.items() if key not in ("lr", "initial_lr")}
        return dict(named_tensor(name, value) for name, value in values.items() if value is not None)

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        groups = self.optimizer.param_groups
        group_of = {weight: group for group in groups for weight in group["params"]}
        loaded: list[tuple[Any, str, Any]] = []
        for name, tensor in tensors.items():
            owner, _, key = name.rpartition(".")
            key, value = plain_value(key, tensor)
            number = owner.removeprefix(GROUP)
            if number != owner:
                if not number.isdecimal() or int(number) >= len(groups) or key not in groups[int(number)]:
                    raise ValueError(f"the optimizer has other parameter groups than in the checkpoint, got {name!r}")
                loaded.append((groups[int(number)], key, value))
                continue
            weight = self.weights.get(owner)
            if weight is None or weight not in group_of:
                raise ValueError(f"the optimizer state in the checkpoint is for other weights, got {owner!r}")
            is_on_device = group_of[weight].get("fused") or group_of[weight].get("capturable")
            if isinstance(value, Tensor) and (value.dim() or is_on_device):  # torch counts steps on the CPU by default
                value = value.to(weight.device)
                value = shard_like(value, weight) if value.shape == weight.shape else value
            loaded.append((self.optimizer.state[weight], key, value))
        for target, key, value in loaded:
            target[key] = value


GROUP = "param_groups."
SCALARS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}


def named_tensor(name: str, value: Any) -> tuple[str, Tensor]:
    """A value of an optimizer's state as a tensor; the name of a number ends with its type."""
    if isinstance(value, Tensor):
        return name, value
    if type(value) not in SCALARS:
        raise ValueError(f"the state of an optimizer must be tensors and numbers, got a {type(value).__name__}: {name}")
    return f"{name}:{type(value).__name__}", torch.tensor(value, dtype=SCALARS[type(value)])


def plain_value(name: str, tensor: Tensor) -> tuple[str, Any]:
    """The inverse of `named_tensor`."""
    plain, _, kind = name.partition(":")
    return (plain, tensor.item()) if kind else (plain, tensor.clone())


def check_optimizer_state(
    name: str, state: dict[str, Tensor], optimizer: torch.optim.Optimizer, weight: Tensor
) -> None:
    """AdamW keeps two moments and a step count for each weight, Muon its momentum."""
    shape = tuple(weight.shape)
    adamw: dict[str, tuple[int, ...]] = {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
    expected = {"momentum": shape} if isinstance(optimizer, Muon) else adamw
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    if shapes != expected:
        raise ValueError(f"the optimizer state of {name} in the checkpoint must be {expected}, got {shapes}")


def param_groups(model: nn.Module, name: str) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """The parameters for Muon, for AdamW with weight decay, and for AdamW without weight decay.

    Muon gets the matrices inside blocks and all convolution kernels. Norms, biases and embeddings have no decay.
    """
    in_blocks = {weight for block in blocks_of(model) for weight in block.parameters()}
    kernels = {
        weight
        for module in model.modules()
        if isinstance(module, nn.modules.conv._ConvNd)
        for weight in module.parameters(recurse=False)
        if weight.dim() > 2
    }
    embeddings = {
        weight
        for module in model.modules()
        if isinstance(module, EMBEDDINGS)
        for weight in module.parameters(recurse=False)
    }
    muon: list[nn.Parameter] = []
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    for weight in model.parameters():
        is_hidden_matrix = (weight in in_blocks and weight.dim() == 2) or weight in kernels
        if name == "muon" and is_hidden_matrix:
            muon.append(weight)
        else:
            (no_decay if weight.dim() < 2 or weight in embeddings else decay).append(weight)
    return muon, decay, no_decay


class Muon(torch.optim.Optimizer):
    """w <- (1 - lr weight_decay) w - lr orthogonalize(Nesterov momentum), for matrices and convolution kernels."""

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
                        "Muon supports matrices and convolution kernels only, got a parameter of shape "
                        f"{tuple(weight.shape)}; use AdamW for vectors"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for weight in weights:
                if "momentum" not in self.state[weight]:
                    self.state[weight]["momentum"] = torch.zeros_like(weight)
            gradients = [to_local(weight.grad) for weight in weights]
            momenta = [to_local(self.state[weight]["momentum"]) for weight in weights]
            if not weights:
                continue
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            nesterov = torch._foreach_lerp(gradients, momenta, group["momentum"])
            full = [full_tensor(local, weight) for local, weight in zip(nesterov, weights, strict=True)]
            updates = orthogonalize(full, self.dtype)
            local_updates = [local_shard(update, weight) for update, weight in zip(updates, weights, strict=True)]
            local_weights = [to_local(weight) for weight in weights]
            torch._foreach_mul_(local_weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(local_weights, local_updates, alpha=-group["lr"])


def orthogonalize(updates: list[Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Each update as a matrix (outputs, inputs), orthogonalized; a tall one is scaled by sqrt(rows / columns).

    Matrices of equal shape, tall ones transposed, are processed in one batch: many small products are slow one by one.
    """
    matrices = [update.flatten(1) for update in updates]
    wide = [matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix for matrix in matrices]
    by_shape: dict[torch.Size, list[int]] = {}
    for i, matrix in enumerate(wide):
        by_shape.setdefault(matrix.shape, []).append(i)
    results = list(updates)
    for indices in by_shape.values():
        stack = newton_schulz(torch.stack([wide[i] for i in indices]), dtype=dtype)
        for i, matrix in zip(indices, stack, strict=True):
            rows, columns = matrices[i].shape
            result = matrix.mT * (rows / columns) ** 0.5 if rows > columns else matrix
            results[i] = result.reshape(updates[i].shape)
    return results


def newton_schulz(matrices: Tensor, n_steps: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    """U Vᵀ of each matrix U S Vᵀ, approximately: singular values end up between about 0.7 and 1.2.

    (n, rows, columns) -> (n, rows, columns), with rows <= columns. The products are computed in `dtype`; bfloat16 is
    faster on a GPU, but about twenty times slower on most CPUs.
    """
    a, b, c = QUINTIC
    norms = torch.linalg.matrix_norm(matrices, keepdim=True)
    x = matrices / norms.clamp(min=1e-30)  # all singular values are now at most 1; a zero matrix stays zero
    x = x.to(dtype)
    for _ in range(n_steps):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)


class WeightEMA:
    """average <- d average + (1 - d) weights after each step, with d = min(decay, (1 + step) / (10 + step)).

    The average is less noisy than the latest weights, and is what gets evaluated. The smaller d of the first steps lets
    it forget the initial weights.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.weights = dict(model.named_parameters())
        self.averages = {name: weight.detach().clone() for name, weight in self.weights.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average after a step, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(local_tensors(self.averages), local_tensors(self.weights), 1 - decay)

    @contextmanager
    @torch.no_grad()
    def average_parameters(self) -> Iterator[None]:
        """Give the model the averaged weights inside this context, and its own weights, bit for bit, after it."""
        weights, averages = local_tensors(self.weights), local_tensors(self.averages)
        saved = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, averages)
        try:
            yield
        finally:
            torch._foreach_copy_(weights, saved)


def local_tensors(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    return [to_local(tensor.detach()) for tensor in tensors.values()]


def eval_weights(model: dict[str, Tensor], optimizer: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a checkpoint that evaluations use: the moving averages if there are any."""
    averages = {name.removeprefix("ema."): tensor for name, tensor in optimizer.items() if name.startswith("ema.")}
    return model | averages
