"""Which optimizer takes which weights, and the pair of them as one."""

import torch
from torch import Tensor, nn

from clearhead.models.inputs import OneHotLinear
from clearhead.nn.blocks import DecoderBlock, EncoderBlock
from clearhead.nn.grid import GridPositions
from clearhead.nn.positions import Positions
from clearhead.nn.readout import Readout
from clearhead.training.config import OptimizerConfig
from clearhead.training.muon import Muon
from clearhead.training.sharding import local, split_like

LEARNED_INPUTS = (nn.Embedding, OneHotLinear, Positions, GridPositions, Readout)
"""what holds vectors that stand for something (a token, a place, a question): they are not pulled to 0"""


def split_weights(model: nn.Module, kind: str) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
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
        hidden, decayed, kept = split_weights(model, config.kind)
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

    def shorten(self, factor: float) -> None:
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
