"""The moving average of the weights: less noisy than the weights of the last step, and so what gets evaluated."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from clearhead.training.sharding import local


class WeightAverage:
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
    def in_place(self) -> Iterator[None]:
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
