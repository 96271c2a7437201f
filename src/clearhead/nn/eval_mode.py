"""Training and testing: the two stages of a model, and the way back."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Without dropout inside; afterwards every module is in the stage it was in."""
    stages = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in stages.items():
            module.training = training
