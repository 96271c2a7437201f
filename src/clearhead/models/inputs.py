"""What a model is fed: ids, or embeddings made elsewhere.

Dims: B batch, L length, E model width.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from clearhead.nn.checks import check_width


def embeddings_or(
    embed: Callable[[Tensor], Tensor], x: Tensor | None, inputs_embeds: Tensor | None, width: int
) -> Tensor:
    """embed(x), or the embeddings (B,L,E) themselves when they are given instead."""
    if (x is None) == (inputs_embeds is None):
        came = "neither" if x is None else "both"
        raise ValueError(f"a model takes its input or inputs_embeds=, one of the two, got {came}; pass one")
    if inputs_embeds is None:
        assert x is not None
        return embed(x)
    check_width(inputs_embeds, width, "inputs_embeds")
    check_batched(inputs_embeds, 3, "inputs_embeds must be (batch, length, width)")
    return inputs_embeds


def check_ids(ids: Tensor, n_tokens: int) -> None:
    """Refuses what is not (B,L) of whole numbers below n_tokens."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"ids must be whole numbers, got {ids.dtype}; embeddings go in as inputs_embeds=")
    check_batched(ids, 2, "ids must be (batch, length)")
    # Looking at the numbers would make an accelerator wait, and has no meaning while a graph is traced.
    if ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= n_tokens:
            raise ValueError(
                f"ids must be from 0 to {n_tokens - 1}, got {low if low < 0 else high}; "
                "build the model with as many tokens as the data has"
            )


def check_batched(x: Tensor, n_dims: int, rule: str) -> None:
    if x.dim() != n_dims:
        raise ValueError(f"{rule}, got shape {tuple(x.shape)}; add a batch of one with x[None]")
