"""Numbers that don't fit, refused in one line. Without torch: configs use it too."""

import math
import os
from collections.abc import Iterable
from typing import Any, get_args

from clearhead.messages import did_you_mean, short_repr, unknown_name

LARGEST = 2**63 - 1
"""size of a tensor"""


def check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} must be a whole number above 0, got {size!r}; try {name}=1 or more")
        if size > LARGEST:
            raise ValueError(f"{name} must be at most 2^63 - 1, the largest size of a tensor, got {size!s:.30}")


def check_heads(width: int, num_heads: int) -> None:
    if num_heads < 1 or width < 1 or width % num_heads:
        heads = max(1, num_heads)
        nearest = max(1, round(width / heads)) * heads
        raise ValueError(
            f"width must be a multiple of num_heads, got width={width}, num_heads={num_heads}; "
            f"try width={nearest}, num_heads={heads}"
        )


def check_rotary_width(head_dim: int, multiple: int) -> None:
    if head_dim % multiple:
        raise ValueError(
            f"rotary positions need a head width (width / num_heads) that is a multiple of {multiple}, "
            f"got {head_dim}; change width or num_heads"
        )


def check_power_of_two(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 2 or size & (size - 1):
            raise ValueError(f"{name} of a convolutional patch embedding must be 2, 4, 8, ..., got {size}")


def check_beta(beta: float) -> None:
    if not isinstance(beta, int | float) or math.isnan(beta):
        raise ValueError(f"beta must be a number, got {beta!r}; +inf, -inf and 0 are allowed")


def check_eps(name: str, eps: float) -> None:
    if not isinstance(eps, int | float) or isinstance(eps, bool) or not 0 < eps < math.inf:
        raise ValueError(f"{name} must be a number above 0, got {eps!r}; PyTorch's layer norm has 1e-5, BERT's 1e-12")


def check_rate(name: str, rate: float) -> None:
    if not isinstance(rate, int | float) or not 0 <= rate < 1:
        raise ValueError(f"{name} must be a number of at least 0 and below 1, got {rate!r}; 0 turns it off")


def check_sinusoidal_width(width: int, multiple: int) -> None:
    if width % multiple:
        raise ValueError(
            f"sinusoidal positions need a width that is a multiple of {multiple}, got {width}; "
            f"try width={width + multiple - width % multiple}"
        )


# Which function a model computes: frozen configs, checked when they are made. Importing this does not import torch.


def check_hidden(head_mlp_dim: int) -> None:
    if not isinstance(head_mlp_dim, int) or isinstance(head_mlp_dim, bool) or head_mlp_dim < 0:
        raise ValueError(
            f"head_mlp_dim must be a whole number of at least 0, got {head_mlp_dim!r}; 0 for no such layer"
        )


# Which examples a model is fitted to: frozen configs, checked when they are made. Does not import torch.


def check_choice(**chosen: tuple[Any, Any]) -> None:
    """name=(value, Literal[...])"""
    for name, (value, choices) in chosen.items():
        if value not in get_args(choices):
            hint = did_you_mean(value, get_args(choices)) if isinstance(value, str) else ""
            raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, got {short_repr(value)}{hint}")


def check_bool(**switches: bool) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {short_repr(value)}")


def check_paths(**paths: str) -> None:
    for name, path in paths.items():
        if not isinstance(path, str):
            raise ValueError(f"{name} must be a path as text, got {short_repr(path)}; pass str(path)")
        if not is_path(path):
            raise ValueError(f"{name} must be a path that the system can have, got {short_repr(path)}")


def is_path(text: str) -> bool:
    """The byte 0 ends a path, and half of a surrogate pair, which JSON can write, is no character."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_int(least: int, most: int, **sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            raise ValueError(
                f"{name} must be a whole number of at least {least}, got {short_repr(size)}; try {name}={least}"
            )
        if size > most:
            raise ValueError(f"{name} must be a whole number of at most {most:,}, got {short_repr(size)}")


# How a model is fitted, and a run as a whole: frozen configs, checked when they are made, to and from JSON.


def check_name(name: Any, names: Iterable[str], what: str) -> None:
    """Refuses a name that is not among these, with the nearest one that is."""
    names = list(names)
    if name not in names:
        raise unknown_name(what, name, names)


def check_count(config: Any, *names: str, advice: str = "") -> None:
    for name in names:
        count = getattr(config, name)
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            way = advice or default_hint(config, name)
            raise ValueError(f"{name} must be a whole number of at least 0, got {count!r}; {way}")


def check_at_most(most: int, **counts: int) -> None:
    for name, count in counts.items():
        if count > most:
            raise ValueError(f"{name} must be a whole number of at most {most}, got {count}; choose a smaller one")


def check_between(config: Any, low: float, high: float, *names: str) -> None:
    for name in names:
        number = getattr(config, name)
        if not is_number(number) or not low <= number < high:
            kind, above = ("finite number", "") if high == math.inf else ("number", f" and below {high}")
            raise ValueError(
                f"{name} must be a {kind} of at least {low}{above}, got {number!r}; {default_hint(config, name)}"
            )


def default_hint(config: Any, name: str) -> str:
    """What to do about a field that is wrong: what it is when nobody says anything is right for many."""
    return f"try {name}={getattr(type(config), name)!r}"
