"""Capture every attention call of a forward pass, without changing the model or its kernels.

Three kinds of torch calls are attention: scaled_dot_product_attention; the function behind nn.MultiheadAttention, whose
body runs so that the calls inside it are seen; and a softmax whose result multiplies values (insight/softmaxes.py).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.insight.calls import AttentionCall, Layout, SDPACall, SoftmaxCall, einsum_layout, matmul_layout
from clearhead.insight.softmaxes import SOFTMAXES, TRACKED, SoftmaxTracker
from clearhead.interception import (
    MATMULS,
    MULTI_HEAD_ATTENTION,
    SDPA,
    Intercept,
    ModuleStack,
    argument,
    intercept,
    without_dispatch,
    without_wrappers,
)

ATTENTION = {SDPA, MULTI_HEAD_ATTENTION} | SOFTMAXES
LOOKED_FOR = f"{SDPA}, {MULTI_HEAD_ATTENTION}, and a softmax whose result multiplies values (matmul, bmm, @, einsum)"

Receive = Callable[[str, AttentionCall, str, str], Tensor]
"""(name, call, kernel, note) -> the output that the model continues with"""


@contextmanager
def capture_attention(model: nn.Module, receive: Receive) -> Iterator["Capture"]:
    """Inside the block, every attention call of the model is passed to `receive`; on exit the model is restored."""
    capture = Capture(model, receive, torch.backends.mha.get_fastpath_enabled())
    names = ATTENTION | TRACKED | MATMULS | {"einsum"}
    with intercept(capture.stack, capture.handle, names) as mode:
        capture.mode = mode
        yield capture


class Capture:
    """Recognizes attention among the torch calls of a model. A call is named after the innermost running module."""

    def __init__(self, model: nn.Module, receive: Receive, fast_path: bool):
        self.stack, self.receive, self.fast_path = ModuleStack(model), receive, fast_path
        self.tracker = SoftmaxTracker()
        self.torch_nn: list[tuple[int, bool]] = []  # nn.MultiheadAttention: heads, whether the fast path was possible
        self.counts: Counter[str] = Counter()  # attention calls of each module in this pass
        self.counted_pass = 0
        self.mode: Intercept | None = None

    def handle(self, name: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if not self.stack.running:
            return func(*args, **kwargs)
        if name == SDPA:
            return self.on_sdpa(func, *args, **kwargs)
        if name == MULTI_HEAD_ATTENTION:
            return self.on_torch_nn(func, args, kwargs)  # type: ignore[arg-type]
        if name in SOFTMAXES:
            out = func(*args, **kwargs)
            self.tracker.start(out, args, kwargs)
            return out
        if not self.tracker.has_started:  # by far the most frequent case
            return func(*args, **kwargs)
        if name in TRACKED:
            return self.tracker.call(name, func, args, kwargs)
        out = func(*args, **kwargs)
        return self.on_matmul(name, args, kwargs, out) if name in MATMULS else self.on_einsum(func, args, kwargs, out)

    def on_sdpa(
        self,
        func: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        options = {} if not enable_gqa else {"enable_gqa": True}
        out = func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options)
        if query.is_nested:
            return out
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        return self.report(SDPACall(query, key, value, attn_mask, dropout_p, is_causal, scale, out), "sdpa")

    def on_torch_nn(self, func: FunctionType, args: Any, kwargs: dict[str, Any]) -> Any:
        query, key, value, _, num_heads = args[:5]
        could_be_fast = (
            self.fast_path and query is key and key is value and has_fast_path(self.stack.running[-1].module)
        )
        self.torch_nn.append((num_heads, could_be_fast))
        try:
            assert self.mode is not None
            with self.mode:  # it is switched off while this handler runs
                return without_dispatch(func)(*args, **kwargs)
        finally:
            self.torch_nn.pop()

    def on_matmul(self, name: str, args: Any, kwargs: dict[str, Any], out: Tensor) -> Tensor:
        operands = [argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "other", "mat2")]
        if name == "__rmatmul__":
            operands.reverse()
        for i, weights in enumerate(operands):
            values, result = operands[1 - i], self.tracker.get(weights)
            if result is None or result.axis != weights.dim() - 1 - i:
                continue
            num_axes = max(weights.dim(), values.dim())
            merged_heads = (result.merged_heads(weights.shape) or self.merged_heads()) if num_axes == 3 else 0
            layout = matmul_layout(num_axes, values.dim(), i == 0, merged_heads)
            if layout is not None:
                undropped = result.before_dropout(weights)[(None,) * (num_axes - weights.dim())]
                return self.on_weighted_sum(undropped, values, layout, result.dropout, out)
        return out

    def on_einsum(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], out: Tensor) -> Tensor:
        equation, *operands = args
        if len(operands) == 1 and isinstance(operands[0], list | tuple):
            operands = list(operands[0])
        if not isinstance(equation, str) or len(operands) != 2:
            return out
        for i, weights in enumerate(operands):
            values, result = operands[1 - i], self.tracker.get(weights)
            if result is None:
                continue
            layout = einsum_layout(equation, i == 0, weights.dim(), values.dim())
            if layout is not None and layout.weights.index(layout.keys) == result.axis:
                return self.on_weighted_sum(result.before_dropout(weights), values, layout, result.dropout, out)
            self.tracker.track("einsum", func, weights, args, kwargs, out)
        return out

    def on_weighted_sum(self, weights: Tensor, values: Tensor, layout: Layout, dropout: float, out: Tensor) -> Tensor:
        return self.report(SoftmaxCall(weights, values, layout, dropout, out), "softmax")

    def merged_heads(self) -> int:
        """The number of heads where nn.MultiheadAttention merges batch and heads into one axis; 0 elsewhere."""
        if self.torch_nn:
            return self.torch_nn[-1][0]
        module = self.stack.running[-1].module
        return module.num_heads if isinstance(module, nn.MultiheadAttention) else 0

    def report(self, call: AttentionCall, kernel: str) -> Tensor:
        notes = []
        if self.stack.running[-1].is_compiled:
            notes.append("compiled, ran eagerly")
        if self.torch_nn:
            kernel = "nn.MultiheadAttention"
            if self.torch_nn[-1][1]:
                notes.append("without its fast path")
        if call.dropout:
            notes.append(f"dropout {call.dropout:g}, not verified")
        return self.receive(self.next_name(), call, kernel, "; ".join(notes))

    def next_name(self) -> str:
        """The path of the innermost running module; with #2, #3 and so on from its second attention call in a pass."""
        if self.counted_pass != self.stack.num_passes:
            self.counts.clear()
            self.counted_pass = self.stack.num_passes
        innermost = self.stack.running[-1]
        path = innermost.path or type(innermost.module).__name__
        self.counts[path] += 1
        return path if self.counts[path] == 1 else f"{path}#{self.counts[path]}"


def has_fast_path(module: nn.Module) -> bool:
    """Whether torch.nn would run this module as a single fused call, according to its main conditions."""
    if not isinstance(module, nn.MultiheadAttention) or module.training or not module.batch_first:
        return False
    return not (torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()))


def module_names(model: nn.Module) -> list[str]:
    """The path of every module; the model itself has the name of its class."""
    return [without_wrappers(path) or type(module).__name__ for path, module in model.named_modules()]


def unknown_name(name: str, known: Iterable[str], kind: str = "attention") -> LookupError:
    """The error for a name that does not exist: the most similar name, if there is one, and a list of all."""
    known = list(known)
    nearest = get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return LookupError(f"no {kind} named {name!r}; {hint}known names: {join_names(known)}")


def join_names(names: list[str], limit: int = 60) -> str:
    text = ", ".join(names[:limit]) or "none"
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more"
