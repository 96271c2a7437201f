"""The arithmetic of training: float32, or bf16 autocast where it was chosen or measured to be faster; torch.compile.

A run's precision is part of its config and never of the machine: "auto" is resolved once, before the first step, by
timing both, and the run records the choice. Evaluation is always float32.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from clearhead.training.config import Compile, Precision
from clearhead.training.distributed import random_put_back

WARM_UP, TIMED = 1, 7
"""steps in each precision before and while the clock runs"""
MIN_SPEEDUP = 1.15
"""what bf16 must gain in these passes: the optimizer, which stays in float32, dilutes the gain, and clocks are noisy"""


def has_bf16(device: torch.device) -> bool:
    """Whether the hardware multiplies bf16 matrices natively; emulated bf16 is much slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """The context of a forward pass in the given precision; weights stay float32."""
    assert precision != "auto", "resolve it with faster_precision first"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def faster_precision(step: Callable[[Precision], None], device: torch.device) -> tuple[Precision, str]:
    """The precision in which `step(precision)` takes less time, and the reason in words.

    Both are timed in turns, so that a busy moment of the machine slows both. Every process makes the same number of
    steps: under DDP or FSDP they exchange gradients.
    """
    if not has_bf16(device):
        return "float32", f"this {'GPU' if device.type == 'cuda' else 'processor'} has no bf16 arithmetic"
    choices: tuple[Precision, Precision] = ("float32", "bf16")
    seconds: dict[Precision, list[float]] = {choice: [] for choice in choices}
    for i in range(WARM_UP + TIMED):
        for choice in choices:
            start = time.perf_counter()
            step(choice)
            if i >= WARM_UP:
                seconds[choice].append(time.perf_counter() - start)
    exact, rough = min(seconds["float32"]), min(seconds["bf16"])  # whatever else ran, slowed the others
    reason = f"a forward and backward pass takes {1e3 * exact:,.1f} ms in float32, {1e3 * rough:,.1f} ms in bf16"
    return ("bf16" if rough * MIN_SPEEDUP < exact else "float32"), reason


def compiled(
    model: nn.Module,
    choice: Compile,
    rehearse: Callable[[Callable[..., Tensor]], Tensor],
    report: Callable[[str], None],
) -> Callable[..., Tensor]:
    """The model, compiled if so chosen, after a rehearsal that asks it something; the model itself where that fails."""
    if choice == "off" or (choice == "auto" and not torch.cuda.is_available()):
        return model
    fast: Callable[..., Tensor] = torch.compile(model)
    try:
        with random_put_back():
            rehearse(fast).float().sum().backward()
    except Exception as error:  # whatever a compiler, its cache or its linker may raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        report(f"torch.compile FAILED, training goes on without it, slower: {reason[0]}")
        return model
    finally:
        model.zero_grad(set_to_none=True)
    return fast
