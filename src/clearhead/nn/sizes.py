"""Numbers that don't fit, refused in one line. Without torch: configs use it too."""

import math

LARGEST = 2**63 - 1
"""size of a tensor"""


def check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} must be a whole number above 0, got {size!r}; try {name}=1 or more")
        if size > LARGEST:
            raise ValueError(f"{name} must be at most 2^63 - 1, the largest size of a tensor, got {size!s:.30}")


def check_heads(width: int, n_heads: int) -> None:
    if n_heads < 1 or width < 1 or width % n_heads:
        heads = max(1, n_heads)
        nearest = max(1, round(width / heads)) * heads
        raise ValueError(
            f"width must be a multiple of n_heads, got width={width}, n_heads={n_heads}; "
            f"try width={nearest}, n_heads={heads}"
        )


def check_even(head_width: int, multiple: int) -> None:
    if head_width % multiple:
        raise ValueError(
            f"rotary positions need a head width (width / n_heads) that is a multiple of {multiple}, "
            f"got {head_width}; change width or n_heads"
        )


def check_halvings(patch_size: int) -> None:
    if patch_size < 2 or patch_size & (patch_size - 1):
        raise ValueError(
            f"a convolutional tokenizer halves the image: patch size must be 2, 4, 8, ..., got {patch_size}; try 4"
        )


def check_beta(beta: float) -> None:
    if not isinstance(beta, int | float) or math.isnan(beta):
        raise ValueError(f"beta must be a number, got {beta!r}; +inf, -inf and 0 are allowed")


def check_eps(name: str, eps: float) -> None:
    if not isinstance(eps, int | float) or isinstance(eps, bool) or not 0 < eps < math.inf:
        raise ValueError(f"{name} must be a number above 0, got {eps!r}; PyTorch's layer norm has 1e-5, BERT's 1e-12")


def check_rate(name: str, rate: float) -> None:
    if not isinstance(rate, int | float) or not 0 <= rate < 1:
        raise ValueError(f"{name} must be a number of at least 0 and below 1, got {rate!r}; 0 turns it off")


def check_waves(width: int, multiple: int) -> None:
    if width % multiple:
        raise ValueError(
            f"sinusoidal positions need a width that is a multiple of {multiple}, got {width}; "
            f"try width={width + multiple - width % multiple}"
        )
