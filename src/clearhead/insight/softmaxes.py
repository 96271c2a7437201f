"""From a softmax to the values that its result multiplies.

Between the two a model may drop, cast, mask, rescale and rearrange, or mix the heads ("talking heads"). Each step's
result is followed, and with it goes its twin without dropout. What multiplies no values is forgotten together with its
tensor: a classifier's softmax, say.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

SOFTMAXES = {"softmax", "_safe_softmax"}
DROPOUTS = {"dropout", "dropout_", "dropout1d", "dropout2d", "feature_dropout"}
CASTS = {"to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "cpu", "cuda"}
PRODUCTS = {"mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"}
ELEMENTWISE = (
    CASTS
    | PRODUCTS
    | {
        *("masked_fill", "masked_fill_", "where", "nan_to_num", "nan_to_num_", "clamp"),
        *("div", "div_", "true_divide", "__truediv__", "__itruediv__", "__div__", "__idiv__"),
    }
)
SHAPES = {
    *("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze"),
    *("transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "T", "mT", "adjoint"),
    *("expand", "expand_as", "broadcast_to", "__getitem__", "narrow"),
}
MIXES = {"linear", "layer_norm", "conv2d", "einsum"}
"""steps across the heads; each row must still be along the axis of the softmax"""
FOLLOWED = DROPOUTS | ELEMENTWISE | SHAPES | MIXES - {"einsum"}


@dataclass(frozen=True, eq=False)
class SoftmaxResult:
    axis: int
    """along which the softmax made the numbers sum to 1"""
    born: torch.Size
    """the shape that the softmax returned"""
    twin: Tensor | None = None
    """the same without dropout; None as long as nothing was dropped, so that the entry does not hold its own tensor"""
    dropout: float = 0.0

    def before_dropout(self, followed: Tensor) -> Tensor:
        return followed if self.twin is None else self.twin

    def n_joined(self, shape: torch.Size) -> int:
        """How many heads are in the first axis, where (B,H,Q,K) became (B H,Q,K); else 0."""
        n_batch, num_heads, *rest = self.born if len(self.born) == 4 else (0, 0)
        return num_heads if [n_batch * num_heads, *rest] == list(shape) else 0


class SoftmaxTracker:
    """The tensors that came from a softmax and may still multiply values. An entry goes when its tensor does."""

    def __init__(self) -> None:
        self.trails = WeakTensorKeyDictionary()
        self.is_started = False

    def __len__(self) -> int:
        return len(self.trails)

    def start(self, out: Tensor, args: Any, kwargs: Any) -> None:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if isinstance(out, Tensor) and isinstance(dim, int) and out.dim() > 1:
            self.trails[out] = SoftmaxResult(dim % out.dim(), out.shape)
            self.is_started = True

    def of(self, x: Any) -> SoftmaxResult | None:
        return self.trails.get(x) if isinstance(x, Tensor) else None

    def follow(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls func, and goes on to follow its result if one of its arguments was followed."""
        source = next((x for x in (*args, *kwargs.values()) if self.of(x)), None)
        trail = self.of(source)
        if source is None or trail is None:
            return func(*args, **kwargs)
        rate = dropout_rate(name, source, args, kwargs)
        twin = trail.before_dropout(source)
        if rate and twin is source and is_in_place(name, args, kwargs):
            twin = source.clone()
        out = func(*args, **kwargs)
        if rate:
            self.trails[out] = replace(trail, twin=twin, dropout=rate)
        else:
            self.go_on(name, func, source, args, kwargs, out)
        return out

    def go_on(self, name: str, func: Callable[..., Any], source: Tensor, args: Any, kwargs: Any, out: Any) -> None:
        """The result of a step without dropout is followed as its argument was."""
        trail = self.of(source)
        axis = None if trail is None else axis_after(name, func, source, trail.axis, args, kwargs, out)
        if trail is None or axis is None:
            return
        twin = trail.twin
        if twin is not None and name not in DROPOUTS:
            twin = called_with(func, source, twin.clone() if is_in_place(name, args, kwargs) else twin, args, kwargs)
        self.trails[out] = replace(trail, twin=twin, axis=axis)


