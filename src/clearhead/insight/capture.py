"""Where in a model a call happens: the path of the innermost module that is running.

A stack of the modules that are running is kept by a `forward` of their own, which they have only as long as the `with`
block. Hooks would do as well, but where there are any torch lets go of inputs and outputs later, and the pass takes
1.15 times as long.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from functools import wraps
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from clearhead.insight.calls import AttentionCall, Layout, SDPACall, SoftmaxCall, einsum_layout, matmul_layout
from clearhead.insight.softmaxes import FOLLOWED, SOFTMAXES, SoftmaxTracker, argument


class ModuleFrame(NamedTuple):
    path: str
    module: nn.Module
    is_compiled: bool


class ModuleStack:
    """The stack of running modules, and how often each name was given in this pass."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.inside: list[ModuleFrame] = []
        self.given: Counter[str] = Counter()
        self.n_passes = 0

    @contextmanager
    def followed(self) -> Iterator[None]:
        before: list[tuple[nn.Module, dict[str, Any]]] = []
        try:
            for name, module in self.model.named_modules():
                if isinstance(module, torch.jit.ScriptModule):
                    continue  # its forward cannot be replaced, and shows nothing of what happens inside it
                path = without_wrappers(name) or type(module).__name__
                before.append((module, {key: value for key, value in vars(module).items() if key == "forward"}))
                vars(module)["forward"] = self.wrap_forward(path, module)
            yield
        finally:
            for module, own in before:
                del vars(module)["forward"]
                vars(module).update(own)

    def wrap_forward(self, path: str, module: nn.Module) -> Callable[..., Any]:
        """The module's forward, on the stack while it runs, and off it also when it raises."""
        forward, compiled = module.forward, is_compiled(module)

        @wraps(forward)
        def wrap_forward(*args: Any, **kwargs: Any) -> Any:
            if not self.inside:
                self.given.clear()
                self.n_passes += 1
            outer = bool(self.inside) and self.inside[-1].is_compiled
            self.inside.append(ModuleFrame(path, module, compiled or outer))
            try:
                return forward(*args, **kwargs)
            finally:
                self.inside.pop()

        return wrap_forward

    def next_name(self) -> str:
        """The path of the innermost running module; the second time in one pass with #2, and so on."""
        path = self.inside[-1].path
        self.given[path] += 1
        return path if self.given[path] == 1 else f"{path}#{self.given[path]}"


def is_compiled(module: nn.Module) -> bool:
    """By module.compile(), or the wrapper that torch.compile(module) returns."""
    return getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules


