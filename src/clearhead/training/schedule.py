"""The learning rate as a pure function of the step, so that there is nothing to save and nothing to step twice."""

import math

from clearhead.training.config import OptimizerConfig


def multiplier(step: int, n_steps: int, config: OptimizerConfig) -> float:
    """What the learning rate is multiplied by at this step (from 0): a warm-up to 1, then down to `final`.

    warm-up    (step + 1) / warmup
    linear     1 - (1 - final) t           with t from 0 after the warm-up to 1 after the last step
    cosine     final + (1 - final) (1 + cos(pi t)) / 2
    constant   1
    """
    if step < config.warmup:
        return (step + 1) / config.warmup
    t = min(1.0, (step - config.warmup) / max(1, n_steps - config.warmup))
    match config.schedule:
        case "linear":
            return 1 - (1 - config.final) * t
        case "cosine":
            return config.final + (1 - config.final) * (1 + math.cos(math.pi * t)) / 2
        case _:
            return 1.0