def argument(args: Any, kwargs: Any, place: int, *names: str) -> Any:
    """An argument of a call, wherever the caller put it."""
    return args[place] if place < len(args) else next((kwargs[name] for name in names if name in kwargs), None)


def called_with(func: Callable[..., Any], source: Tensor, other: Tensor, args: Any, kwargs: Any) -> Any:
    """The same call with another tensor in the place of source."""
    return func(
        *(other if x is source else x for x in args),
        **{name: other if x is source else x for name, x in kwargs.items()},
    )


def axis_after(
    name: str, func: Callable[..., Any], source: Tensor, axis: int, args: Any, kwargs: Any, out: Any
) -> int | None:
    """Where the axis of the softmax is now, or None if it is no longer one axis."""
    if not isinstance(out, Tensor) or not out.is_floating_point():
        return None
    last = source.dim() - 1
    match name:
        case "linear":
            return axis if argument(args, kwargs, 0, "input") is source and axis != last else None
        case "layer_norm":
            return axis if axis <= last - len(argument(args, kwargs, 1, "normalized_shape")) else None
        case "conv2d":
            image, kernel = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "weight")
            return axis if image is source and axis >= last - 1 and kernel.shape[2:] == (1, 1) else None
        case "einsum":
            return axis_after_einsum(args[0], args[1] is source, axis)
    if name not in SHAPES:  # a mask or factor of another shape would make something else of it
        return axis if out.shape == source.shape else None
    return moved_axis(func, source, axis, args, kwargs, out)


def axis_after_einsum(equation: str, is_main: bool, axis: int) -> int | None:
    terms, _, out = equation.replace(" ", "").partition("->")
    if "." in equation or terms.count(",") != 1:
        return None
    mine, theirs = terms.split(",") if is_main else terms.split(",")[::-1]
    return out.index(mine[axis]) if mine[axis] in out and mine[axis] not in theirs else None


def moved_axis(func: Callable[..., Any], source: Tensor, axis: int, args: Any, kwargs: Any, out: Tensor) -> int | None:
    """Rearranges a tensor without content in which only this axis has a stride, and looks where the stride went."""
    num_keys = max(2, source.shape[axis])  # an axis of length 1 would have no stride to show
    size = [num_keys if i == axis else n for i, n in enumerate(source.shape)]
    probe = torch.empty_strided(size, [int(i == axis) for i in range(source.dim())], device="meta")
    try:
        moved = called_with(func, source, probe, args, kwargs)
    except (RuntimeError, IndexError):  # split, or joined with another one; or a single key, and a shape that says so
        return out.dim() - (source.dim() - axis) if source.shape[axis] == 1 else None
    found = [i for i, n in enumerate(moved.shape) if n == num_keys and moved.stride(i) == 1]
    return found[0] if len(found) == 1 else None


def dropout_rate(name: str, source: Tensor, args: Any, kwargs: Any) -> float:
    """The rate of a call of dropout, or of a product with a mask of 0 and 1/(1-rate); 0 where nothing is dropped."""
    if name in DROPOUTS:
        rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
        return float(rate) if training else 0.0
    if name not in PRODUCTS:
        return 0.0
    mask = next((x for x in (*args, *kwargs.values()) if x is not source), None)
    if not isinstance(mask, Tensor) or mask.shape != source.shape or not mask.is_floating_point():
        return 0.0
    if mask.is_meta or not mask.numel():  # no numbers to look at
        return 0.0
    largest = mask.detach().max()
    is_dropped = mask == 0
    is_dropout = largest > 1 and is_dropped.any() and (is_dropped | (mask == largest)).all()
    return 1 - 1 / largest.item() if is_dropout else 0.0


def is_in_place(name: str, args: Any, kwargs: Any) -> bool:
    if name in DROPOUTS and (kwargs.get("inplace") or (len(args) > 3 and args[3])):
        return True
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
