"""How fast arithmetic is chosen: bf16 where the hardware has it, torch.compile where it works."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from clearhead.training.config import Compile, Precision
from clearhead.training.distributed import random_put_back


def has_bf16(device: torch.device) -> bool:
    """Whether the hardware multiplies bf16 matrices itself; elsewhere bf16 is much slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """The surroundings of a forward pass in the chosen precision; weights stay float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=takes_bf16(precision, device))


def takes_bf16(precision: Precision, device: torch.device) -> bool:
    return precision == "bf16" or (precision == "auto" and has_bf16(device))


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
