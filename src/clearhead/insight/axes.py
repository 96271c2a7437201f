"""Axes: which ones weights, values and output have in a product, and where the softmax axis is after an operation.

Dims: B batch, H heads, Q queries, K keys, Dv width of values.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.interception import argument

DROPOUTS = {"dropout", "dropout_", "dropout1d", "dropout2d", "feature_dropout"}
CASTS = {"to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "cpu", "cuda"}
MULTIPLICATIONS = {"mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"}
ELEMENTWISE = (
    CASTS
    | MULTIPLICATIONS
    | {
        *("masked_fill", "masked_fill_", "where", "nan_to_num", "nan_to_num_", "clamp", "clamp_", "clamp_min", "relu"),
        *("div", "div_", "true_divide", "__truediv__", "__itruediv__", "__div__", "__idiv__", "pow", "__pow__"),
        *("add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__rsub__", "__isub__", "rsub"),
        *("detach", "detach_", "data", "alias", "requires_grad_", "copy_", "__setitem__", "neg", "fill_diagonal_"),
        *(
            "tril",
            "triu",
            "tril_",
            "triu_",
            "round",
            "lerp",
            "zero_",
            "__get__",
            "positive",
            "abs",
            "maximum",
            "normalize",
        ),
    }
)
SHAPE_OPS = {
    *("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze"),
    *("transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "T", "mT", "adjoint"),
    *("expand", "expand_as", "broadcast_to", "__getitem__", "narrow"),
}
MORE_SHAPE_OPS = {
    *("split", "split_with_sizes", "chunk", "tensor_split", "unbind", "select", "slice", "__iter__", "unsafe_split"),
    *("squeeze_", "unsqueeze_", "transpose_", "t_", "swapaxes_", "diagonal", "H", "mH", "_unsafe_view", "unsafe_chunk"),
}
SAME_AXES = {
    *(
        "repeat",
        "repeat_interleave",
        "tile",
        "gather",
        "index_select",
        "take_along_dim",
        "flip",
        "roll",
        "pad",
        "fliplr",
    ),
    *("constant_pad_nd", "index_fill", "index_fill_", "index_copy", "index_copy_", "scatter", "scatter_", "cumsum"),
}
"""operations that change sizes but not the number of axes"""
JOINS = {"cat", "concat", "concatenate", "stack", "hstack", "vstack"}
REDUCTIONS = {"sum", "mean", "nansum", "amax", "amin"}
HEAD_MIXERS = {"linear", "layer_norm", "conv2d"}
"""steps across the heads; einsum may be one too, unless it is the weighted sum of the values"""
SELECTIONS = {
    "topk",
    "sort",
    "gather",
    "scatter",
    "scatter_",
    "index_select",
    "index_put_",
    "max",
    "min",
    "one_hot",
    "index",
}
"""steps of a router, which chooses experts"""


def axes_after(
    name: str, func: Callable[..., Any], source: Tensor, axis: int, args: Any, kwargs: Any, out: Any
) -> list[int | None] | None:
    """The axis of the softmax in each output of a step; None if the step is unknown."""
    if name in JOINS:
        return [axis_after_join(name, source, axis, args, kwargs, out)]
    if name in SAME_AXES:
        is_same = isinstance(out, Tensor) and out.dim() == source.dim() and args[0] is source
        return [axis] if is_same else None
    if name in REDUCTIONS:
        axes = reduced_axes(name, source, None, args, kwargs)
        if not axes or axis in axes:
            return [None]
        keeps = out.dim() == source.dim()
        return [axis if keeps else axis - sum(other < axis for other in axes)]
    if name in SHAPE_OPS | MORE_SHAPE_OPS:
        outs = list(out) if isinstance(out, tuple | list) else [out]
        return axes_after_shape_op(func, source, axis, args, kwargs, outs)
    if name in ELEMENTWISE | DROPOUTS | HEAD_MIXERS | {"einsum"}:
        return [axis_after(name, func, source, axis, args, kwargs, out)]
    return None


def axis_after(
    name: str, func: Callable[..., Any], source: Tensor, axis: int, args: Any, kwargs: Any, out: Any
) -> int | None:
    """The axis of the softmax in the only output of a step, or None if it is no longer one axis."""
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
    is_divisor = "div" in name and argument(args, kwargs, 0, "input") is not source
    # with a mask or factor of a larger shape, it is no longer the same tensor
    return axis if out.shape == source.shape and not is_divisor else None


def axis_after_einsum(equation: str, is_first: bool, axis: int) -> int | None:
    terms, _, out = equation.replace(" ", "").partition("->")
    if "." in equation or terms.count(",") != 1:
        return None
    source, other = terms.split(",") if is_first else terms.split(",")[::-1]
    return out.index(source[axis]) if source[axis] in out and source[axis] not in other else None


def axis_after_join(name: str, source: Tensor, axis: int, args: Any, kwargs: Any, out: Any) -> int | None:
    tensors = argument(args, kwargs, 0, "tensors")
    is_alike = all(isinstance(x, Tensor) and x.dim() == source.dim() for x in tensors)
    if not is_alike or not isinstance(out, Tensor) or name in ("hstack", "vstack"):
        return None
    dim = argument(args, kwargs, 1, "dim", "axis", default=0) % out.dim()
    return axis + (dim <= axis) if name == "stack" else axis


def axes_after_shape_op(
    func: Callable[..., Any], source: Tensor, axis: int, args: Any, kwargs: Any, outs: list[Any]
) -> list[int | None]:
    """Apply the step to a meta tensor in which only this axis has a stride, and find the stride in the results."""
    size = max(2, source.shape[axis])  # an axis of size 1 has no meaningful stride
    shape = [size if i == axis else n for i, n in enumerate(source.shape)]
    probe = torch.empty_strided(shape, [int(i == axis) for i in range(source.dim())], device="meta")
    try:
        moved = call_with(func, source, probe, args, kwargs)
    except (RuntimeError, IndexError):  # the axis was split or merged; or it has size 1, and the call names that size
        return [x.dim() - (source.dim() - axis) if source.shape[axis] == 1 else None for x in outs]
    return [only_axis(x) for x in (moved if isinstance(moved, tuple | list) else [moved])]


def axis_after_shape_op(
    func: Callable[..., Any], source: Tensor, axis: int, args: Any, kwargs: Any, out: Tensor
) -> int | None:
    return axes_after_shape_op(func, source, axis, args, kwargs, [out])[0]


def only_axis(x: Tensor) -> int | None:
    """The only axis with a stride: a slice keeps it, a select removes it, and a split or a copy makes several."""
    axes = [i for i, n in enumerate(x.shape) if n > 1 and x.stride(i) != 0]
    axes = axes or [i for i, n in enumerate(x.shape) if n == 1 and x.stride(i) != 0]  # a slice of one key
    return axes[0] if len(axes) == 1 else None


def reduced_axes(name: str, source: Tensor, axis: int | None, args: Any, kwargs: Any) -> list[int]:
    """The axes that a reduction removes; [] if it removes all, or is none."""
    if name not in REDUCTIONS:
        return []
    dim = argument(args, kwargs, 1, "dim", "axis")
    dims = [dim] if isinstance(dim, int) else list(dim) if isinstance(dim, list | tuple) else []
    return [d % source.dim() for d in dims]


def call_with(func: Callable[..., Any], source: Tensor, replacement: Tensor, args: Any, kwargs: Any) -> Any:
    """The same call with another tensor in the place of source, also in a list of tensors."""

    def swap(x: Any) -> Any:
        if isinstance(x, list | tuple):
            return type(x)(replacement if item is source else item for item in x) if any(i is source for i in x) else x
        return replacement if x is source else x

    return func(*(swap(x) for x in args), **{name: swap(x) for name, x in kwargs.items()})


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
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def flat(args: Any, kwargs: Any) -> Iterator[Any]:
    """The arguments of a call, with those in lists and tuples."""
    for x in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(x, list | tuple):
            yield from x
        else:
            yield x


def is_view(name: str, args: Any) -> bool:
    """Whether all elements stay together: a router of experts gathers its weighted values by an index instead."""
    return name in SHAPE_OPS | CASTS and not (
        name == "__getitem__" and any(isinstance(x, Tensor) for x in flat(args[1:], {}))
    )


def is_gate(name: str, source: Tensor, args: Any) -> bool:
    """sigmoid(x) * y is a gate, not attention, unless y is a number or a mask."""
    others = [x for x in args if isinstance(x, Tensor) and x is not source]
    return name in MULTIPLICATIONS and any(x.is_floating_point() and x.dim() > 0 for x in others)


def dense_factor(name: str, source: Tensor, args: Any, kwargs: Any) -> tuple[Tensor, Tensor] | None:
    """(weights, factor) of a product with a tensor of the same shape that is no mask of 0 and 1."""
    if name not in MULTIPLICATIONS:
        return None
    other = next((x for x in (*args, *kwargs.values()) if x is not source), None)
    if not isinstance(other, Tensor) or other.shape != source.shape or not other.is_floating_point() or other.is_meta:
        return None
    return None if bool(((other == 0) | (other == 1)).all()) else (source, other)


def is_weighting(name: str, source: Tensor, args: Any, out: Any) -> bool:
    """Whether weights are multiplied elementwise with values of a larger shape, to be summed afterwards."""
    if name not in MULTIPLICATIONS or len(args) < 2 or not isinstance(out, Tensor):
        return False
    other = args[1] if args[0] is source else args[0]
    if not isinstance(other, Tensor) or not other.is_floating_point():
        return False
    is_expanded = any(n > 1 and stride == 0 for n, stride in zip(source.shape, source.stride(), strict=True))
    return out.shape != source.shape or is_expanded


# Layouts of weighted sums


@dataclass(frozen=True)
class Layout:
    """One letter for each axis of weights, values and output.

    The product sums over the keys. Of the axes other than queries, keys and widths, the last one is the heads and those
    before it are the batch; a single one is the batch. Without a query axis there is one query; several widths are
    flattened into one, and without any the width is 1.
    """

    weights: str
    values: str
    out: str
    keys: str
    queries: str
    """one letter, or none"""
    merged_heads: int = 0
    """the number of heads in the first axis, where batch and heads are merged; 0 if they are not"""

    @property
    def widths(self) -> str:
        """The axes that only values have. Of several, those before the queries are a batch that shares its weights."""
        own = "".join(letter for letter in self.values if letter not in self.weights)
        if len(own) < 2 or not self.queries:
            return own
        return "".join(letter for letter in own if self.out.find(letter) > self.out.find(self.queries)) or own[-1]

    @property
    def batch_axes(self) -> str:
        """Batch and heads."""
        own = "".join(letter for letter in self.weights if letter not in self.keys + self.queries)
        return "".join(letter for letter in self.values if letter not in self.weights + self.widths) + own

    def arrange_weights(self, weights: Tensor, out: Tensor) -> Tensor:
        x = self.arrange(weights, self.weights, self.queries + self.keys, out)
        return to_4d(with_heads(x if self.queries else x.unsqueeze(-2), self.merged_heads))

    def arrange_values(self, values: Tensor, out: Tensor) -> Tensor:
        x = self.arrange(values, self.values, self.keys + self.widths, out)
        return to_4d(with_heads(self.with_one_width(x), self.merged_heads))

    def arrange_out(self, out: Tensor) -> Tensor:
        x = self.arrange(out, self.out, self.queries + self.widths, out)
        return to_4d(with_heads(self.with_one_width(self.with_queries(x)), self.merged_heads))

    def arrange(self, x: Tensor, letters: str, last: str, out: Tensor) -> Tensor:
        """x as (batch_axes, last); a batch axis that x lacks, or that has size 1 in x, is expanded."""
        missing = [letter for letter in self.batch_axes if letter not in letters]
        x = x[(None,) * len(missing)] if missing else x
        x = permute(x, "".join(missing) + letters, self.batch_axes + last)
        batch_shape = [out.shape[self.out.index(letter)] for letter in self.batch_axes]
        if list(x.shape[: len(batch_shape)]) != batch_shape:
            x = x.expand(*batch_shape, *x.shape[len(batch_shape) :])
        return x

    def with_queries(self, x: Tensor) -> Tensor:
        return x if self.queries else x.unsqueeze(x.dim() - len(self.widths))

    def with_one_width(self, x: Tensor) -> Tensor:
        if len(self.widths) == 1:
            return x
        return x.flatten(-len(self.widths)) if self.widths else x.unsqueeze(-1)

    def head_view(self, out: Tensor) -> Tensor:
        """The output as (...,H,Q,*widths). It is a view: writing to it changes the output."""
        x = self.with_queries(permute(out, self.out, self.batch_axes + self.queries + self.widths))
        num_last = 1 + len(self.widths)
        if self.merged_heads:
            return x.unflatten(-1 - num_last, (-1, self.merged_heads))
        return x.unsqueeze(-1 - num_last) if x.dim() < 3 + len(self.widths) else x


def einsum_layout(equation: str, weights_first: bool, weights_dim: int, values_dim: int) -> Layout | None:
    """The layout of an einsum of weights and values, or None if it is no weighted sum."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != 2 or not arrow:
        return None
    weights, values = terms if weights_first else terms[::-1]
    weights, values = expand_ellipsis(weights, weights_dim), expand_ellipsis(values, values_dim)
    longer = max(weights, values, key=lambda term: sum(letter in ELLIPSIS_LETTERS for letter in term))
    out = out.replace("...", "".join(letter for letter in longer if letter in ELLIPSIS_LETTERS))
    summed = [letter for letter in weights if letter in values and letter not in out]
    queries = [letter for letter in weights if letter in out and letter not in values]
    if len(summed) != 1:
        return None
    return validated(Layout(weights, values, out, summed[0], queries[-1] if queries else ""))


