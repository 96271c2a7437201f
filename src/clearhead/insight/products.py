"""Recognize weighted sums of values: matrix products of any kind, and `(weights * values).sum()`.

Every product of two tensors is written as an einsum equation; the letter that it sums over is the axis of the keys.
"""

from dataclasses import dataclass, replace
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import torch
from torch import Tensor

from clearhead.insight.axes import Layout, einsum_layout, reduced_axes
from clearhead.insight.softmaxes import ScaledValues, SoftmaxResult, SoftmaxTracker
from clearhead.interception import argument

MATMULS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "mv", "dot"}
SUMMED_INTO = {"baddbmm": "bmm", "addmm": "mm", "addmv": "mv", "addbmm": ""}
"""products that are added to their first argument"""


@dataclass(frozen=True, eq=False)
class WeightedSum:
    weights: Tensor
    """without dropout"""
    values: Tensor
    layout: Layout
    result: SoftmaxResult
    out: Tensor
    """weights @ values, which the model may have added to another tensor"""
    kept_axis: int | None = None

    @property
    def is_normalized_over_keys(self) -> bool:
        return self.result.axis == self.layout.weights.index(self.layout.keys)


def find_weighted_sum(
    tracker: SoftmaxTracker, name: str, args: Any, kwargs: dict[str, Any], out: Any, merged_heads: int
) -> WeightedSum | None:
    """The weighted sum that this call computed, if one of its operands came from a softmax."""
    if not isinstance(out, Tensor):
        return None
    if name == "sum":
        product = argument(args, kwargs, 0, "input")
        scaled, result = tracker.get_scaled(product), tracker.get(product)
        factor = None if result is None else result.factor
        if result is not None and factor and reduced_axes(name, product, None, args, kwargs) == [result.axis]:
            scaled = ScaledValues(factor[0], factor[1], result, result.axis)
        return None if scaled is None else sum_of_scaled_values(scaled, args, kwargs, out)
    product = as_einsum(name, args, kwargs)
    if product is None:
        return None
    equation, operands, is_added = product
    for i, weights in enumerate(operands):
        values, result = operands[1 - i], tracker.get(weights)
        if result is None or result.stage not in ("weights", "sigmoid") or comes_from_softmax(tracker, values, result):
            continue
        if name == "linear" and result.is_gate:  # features that are weighted by a softmax
            continue
        layout = einsum_layout(equation, i == 0, weights.dim(), values.dim())
        if layout is None or not is_over_keys(layout, result, name, values):
            continue
        heads = (result.merged_heads(weights.shape) or merged_heads) if out.dim() == weights.dim() == 3 else 0
        layout = Layout(layout.weights, layout.values, layout.out, layout.keys, layout.queries, heads)
        if is_added:
            out = torch.einsum(equation, *operands)
        return WeightedSum(result.before_dropout(weights), values, layout, result, out)
    return None


def comes_from_softmax(tracker: SoftmaxTracker, values: Tensor, result: SoftmaxResult) -> bool:
    """Whether the other operand was computed from a softmax as well, as in an iterated inverse: not values."""
    lost, other = tracker.get_lost(values), tracker.get(values)
    if lost is not None:
        return not lost.is_scaled
    return other is not None and bool({*other.softmaxes} & {*result.softmaxes})


def is_over_keys(layout: Layout, result: SoftmaxResult, name: str, values: Tensor) -> bool:
    """Whether the product sums over the softmax axis; or over another one, with values of each example.

    A product with one matrix for all examples, over an axis that is not normalized, mixes the heads. A sigmoid
    normalizes no axis, and its product with a parameter is a layer like any other.
    """
    shares_batch = any(letter in layout.values and letter in layout.out for letter in layout.weights)
    if result.stage == "sigmoid":
        return shares_batch and not isinstance(values, torch.nn.Parameter) and name not in ("linear", "addmm")
    if name == "linear" and values.shape[0] == values.shape[1]:  # it mixes the keys with each other
        return False
    return result.axis == layout.weights.index(layout.keys) or shares_batch


