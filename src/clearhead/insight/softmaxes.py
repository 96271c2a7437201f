"""Follow the result of a softmax until it multiplies values.

In between, a model may apply dropout, cast, mask, rescale, reshape, slice and join, or mix the heads ("talking heads").
The result of each step is tracked, together with the same tensor without dropout. `log_softmax(x).exp()`,
`exp(x) / exp(x).sum()` and `exp(x - logsumexp(x))` are softmaxes too, and a sigmoid may take the place of one.

After an unknown step the weights are lost: the tensor is only marked, and its softmax is unresolved if it is multiplied
later. A result that multiplies no values, such as the probabilities of a classifier, is forgotten with its tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from clearhead.insight.axes import (
    CASTS,
    DROPOUTS,
    ELEMENTWISE,
    MULTIPLICATIONS,
    SELECTIONS,
    SHAPE_OPS,
    axes_after,
    call_with,
    dense_factor,
    dropout_rate,
    flat,
    is_gate,
    is_in_place,
    is_view,
    is_weighting,
    reduced_axes,
)

__all__ = ["CASTS", "MULTIPLICATIONS", "SHAPE_OPS", "SOFTMAXES", "Softmax", "SoftmaxResult", "SoftmaxTracker"]

SOFTMAXES = {"softmax", "_safe_softmax"}
LOG_SOFTMAXES = {"log_softmax", "special_log_softmax"}
STARTS = SOFTMAXES | LOG_SOFTMAXES | {"special_softmax", "exp", "exp_", "logsumexp", "sigmoid", "sigmoid_"}
RANDOM = {"rand", "rand_like", "bernoulli", "bernoulli_", "uniform_"}
MASK_STEPS = {
    *("lt", "gt", "le", "ge", "__lt__", "__gt__", "__le__", "__ge__", "logical_not", "__invert__", "bool", "floor"),
    *("float", "to", "type_as", "div", "__truediv__", "add", "__add__", "__radd__", "expand", "view", "unsqueeze"),
}
"""steps from random numbers to a mask of dropout"""
SUMS = {"sum", "nansum", "mean", "amax", "amin", "max", "min", "norm", "any", "all", "argmax", "argmin"}
DIVISIONS = {"div", "div_", "true_divide", "__truediv__", "__itruediv__", "__div__", "__idiv__"}
SUBTRACTIONS = {"sub", "sub_", "subtract", "__sub__", "__isub__"}

Stage = Literal["weights", "log weights", "exp", "sum of exp", "logsumexp", "x - logsumexp", "sigmoid"]


@dataclass(eq=False)
class Softmax:
    """One softmax of the pass, and what became of its result."""

    path: str
    """the path of the module that called it"""
    operation: str
    """softmax, log_softmax, exp or sigmoid"""
    shape: tuple[int, ...]
    is_recorded: bool = False
    lost_at: str = ""
    """the operation after which its result could not be followed"""
    is_multiplied: bool = False
    """whether the lost result was then multiplied with anything"""

    @property
    def is_unresolved(self) -> bool:
        return not self.is_recorded and self.is_multiplied


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
    softmaxes: tuple[Softmax, ...] = ()
    stage: Stage = "weights"
    is_partial: bool = False
    """whether some of the keys were cut off, or others appended"""
    factor: tuple[Tensor, Tensor] | None = None
    """weights and values of the same shape whose product this is: weights, unless a sum over the keys follows"""
    is_gate: bool = False
    """whether the weights were multiplied with such a factor, so that they may be weights of features"""

    def before_dropout(self, tracked: Tensor) -> Tensor:
        return tracked if self.undropped is None else self.undropped

    def merged_heads(self, shape: torch.Size) -> int:
        """The number of heads in the first axis, where (B,H,Q,K) was reshaped to (B*H,Q,K); otherwise 0."""
        batch, num_heads, *rest = self.original_shape if len(self.original_shape) == 4 else (0, 0)
        return num_heads if [batch * num_heads, *rest[:1]] == list(shape[:2]) and len(shape) == 3 else 0


@dataclass(frozen=True, eq=False)
class ScaledValues:
    """weights * values, before the sum over the keys."""

    weights: Tensor
    values: Tensor
    result: SoftmaxResult
    axis: int
    """the axis of the keys in the product"""


@dataclass(frozen=True, eq=False)
class Lost:
    """A tensor that came from softmaxes, in a way that cannot be followed exactly."""

    softmaxes: tuple[Softmax, ...]
    is_scaled: bool = False
    """whether it was multiplied with a larger tensor, so that a sum makes it a weighted sum"""


class SoftmaxTracker:
    """The tensors that came from a softmax and may still multiply values. An entry is removed with its tensor."""

    def __init__(self) -> None:
        self.results: Any = WeakTensorKeyDictionary()
        self.lost: Any = WeakTensorKeyDictionary()
        self.scaled: Any = WeakTensorKeyDictionary()
        self.random: Any = WeakTensorKeyDictionary()
        self.ids: set[int] = set()
        """of all tensors that were ever tracked: a fast test that nearly all tensors fail"""
        self.softmaxes: list[Softmax] = []
        self.exponentials: list[Softmax] = []
        self.multiplied: list[Softmax] = []
        """exp(x) whose sum was computed, and exp(x) that was multiplied: a softmax if it is divided by the sum later"""
        self.path = ""
        """the module that is running"""

    def __len__(self) -> int:
        return len(self.results)

    @property
    def has_started(self) -> bool:
        return bool(self.ids)

    def unresolved(self) -> list[Softmax]:
        sums = {softmax.shape for softmax in self.exponentials}
        divided_later = [x for x in self.multiplied if x not in self.softmaxes and x.shape in sums]
        return [*divided_later, *(softmax for softmax in self.softmaxes if softmax.is_unresolved)]

    def get(self, x: Any) -> SoftmaxResult | None:
        return self.results.get(x) if id(x) in self.ids and isinstance(x, Tensor) else None

    def get_lost(self, x: Any) -> Lost | None:
        return self.lost.get(x) if id(x) in self.ids and isinstance(x, Tensor) else None

    def get_scaled(self, x: Any) -> ScaledValues | None:
        return self.scaled.get(x) if id(x) in self.ids and isinstance(x, Tensor) else None

    def is_product_of_softmaxes(self, args: Any) -> bool:
        """Whether all operands came from softmaxes, as in an iterated inverse: values may still follow."""
        operands = [x for x in flat(args, {}) if isinstance(x, Tensor)]
        return all(id(x) in self.ids and (x in self.results or x in self.lost) for x in operands)

    def put(self, table: Any, x: Tensor, entry: Any) -> None:
        for other in (self.results, self.lost, self.scaled):
            if other is not table:
                other.pop(x, None)
        table[x] = entry
        self.ids.add(id(x))

    # Where tracking begins

    def start(self, out: Any, args: Any, kwargs: Any, name: str = "softmax") -> None:
        """Track the output of one of STARTS."""
        if not isinstance(out, Tensor) or not out.is_floating_point():
            return
        source = args[0] if args else next(iter(kwargs.values()), None)
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
        if name in ("exp", "exp_"):
            self.start_exp(out, self.get(source))
        elif name == "logsumexp" and isinstance(dim, int) and isinstance(source, Tensor):
            self.put(self.results, out, SoftmaxResult(dim % source.dim(), source.shape, stage="logsumexp"))
        elif name in ("sigmoid", "sigmoid_") and out.dim() > 2:
            self.add(out, out.dim() - 1, "sigmoid", "sigmoid")
        elif isinstance(dim, int) and out.dim() > 1:
            self.add(out, dim % out.dim(), name, "log weights" if name in LOG_SOFTMAXES else "weights")

    def start_exp(self, out: Tensor, source: SoftmaxResult | None) -> None:
        if source is not None and source.stage in ("log weights", "x - logsumexp"):
            self.add(out, source.axis, "exp", "weights")
        elif out.dim() > 1 and source is None:
            softmax = Softmax(self.path, "exp", tuple(out.shape))  # not yet known to be one
            self.put(self.results, out, SoftmaxResult(-1, out.shape, softmaxes=(softmax,), stage="exp"))

    def add(self, out: Tensor, axis: int, operation: str, stage: Stage) -> None:
        softmax = Softmax(self.path, operation, tuple(out.shape))
        self.softmaxes.append(softmax)
        self.put(self.results, out, SoftmaxResult(axis, out.shape, softmaxes=(softmax,), stage=stage))

    def start_random(self, out: Any) -> None:
        if isinstance(out, Tensor):
            self.random[out] = True
            self.ids.add(id(out))

    # Each step of the model

    def call(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """func(*args, **kwargs), whose output is tracked if one of its arguments is."""
        sources = self.sources(args, kwargs)
        if not sources:
            out = func(*args, **kwargs)
            self.follow(name, func, args, kwargs, out)
            return out
        source, result = sources[0]
        rate = self.dropout(name, source, args, kwargs) if result.stage in ("weights", "sigmoid") else 0.0
        undropped = result.before_dropout(source)
        if rate and undropped is source and is_in_place(name, args, kwargs):
            undropped = source.clone()
        out = func(*args, **kwargs)
        if rate:
            self.put(self.results, out, replace(result, undropped=undropped, dropout=rate))
        else:
            self.follow(name, func, args, kwargs, out)
        return out

    def sources(self, args: Any, kwargs: Any) -> list[tuple[Tensor, SoftmaxResult]]:
        """The tracked arguments of a call, weights first: a sigmoid that they are multiplied with is only a gate."""
        found = [(x, result) for x in flat(args, kwargs) if (result := self.get(x)) is not None]
        return found if len(found) < 2 else sorted(found, key=lambda pair: pair[1].stage == "sigmoid")

    def follow(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> None:
        """Track or mark the output of a step that is neither dropout nor a weighted sum."""
        tensors = [x for x in flat(args, kwargs) if id(x) in self.ids and isinstance(x, Tensor)]
        if not tensors:
            return
        if sources := self.sources(args, kwargs):
            self.track(name, func, sources, args, kwargs, out)
        for x in tensors:
            if x in self.random and name in MASK_STEPS:
                self.start_random(out)
            if (lost := self.lost.get(x)) is not None:
                self.mark(name, lost, x, out, args)
            if x in self.scaled and is_view(name, args):
                self.lose(name, self.scaled[x].result.softmaxes, out, args, is_scaled=True)

    def track(
        self, name: str, func: Any, sources: list[tuple[Tensor, SoftmaxResult]], args: Any, kwargs: Any, out: Any
    ) -> None:
        """Track the outputs of a step without dropout, where the softmax axis is still one axis."""
        source, result = sources[0]
        if result.stage not in ("weights", "sigmoid"):
            self.track_early(name, sources, args, kwargs, out)
            return
        target = args[0] if name == "__setitem__" else out
        softmaxes = tuple(dict.fromkeys(softmax for _, other in sources for softmax in other.softmaxes))
        if result.stage == "sigmoid" and is_gate(name, source, args):
            return
        if is_weighting(name, source, args, out):
            values = args[1] if args[0] is source else args[0]
            axis = out.dim() - source.dim() + result.axis
            self.put(self.scaled, out, ScaledValues(result.before_dropout(source), values, result, axis))
            return
        axes = axes_after(name, func, source, result.axis, args, kwargs, target)
        if axes is None:
            if name not in SUMS and result.stage != "sigmoid" and not (result.is_gate and name == "linear"):
                self.lose(name, softmaxes, target, args)
            return
        undropped = self.undropped_outputs(name, func, source, result, args, kwargs)
        for i, (x, axis) in enumerate(zip(flat((target,), {}), axes, strict=False)):
            if axis is None:
                is_gate_of_features = result.is_gate and name == "linear"
                if name not in SUMS and result.stage != "sigmoid" and not is_gate_of_features:
                    self.lose(name, softmaxes, x, args)
            else:
                is_partial = result.is_partial or x.shape[axis] != source.shape[result.axis]
                factor = dense_factor(name, source, args, kwargs) or (result.factor if name in CASTS else None)
                entry = replace(result, axis=axis, softmaxes=softmaxes, is_partial=is_partial, factor=factor)
                entry = replace(entry, is_gate=result.is_gate or factor is not None)
                self.put(self.results, x, replace(entry, undropped=None if undropped is None else undropped[i]))

    def undropped_outputs(
        self, name: str, func: Any, source: Tensor, result: SoftmaxResult, args: Any, kwargs: Any
    ) -> list[Tensor] | None:
        """The same step for the tensor without dropout."""
        if result.undropped is None or name in DROPOUTS:
            return None if result.undropped is None else [result.undropped]
        replacement = result.undropped.clone() if is_in_place(name, args, kwargs) else result.undropped
        out = call_with(func, source, replacement, args, kwargs)
        return [replacement] if name == "__setitem__" else list(flat((out,), {}))

    def track_early(
        self, name: str, sources: list[tuple[Tensor, SoftmaxResult]], args: Any, kwargs: Any, out: Any
    ) -> None:
        """The steps from log_softmax, exp or logsumexp to weights."""
        if not isinstance(out, Tensor) or not out.is_floating_point():
            return
        (source, result), stages = sources[0], [other.stage for _, other in sources]
        if name in SUBTRACTIONS and result.stage == "logsumexp" and args[0] is not source:
            self.put(self.results, out, replace(result, stage="x - logsumexp"))
        elif name in DIVISIONS and stages[:2] == ["exp", "sum of exp"] and args[0] is source:
            total = sources[1][1]
            if result.original_shape == total.original_shape and source.dim() == out.dim():
                softmax = result.softmaxes[0]
                if softmax not in self.softmaxes:
                    self.softmaxes.append(softmax)
                self.put(self.results, out, replace(result, stage="weights", axis=total.axis, original_shape=out.shape))
        elif name == "sum" and result.stage == "exp":
            axes = reduced_axes(name, source, None, args, kwargs)
            if len(axes) == 1:
                self.exponentials.append(result.softmaxes[0])
                self.put(self.results, out, replace(result, stage="sum of exp", axis=axes[0]))
        elif name in ELEMENTWISE | SHAPE_OPS and (result.stage != "exp" or out.shape == source.shape):
            self.put(self.results, out, result)
        elif result.stage == "exp" and name in PRODUCT_NAMES:  # to be divided by the sum afterwards
            result.softmaxes[0].lost_at = f"{name} before the division by the sum"
            self.multiplied.append(result.softmaxes[0])

    def mark(self, name: str, lost: Lost, source: Tensor, out: Any, args: Any) -> None:
        """The next step of a tensor whose exact weights are lost."""
        if name in PRODUCT_NAMES and self.is_product_of_softmaxes(args):
            self.lose(name, lost.softmaxes, out, args)
        elif name in PRODUCT_NAMES or (lost.is_scaled and name == "sum"):
            for softmax in lost.softmaxes:
                softmax.is_multiplied = True
        elif name in MULTIPLICATIONS and isinstance(out, Tensor) and out.numel() > source.numel():
            if not any(softmax.lost_at in SELECTIONS for softmax in lost.softmaxes) and not lost.is_scaled:
                self.lose(name, lost.softmaxes, out, args, is_scaled=True)
        elif not lost.is_scaled or is_view(name, args):
            self.lose(name, lost.softmaxes, args[0] if name == "__setitem__" else out, args, lost.is_scaled)

    def lose(self, name: str, softmaxes: tuple[Softmax, ...], out: Any, args: Any, is_scaled: bool = False) -> None:
        """From here on, the tensor is only marked. Writing into a view marks the tensor that it is a view of."""
        is_product = name in PRODUCT_NAMES and not self.is_product_of_softmaxes(args)
        for softmax in softmaxes:
            softmax.lost_at = softmax.lost_at or name
            softmax.is_multiplied = softmax.is_multiplied or is_product
        for x in flat((out,), {}):
            if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
                known = self.get_lost(x)
                merged = softmaxes + known.softmaxes if known else softmaxes
                self.put(self.lost, x, Lost(tuple(dict.fromkeys(merged)), is_scaled))
                base = x._base if not x.is_inference() else None
                if base is not None and args and x is args[0]:
                    self.put(self.lost, base, Lost(softmaxes, is_scaled))

    def dropout(self, name: str, source: Tensor, args: Any, kwargs: Any) -> float:
        """The rate of dropout in this step: a dropout call, a product with its mask, or a mask of random numbers."""
        rate = dropout_rate(name, source, args, kwargs)
        if rate or not self.random or name not in MULTIPLICATIONS | {"masked_fill", "masked_fill_", "where"}:
            return rate
        mask = next((x for x in flat(args, kwargs) if isinstance(x, Tensor) and x in self.random), None)
        if mask is None or mask is source:
            return 0.0
        return float((mask.bool() if "fill" in name else mask == 0).float().mean())


PRODUCT_NAMES = {
    *("matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "mv", "dot", "inner", "einsum", "tensordot", "vecdot"),
    *("baddbmm", "addbmm", "addmm", "addmv", "linear", "conv1d", "conv2d", "bilinear", "chain_matmul", "multi_dot"),
    *("baddbmm_", "addbmm_", "addmm_", "addmv_"),
}
"""operations that multiply and sum"""
