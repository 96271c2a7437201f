"""What does not fit together, refused in one line: the rule, what came, what to do.

Dims: B batch, H heads, Q queries, K keys, D head width, E model width.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead.nn.sizes import check_beta

if TYPE_CHECKING:
    from clearhead.nn.masks import Mask


def check_width(x: Tensor, width: int, name: str) -> None:
    if x.shape[-1] != width:
        raise ValueError(
            f"{name} must have {width} numbers per token in its last dimension, got shape {tuple(x.shape)}; "
            "project it, or build the module with that width"
        )


def check_attend(
    q: Tensor, k: Tensor, v: Tensor, mask: "Mask | None", beta: float | None, logit_bias: Tensor | None = None
) -> None:
    if beta is not None:
        check_beta(beta)
    for name, x in (("queries", q), ("keys", k), ("values", v)):
        if x.dim() < 2 or not x.is_floating_point() or x.dtype != q.dtype or x.device != q.device or not q.shape[-1]:
            raise ValueError(
                "queries, keys and values must be (..., length, width) of one floating-point dtype and device, got "
                f"{name} {x.dtype} of shape {tuple(x.shape)} on {x.device}; convert them with .to()"
            )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"queries and keys must have the same width, got {q.shape[-1]} and {k.shape[-1]}; project one of them first"
        )
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(
            f"there must be one value for each key, got {k.shape[-2]} keys and {v.shape[-2]} values; "
            "pass keys and values of the same length"
        )
    if not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        raise ValueError(
            "queries, keys and values must have the same batch and heads, got "
            f"{tuple(q.shape[:-2])}, {tuple(k.shape[:-2])} and {tuple(v.shape[:-2])}; expand them to one size"
        )
    scores = (*q.shape[:-1], k.shape[-2])
    for name, extra in (("mask", mask), ("logit_bias", logit_bias)):
        if extra is not None and extra.device != q.device:
            raise ValueError(f"a {name} must be where the queries are, {q.device}, got {extra.device}; move it there")
    if mask is not None:
        check_mask(mask, scores)
    if logit_bias is not None and not (logit_bias.is_floating_point() and fits(logit_bias, scores)):
        raise ValueError(
            "a logit_bias must be floating point and broadcast to the scores (B,H,Q,K) = "
            f"{scores}, got {logit_bias.dtype} of shape {tuple(logit_bias.shape)}; "
            "use (H,Q,K) for one per head"
        )


def check_bool(mask: "Mask") -> None:
    if mask.dtype != torch.bool:
        raise ValueError(
            f"a mask must be bool with True = may attend, got {mask.dtype}; "
            "convert numbers with masks.from_additive, torch.nn's masks with masks.from_torch"
        )


def check_mask(mask: "Mask", shape: tuple[int, ...]) -> None:
    """Refuses a mask that is not bool, or that does not broadcast to the scores' shape (B,H,Q,K)."""
    check_bool(mask)
    if not fits(mask, shape):
        raise ValueError(
            f"a mask must broadcast to the scores (B,H,Q,K) = {shape}, got {tuple(mask.shape)}; "
            "use (Q,K) for one mask for all, (B,1,1,K) for padding, (B,1,Q,K) for one per example"
        )


def fits(x: "Mask", shape: tuple[int, ...]) -> bool:
    """Whether x broadcasts to exactly this shape."""
    return x.dim() <= len(shape) and all(
        n in (1, size) for n, size in zip(reversed(x.shape), reversed(shape), strict=False)
    )