def as_einsum(name: str, args: Any, kwargs: Any) -> tuple[str, list[Tensor], bool] | None:
    """The equation and the two operands of a product, and whether it was added to another tensor."""
    if name == "einsum":
        equation, *operands = args
        if len(operands) == 1 and isinstance(operands[0], list | tuple):
            operands = list(operands[0])
        if not isinstance(equation, str) or len(operands) != 2:
            return None
        return with_output(equation), operands, False
    if name == "linear":
        x, weight = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "weight")
        if x is None or weight is None or weight.dim() != 2:
            return None
        rest = ascii_uppercase[: x.dim() - 1]
        return f"{rest}k,dk->{rest}d", [x, weight], argument(args, kwargs, 2, "bias") is not None
    if name == "tensordot":
        return tensordot_as_einsum(args, kwargs)
    start = 1 if name in SUMMED_INTO else 0
    names = (("batch1", "mat1"), ("batch2", "mat2", "vec")) if start else (("input",), ("other", "mat2", "vec"))
    operands = [argument(args, kwargs, start + i, *names[i]) for i in (0, 1)]
    if (name not in MATMULS and not SUMMED_INTO.get(name)) or not all(isinstance(x, Tensor) for x in operands):
        return None
    if name == "__rmatmul__":
        operands.reverse()
    return matmul_as_einsum(operands[0].dim(), operands[1].dim()), operands, bool(start)


def matmul_as_einsum(left_dim: int, right_dim: int) -> str:
    batch = ascii_uppercase[: max(left_dim, right_dim, 2) - 2]
    left = batch[len(batch) - left_dim + 2 :] + "qk" if left_dim > 1 else "k"
    right = batch[len(batch) - right_dim + 2 :] + "kd" if right_dim > 1 else "k"
    return f"{left},{right}->{batch}{'q' * (left_dim > 1)}{'d' * (right_dim > 1)}"


def tensordot_as_einsum(args: Any, kwargs: Any) -> tuple[str, list[Tensor], bool] | None:
    left, right = args[:2] if len(args) > 1 else (kwargs.get("a"), kwargs.get("b"))
    dims = argument(args, kwargs, 2, "dims", default=2)
    if isinstance(dims, int):
        dims = (list(range(left.dim() - dims, left.dim())), list(range(dims)))
    if not isinstance(dims, list | tuple) or len(dims) != 2 or not all(isinstance(d, list | tuple) for d in dims):
        return None
    left_letters = list(ascii_lowercase[: left.dim()])
    right_letters = list(ascii_uppercase[: right.dim()])
    for i, j in zip(*dims, strict=True):
        right_letters[j] = left_letters[i]
    summed = {left_letters[i] for i in dims[0]}
    out = "".join(letter for letter in left_letters + right_letters if letter not in summed)
    return f"{''.join(left_letters)},{''.join(right_letters)}->{out}", [left, right], False


def with_output(equation: str) -> str:
    """The equation with its output: if there is none, the letters that occur once, in alphabetical order."""
    if "->" in equation:
        return equation
    letters = [letter for letter in equation if letter.isalpha()]
    dots = "..." if "..." in equation else ""
    return f"{equation}->{dots}{''.join(sorted(letter for letter in letters if letters.count(letter) == 1))}"


def sum_of_scaled_values(scaled: ScaledValues, args: Any, kwargs: Any, out: Tensor) -> WeightedSum | None:
    """(weights * values).sum(keys): an axis that only one of the two has is an axis of queries or of widths."""
    num_axes = max(scaled.weights.dim(), scaled.values.dim())
    product = argument(args, kwargs, 0, "input")
    axes = reduced_axes("sum", product, None, args, kwargs)
    if len(axes) != 1:
        return None
    letters, key = ascii_lowercase[:num_axes], ascii_lowercase[axes[0]]
    keeps_axis = out.dim() == num_axes
    terms, tensors = [], []
    for x in (scaled.weights, scaled.values):
        own = letters[num_axes - x.dim() :]
        sizes = dict(zip(own, x.shape, strict=True))
        full = dict(zip(letters, product.shape, strict=True))
        strides = dict(zip(own, x.stride(), strict=True))
        missing = {a for a in own if full[a] > 1 and (sizes[a] == 1 or strides[a] == 0) and a != key}
        tensors.append(x[tuple(0 if letter in missing else slice(None) for letter in own)])
        terms.append("".join(letter for letter in own if letter not in missing))
    out_letters = letters.replace(key, "")
    layout = einsum_layout(f"{terms[0]},{terms[1]}->{out_letters}", True, tensors[0].dim(), tensors[1].dim())
    if layout is None:
        return None
    result = replace(scaled.result, axis=terms[0].find(letters[scaled.axis]))
    return WeightedSum(tensors[0], tensors[1], layout, result, out, axes[0] if keeps_axis else None)
