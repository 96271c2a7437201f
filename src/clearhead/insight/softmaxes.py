"""From a softmax to the values that its result multiplies.

Between the two a model may drop, cast, mask, rescale and rearrange. Each step's result is followed, and with it goes
its twin without dropout. What multiplies no values is forgotten together with its tensor: a classifier's softmax, say.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

SOFTMAXES = {"softmax", "_safe_softmax"}
DROPOUTS = {"dropout", "dropout_", "dropout1d", "dropout2d", "feature_dropout"}
CASTS = {"to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "cpu", "cuda"}
ELEMENTWISE = CASTS | {
    *("masked_fill", "masked_fill_", "where", "nan_to_num", "nan_to_num_", "clamp"),
    *("mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"),
    *("div", "div_", "true_divide", "__truediv__", "__itruediv__", "__div__", "__idiv__"),
}
SHAPES = {
    *("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze"),
    *("transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "T", "mT", "adjoint"),
    *("expand", "expand_as", "broadcast_to", "__getitem__", "narrow"),
}
FOLLOWED = DROPOUTS | ELEMENTWISE | SHAPES


@dataclass(frozen=True, eq=False)
class Trail:
    twin: Tensor
    """the same without dropout; the followed tensor itself as long as nothing was dropped"""
    axis: int
    """along which the softmax made the numbers sum to 1"""
    dropout: float = 0.0


class Trails:
    """The tensors that came from a softmax and may still multiply values. An entry goes when its tensor does."""

    def __init__(self) -> None:
        self.trails = WeakTensorKeyDictionary()

    def __len__(self) -> int:
        return len(self.trails)

    def start(self, out: Tensor, args: Any, kwargs: Any) -> None:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if isinstance(out, Tensor) and isinstance(dim, int) and out.dim() > 1:
            self.trails[out] = Trail(out, dim % out.dim())

    def of(self, x: Any) -> Trail | None:
        return self.trails.get(x) if isinstance(x, Tensor) else None

    def follow(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls func, and goes on to follow its result if one of its arguments was followed."""
        source = next((x for x in (*args, *kwargs.values()) if self.of(x)), None)
        if source is None:
            return func(*args, **kwargs)
        trail = self.of(source)
        assert trail is not None
        has_twin = trail.twin is not source
        rate = dropout_rate(args, kwargs) if name in DROPOUTS else 0.0
        if rate and not has_twin and is_in_place(name, args, kwargs):
            trail, has_twin = Trail(trail.twin.clone(), trail.axis), True
        out = func(*args, **kwargs)
        axis = self.axis_after(name, func, source, trail.axis, args, kwargs, out)
        if axis is None:
            return out
        if rate:
            self.trails[out] = Trail(trail.twin, axis, rate)
        elif not has_twin or name in DROPOUTS:
            self.trails[out] = Trail(trail.twin if has_twin else out, axis, trail.dropout)
        else:
            twin = trail.twin.clone() if is_in_place(name, args, kwargs) else trail.twin
            same = [twin if x is source else x for x in args]
            self.trails[out] = Trail(
                func(*same, **{key: twin if x is source else x for key, x in kwargs.items()}), axis, trail.dropout
            )
        return out

    def axis_after(
        self, name: str, func: Callable[..., Any], source: Tensor, axis: int, args: Any, kwargs: Any, out: Any
    ) -> int | None:
        """Where the axis of the softmax is now, or None if it is no longer one axis."""
        if not isinstance(out, Tensor) or not out.is_floating_point():
            return None
        if name not in SHAPES:  # a mask or factor of another shape would make something else of it
            return axis if out.shape == source.shape else None
        return moved_axis(func, source, axis, args, kwargs, out)


def moved_axis(func: Callable[..., Any], source: Tensor, axis: int, args: Any, kwargs: Any, out: Tensor) -> int | None:
    """Rearranges a tensor without content in which only this axis has a stride, and looks where the stride went."""
    n_keys = max(2, source.shape[axis])  # an axis of length 1 would have no stride to show
    size = [n_keys if i == axis else n for i, n in enumerate(source.shape)]
    probe = torch.empty_strided(size, [int(i == axis) for i in range(source.dim())], device="meta")
    try:
        moved = func(*(probe if x is source else x for x in args), **kwargs)
    except (RuntimeError, IndexError):  # split, or joined with another one; or a single key, and a shape that says so
        return out.dim() - (source.dim() - axis) if source.shape[axis] == 1 else None
    found = [i for i, n in enumerate(moved.shape) if n == n_keys and moved.stride(i) == 1]
    return found[0] if len(found) == 1 else None


def dropout_rate(args: Any, kwargs: Any) -> float:
    """The rate of a call of dropout; 0 where it does nothing."""
    rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return float(rate) if training else 0.0


def is_in_place(name: str, args: Any, kwargs: Any) -> bool:
    if name in DROPOUTS and (kwargs.get("inplace") or (len(args) > 3 and args[3])):
        return True
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
