"""Follow the result of a softmax until it multiplies values.

In between, a model may apply dropout, cast, mask, rescale and reshape, or mix the heads ("talking heads"). The result
of each step is tracked, together with the same tensor without dropout. A result that multiplies no values, such as the
probabilities of a classifier, is forgotten when its tensor is freed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from clearhead.interception import argument

SOFTMAXES = {"softmax", "_safe_softmax"}
DROPOUTS = {"dropout", "dropout_", "dropout1d", "dropout2d", "feature_dropout"}
CASTS = {"to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "cpu", "cuda"}
MULTIPLICATIONS = {"mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"}
ELEMENTWISE = (
    CASTS
    | MULTIPLICATIONS
    | {
        *("masked_fill", "masked_fill_", "where", "nan_to_num", "nan_to_num_", "clamp"),
        *("div", "div_", "true_divide", "__truediv__", "__itruediv__", "__div__", "__idiv__"),
    }
)
SHAPE_OPS = {
    *("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze"),
    *("transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "T", "mT", "adjoint"),
    *("expand", "expand_as", "broadcast_to", "__getitem__", "narrow"),
}
HEAD_MIXERS = {"linear", "layer_norm", "conv2d"}
"""steps across the heads; einsum may be one too, unless it is the weighted sum of the values"""
TRACKED = DROPOUTS | ELEMENTWISE | SHAPE_OPS | HEAD_MIXERS


@dataclass(frozen=True, eq=False)
class SoftmaxResult:
    """What is known about a tensor that came from a softmax."""

    axis: int
    """the axis along which the softmax normalized"""
    original_shape: torch.Size
    """the shape that the softmax returned"""
    undropped: Tensor | None = None
    """the tensor without dropout; None before any dropout, so that the entry does not keep its own tensor alive"""
    dropout: float = 0.0

    def before_dropout(self, tracked: Tensor) -> Tensor:
        return tracked if self.undropped is None else self.undropped

    def merged_heads(self, shape: torch.Size) -> int:
        """The number of heads in the first axis, where (B,H,Q,K) was reshaped to (B*H,Q,K); otherwise 0."""
        batch, num_heads, *rest = self.original_shape if len(self.original_shape) == 4 else (0, 0)
        return num_heads if [batch * num_heads, *rest] == list(shape) else 0


class SoftmaxTracker:
    """The tensors that came from a softmax and may still multiply values. An entry is removed with its tensor."""

    def __init__(self) -> None:
        self.results = WeakTensorKeyDictionary()
        self.has_started = False

    def __len__(self) -> int:
        return len(self.results)

    def start(self, out: Tensor, args: Any, kwargs: Any) -> None:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if isinstance(out, Tensor) and isinstance(dim, int) and out.dim() > 1:
            self.results[out] = SoftmaxResult(dim % out.dim(), out.shape)
            self.has_started = True

    def get(self, x: Any) -> SoftmaxResult | None:
        return self.results.get(x) if isinstance(x, Tensor) else None

    def call(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """func(*args, **kwargs), whose output is tracked if one of its arguments is."""
        source = next((x for x in (*args, *kwargs.values()) if self.get(x)), None)
        result = self.get(source)
        if source is None or result is None:
            return func(*args, **kwargs)
        rate = dropout_rate(name, source, args, kwargs)
        undropped = result.before_dropout(source)
        if rate and undropped is source and is_in_place(name, args, kwargs):
            undropped = source.clone()
        out = func(*args, **kwargs)
        if rate:
            self.results[out] = replace(result, undropped=undropped, dropout=rate)
        else:
            self.track(name, func, source, args, kwargs, out)
        return out

    def track(self, name: str, func: Callable[..., Any], source: Tensor, args: Any, kwargs: Any, out: Any) -> None:
        """Track the output of a step without dropout, if its softmax axis is still one axis."""
        result = self.get(source)
        axis = None if result is None else axis_after(name, func, source, result.axis, args, kwargs, out)
        if result is None or axis is None:
            return
        undropped = result.undropped
        if undropped is not None and name not in DROPOUTS:
            replacement = undropped.clone() if is_in_place(name, args, kwargs) else undropped
            undropped = call_with(func, source, replacement, args, kwargs)
        self.results[out] = replace(result, undropped=undropped, axis=axis)


def call_with(func: Callable[..., Any], source: Tensor, replacement: Tensor, args: Any, kwargs: Any) -> Any:
    """The same call with another tensor in the place of source."""
    return func(
        *(replacement if x is source else x for x in args),
        **{name: replacement if x is source else x for name, x in kwargs.items()},
    )


def axis_after(
    name: str, func: Callable[..., Any], source: Tensor, axis: int, args: Any, kwargs: Any, out: Any
) -> int | None:
    """The axis of the softmax in the output of a step, or None if it is no longer one axis."""
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
    if name not in SHAPE_OPS:  # with a mask or factor of a larger shape, it is no longer the same tensor
        return axis if out.shape == source.shape else None
    return axis_after_shape_op(func, source, axis, args, kwargs, out)


def axis_after_einsum(equation: str, is_first: bool, axis: int) -> int | None:
    terms, _, out = equation.replace(" ", "").partition("->")
    if "." in equation or terms.count(",") != 1:
        return None
    source, other = terms.split(",") if is_first else terms.split(",")[::-1]
    return out.index(source[axis]) if source[axis] in out and source[axis] not in other else None


def axis_after_shape_op(
    func: Callable[..., Any], source: Tensor, axis: int, args: Any, kwargs: Any, out: Tensor
) -> int | None:
    """Apply the step to a meta tensor in which only this axis has a stride, and find the stride in the result."""
    size = max(2, source.shape[axis])  # an axis of size 1 has no meaningful stride
    shape = [size if i == axis else n for i, n in enumerate(source.shape)]
    probe = torch.empty_strided(shape, [int(i == axis) for i in range(source.dim())], device="meta")
    try:
        moved = call_with(func, source, probe, args, kwargs)
    except (RuntimeError, IndexError):  # the axis was split or merged; or it has size 1, and the call names that size
        return out.dim() - (source.dim() - axis) if source.shape[axis] == 1 else None
    axes = [i for i, n in enumerate(moved.shape) if n == size and moved.stride(i) == 1]
    return axes[0] if len(axes) == 1 else None


def dropout_rate(name: str, source: Tensor, args: Any, kwargs: Any) -> float:
    """The rate of a dropout call, or of a product with a mask of 0 and 1/(1-rate); 0 where nothing is dropped."""
    if name in DROPOUTS:
        rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
        return float(rate) if training else 0.0
    if name not in MULTIPLICATIONS:
        return 0.0
    mask = next((x for x in (*args, *kwargs.values()) if x is not source), None)
    if not isinstance(mask, Tensor) or mask.shape != source.shape or not mask.is_floating_point():
        return 0.0
    if mask.is_meta or not mask.numel():  # there are no values to inspect
        return 0.0
    largest = mask.detach().max()
    is_dropped = mask == 0
    is_dropout = largest > 1 and is_dropped.any() and (is_dropped | (mask == largest)).all()
    return 1 - 1 / largest.item() if is_dropout else 0.0


def is_in_place(name: str, args: Any, kwargs: Any) -> bool:
    if name in DROPOUTS and (kwargs.get("inplace") or (len(args) > 3 and args[3])):
        return True
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