ELLIPSIS_LETTERS = "αβγδεζηθ"
"""letters for the axes of an ellipsis, from the last axis to the first"""


def expand_ellipsis(term: str, dim: int) -> str:
    num_hidden = dim - len(term.replace("...", ""))
    return term.replace("...", ELLIPSIS_LETTERS[:num_hidden][::-1])


def validated(layout: Layout) -> Layout | None:
    """The layout if it is a weighted sum over keys only, without a repeated letter; otherwise None."""
    expected = layout.batch_axes + layout.queries + layout.widths
    is_weighted_sum = sorted(expected) == sorted(layout.out) and layout.keys in layout.values
    has_unique_letters = all(len(set(term)) == len(term) for term in (layout.weights, layout.values, layout.out))
    return layout if is_weighted_sum and has_unique_letters else None


def permute(x: Tensor, letters: str, order: str) -> Tensor:
    return x if letters == order else x.permute([letters.index(letter) for letter in order])


def with_heads(x: Tensor, merged_heads: int = 0) -> Tensor:
    """(...,L,D) -> (...,H,L,D): the merged heads, or a single head if x has fewer than four axes."""
    if merged_heads:
        return x.unflatten(-3, (-1, merged_heads))
    return x.unsqueeze(-3) if x.dim() < 4 else x


def to_4d(x: Tensor) -> Tensor:
    """(...,H,L,D) -> (B,H,L,D). A tensor of four axes is returned itself, so that autograd still knows it."""
    return x if x.dim() == 4 else x.reshape(-1, *x.shape[-3:])
