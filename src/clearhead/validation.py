"""Validate arguments and the fields of configs. Each check raises a one-line ValueError that names the argument.

Values are passed by keyword, under the name that the error shows: check_positive(width=width, depth=depth).
Importing this module does not import torch.
"""

import inspect
import math
import os
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, get_args

from clearhead.messages import did_you_mean, short_repr, unknown_name

P = ParamSpec("P")
R = TypeVar("R")
MAX_SIZE = 2**63 - 1
"""the largest size of a tensor dimension"""


def check_int(minimum: int, maximum: int = MAX_SIZE, *, hint: str = "", defaults: Any = None, **values: int) -> None:
    """minimum <= value <= maximum. The error ends with `hint`, or suggests the value that `defaults` has."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            kind = {0: "a non-negative integer", 1: "a positive integer"}.get(minimum, f"an integer >= {minimum}")
            raise ValueError(f"{name} must be {kind}, got {short_repr(value)}{suffix(name, hint, defaults)}")
        if value > maximum:
            limit = "2^63 - 1" if maximum == MAX_SIZE else f"{maximum:,}"
            raise ValueError(f"{name} must be at most {limit}, got {short_repr(value)}")


def check_positive(**values: int) -> None:
    check_int(1, MAX_SIZE, hint="", **values)


def check_range(low: float, high: float, *, hint: str = "", defaults: Any = None, **values: float) -> None:
    """low <= value < high. The error ends with `hint`, or suggests the value that `defaults` has."""
    for name, value in values.items():
        if not is_number(value) or not low <= value < high:
            interval = f"a finite number >= {low}" if high == math.inf else f"in [{low}, {high})"
            raise ValueError(f"{name} must be {interval}, got {short_repr(value)}{suffix(name, hint, defaults)}")


def check_rate(**rates: float) -> None:
    """Probabilities of dropout and of stochastic depth."""
    check_range(0, 1, hint="0 disables it", **rates)


def suffix(name: str, hint: str, defaults: Any) -> str:
    hint = f"try {name}={getattr(defaults, name)!r}" if defaults is not None and not hint else hint
    return f"; {hint}" if hint else ""


def check_eps(**values: float) -> None:
    for name, value in values.items():
        if not is_number(value) or not 0 < value < math.inf:
            raise ValueError(
                f"{name} must be a positive finite number, got {short_repr(value)}; "
                "PyTorch's LayerNorm has 1e-5, BERT's has 1e-12"
            )


def check_beta(beta: float) -> None:
    if not isinstance(beta, int | float) or math.isnan(beta):
        raise ValueError(f"beta must be a number, got {beta!r}; +inf, -inf and 0 are allowed")


def check_bool(**values: bool) -> None:
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {short_repr(value)}")


def check_choice(**choices: tuple[Any, Any]) -> None:
    """name=(value, Literal[...])"""
    for name, (value, literal) in choices.items():
        options = get_args(literal)
        if value not in options:
            hint = did_you_mean(value, options) if isinstance(value, str) else ""
            raise ValueError(f"{name} must be one of {', '.join(options)}, got {short_repr(value)}{hint}")


def check_name(name: Any, names: Iterable[str], kind: str) -> None:
    """Raises a LookupError that suggests the closest of `names`."""
    names = list(names)
    if name not in names:
        raise unknown_name(kind, name, names)


def suggest_keywords(init: Callable[P, R]) -> Callable[P, R]:
    """A decorator for functions and `__init__`: the TypeError for an unknown keyword suggests the closest name."""
    names = [name for name in inspect.signature(init).parameters if name != "self"]

    @wraps(init)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in names:
                kind = init.__qualname__.partition(".")[0]
                raise TypeError(f"{kind} got an unexpected keyword argument {name!r}{did_you_mean(name, names)}")
        return init(*args, **kwargs)

    return wrapper


def check_paths(**paths: str) -> None:
    for name, path in paths.items():
        if not isinstance(path, str):
            raise ValueError(f"{name} must be a path as a string, got {short_repr(path)}")
        if not is_valid_path(path):
            raise ValueError(f"{name} must be a valid path, got {short_repr(path)}")


def check_heads(width: int, num_heads: int) -> None:
    if num_heads < 1 or width < 1 or width % num_heads:
        heads = max(1, num_heads)
        nearest = max(1, round(width / heads)) * heads
        raise ValueError(
            f"width must be a multiple of num_heads, got width={width}, num_heads={num_heads}; "
            f"try width={nearest}, num_heads={heads}"
        )


def check_kv_heads(num_heads: int, num_kv_heads: int) -> None:
    check_positive(num_kv_heads=num_kv_heads)
    if num_heads % num_kv_heads:
        nearest = max(n for n in range(1, num_heads + 1) if num_heads % n == 0 and n <= num_kv_heads)
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads, got num_heads={num_heads}, num_kv_heads={num_kv_heads}; "
            f"try num_kv_heads={nearest}"
        )


def check_rotary_width(head_dim: int, multiple: int) -> None:
    """Each axis of the positions rotates pairs of features: a multiple of 2 in one dimension, of 4 in two."""
    if head_dim % multiple:
        raise ValueError(
            f"head_dim (width / num_heads) must be a multiple of {multiple} for rotary position embeddings, "
            f"got {head_dim}; change width or num_heads"
        )


def check_sinusoidal_width(width: int, multiple: int) -> None:
    """Each axis of the positions has pairs of sine and cosine: a multiple of 2 in one dimension, of 4 in two."""
    if width % multiple:
        raise ValueError(
            f"width must be a multiple of {multiple} for sinusoidal position embeddings, got {width}; "
            f"try width={width + multiple - width % multiple}"
        )


def check_power_of_two(**values: int) -> None:
    for name, value in values.items():
        if value < 2 or value & (value - 1):
            raise ValueError(
                f"{name} must be a power of two (2, 4, 8, ...) for a convolutional patch embedding, got {value}"
            )


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_valid_path(text: str) -> bool:
    """Whether the operating system accepts it: no NUL, and no lone surrogate, which JSON can contain."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False