def without_wrappers(name: str) -> str:
    """A compiled model has the names of the model that was compiled."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def paths_of(model: nn.Module) -> list[str]:
    return [without_wrappers(name) or type(module).__name__ for name, module in model.named_modules()]


def unknown(name: str, known: Iterable[str], what: str = "attention") -> LookupError:
    """The error for a name that is not there: the nearest ones if any are near, and all that there are."""
    known = list(known)
    nearest = get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return LookupError(f"no {what} at {name!r}; {hint}there is {listed(known)}")


def listed(names: list[str], most: int = 60) -> str:
    shown = ", ".join(names[:most]) or "none"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


# Sees every attention of a forward pass, while the model and its kernels stay as they are.
#
# A TorchFunctionMode is told of every call of torch inside the `with` block. Three kinds are attention: the fused
# kernel;
# torch.nn's multi_head_attention_forward, which is run so that the calls inside it are seen; and a softmax whose
# result
# multiplies values. What makes no such calls (compiled modules, torch.nn's fast path) runs eagerly meanwhile.


KERNEL = "scaled_dot_product_attention"
TORCH_NN = "multi_head_attention_forward"
ATTENTION = {KERNEL, TORCH_NN} | SOFTMAXES
PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "mm"}
LOOKED_FOR = f"{KERNEL}, {TORCH_NN}, and a softmax whose result multiplies values (matmul, bmm, @, einsum)"

Receive = Callable[[str, AttentionCall, str, str], Tensor]
"""name, call, kernel, note -> the output that the model gets"""


class Capture(TorchFunctionMode):
    def __init__(self, model: nn.Module, receive: Receive, fast_path: bool):
        super().__init__()
        self.stack, self.receive, self.trails, self.fast_path = (
            ModuleStack(model),
            receive,
            SoftmaxTracker(),
            fast_path,
        )
        self.torch_nn: list[tuple[int, bool]] = []  # heads, and whether it could have taken the fast path

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ATTENTION and self.stack.inside:
            if name == KERNEL:
                return self.fused(func, *args, **kwargs)
            if name == TORCH_NN:
                return self.inside_torch_nn(func, args, kwargs)
            out = func(*args, **kwargs)
            self.trails.start(out, args, kwargs)
            return out
        if not self.trails.is_started or not self.stack.inside:  # the most frequent case by far
            return func(*args, **kwargs)
        if name == "__get__":  # x.mT is a property
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in FOLLOWED:
            return self.trails.follow(name, func, args, kwargs)
        out = func(*args, **kwargs)
        if name in PRODUCTS:
            return self.product(name, args, kwargs, out)
        if name == "einsum":
            return self.einsum(func, args, kwargs, out)
        return out

    def fused(
        self,
        func: Any,
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
        return self.seen(SDPACall(query, key, value, attn_mask, dropout_p, is_causal, scale, out), "sdpa")

    def inside_torch_nn(self, func: FunctionType, args: Any, kwargs: Any) -> Any:
        query, key, value, _, num_heads = args[:5]
        module = self.stack.inside[-1].module
        could_be_fast = self.fast_path and query is key and key is value and has_fast_path(module)
        self.torch_nn.append((num_heads, could_be_fast))
        try:
            with self:
                return without_dispatch(func)(*args, **kwargs)
        finally:
            self.torch_nn.pop()

    def product(self, name: str, args: Any, kwargs: Any, out: Tensor) -> Tensor:
        operands = [argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "other", "mat2")]
        if name == "__rmatmul__":
            operands.reverse()
        for i, weights in enumerate(operands):
            values, trail = operands[1 - i], self.trails.of(weights)
            if trail is None or trail.axis != weights.dim() - 1 - i:
                continue
            n_axes = max(weights.dim(), values.dim())
            n_joined = (trail.n_joined(weights.shape) or self.n_joined()) if n_axes == 3 else 0
            layout = matmul_layout(n_axes, values.dim(), i == 0, n_joined)
            if layout is not None:
                twin = trail.before_dropout(weights)[(None,) * (n_axes - weights.dim())]
                return self.written(twin, values, layout, trail.dropout, out)
        return out

    def einsum(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Tensor:
        equation, *operands = args
        if len(operands) == 1 and isinstance(operands[0], list | tuple):
            operands = list(operands[0])
        if not isinstance(equation, str) or len(operands) != 2:
            return out
        for i, weights in enumerate(operands):
            values, trail = operands[1 - i], self.trails.of(weights)
            layout = None if trail is None else einsum_layout(equation, i == 0, weights.dim(), values.dim())
            if trail is not None and layout is not None and layout.weights.index(layout.keys) == trail.axis:
                return self.written(trail.before_dropout(weights), values, layout, trail.dropout, out)
            if trail is not None:
                self.trails.go_on("einsum", func, weights, args, kwargs, out)
        return out

    def written(self, weights: Tensor, values: Tensor, layout: Layout, dropout: float, out: Tensor) -> Tensor:
        return self.seen(SoftmaxCall(weights, values, layout, dropout, out), "softmax")

    def n_joined(self) -> int:
        """torch.nn joins batch and heads in one axis where it writes its own softmax."""
        if self.torch_nn:
            return self.torch_nn[-1][0]
        module = self.stack.inside[-1].module
        return module.num_heads if isinstance(module, nn.MultiheadAttention) else 0

    def seen(self, call: AttentionCall, kernel: str) -> Tensor:
        notes = []
        if self.stack.inside[-1].is_compiled:
            notes.append("compiled, ran eagerly")
        if self.torch_nn:
            kernel = "nn.MultiheadAttention"
            if self.torch_nn[-1][1]:
                notes.append("without its fast path")
        if call.dropout:
            notes.append(f"dropout {call.dropout:g}, not verified")
        return self.receive(self.stack.next_name(), call, kernel, "; ".join(notes))


@contextmanager
def captured(model: nn.Module, receive: Receive) -> Iterator[Capture]:
    """Every attention of model inside the block goes to `receive`; modules and switches are as before afterwards."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    capture = Capture(model, receive, fast_path)
    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        torch.backends.mha.set_fastpath_enabled(False)
        if "torch._dynamo" in sys.modules:  # as long as it is not loaded, nothing is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(capture.stack.followed())
        stack.enter_context(capture)
        yield capture


def has_fast_path(module: nn.Module) -> bool:
    """Whether torch.nn would run this one by a single fused call, by the main conditions that it names."""
    if not isinstance(module, nn.MultiheadAttention) or module.training or not module.batch_first:
        return False
    return not (torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()))


def without_dispatch(function: FunctionType) -> FunctionType:
    """The same function without its first step, which is to hand itself over to a mode like ours as a whole."""
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    same = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    same.__kwdefaults__ = function.__kwdefaults__
    return same
