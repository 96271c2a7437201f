"""Capture every attention call of a forward pass, without changing the model or its kernels.

Three kinds of torch calls are attention: scaled_dot_product_attention; the function behind nn.MultiheadAttention, whose
body runs so that the calls inside it are seen; and a softmax whose result multiplies values: insight/softmaxes.py
follows the result, and insight/products.py recognizes the weighted sum. What cannot be followed is `Unresolved`.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias
from torch.utils._python_dispatch import TorchDispatchMode

from clearhead.insight.calls import AttentionCall, SDPACall, SoftmaxCall
from clearhead.insight.products import find_weighted_sum
from clearhead.insight.softmaxes import PRODUCT_NAMES, RANDOM, STARTS, SoftmaxTracker
from clearhead.interception import (
    MULTI_HEAD_ATTENTION,
    SDPA,
    Intercept,
    ModuleStack,
    argument,
    intercept,
    without_dispatch,
    without_wrappers,
)

NESTED = "scaled_dot_product_attention of nested tensors"
LOOKED_FOR = f"{SDPA}, {MULTI_HEAD_ATTENTION}, and a softmax whose result multiplies values (matmul, einsum, sum)"
ALWAYS = {SDPA, MULTI_HEAD_ATTENTION, "flex_attention"} | STARTS | RANDOM
"""the functions that are intercepted from the start; every function is, from the first softmax on"""
METADATA = {
    *("dim", "size", "shape", "dtype", "device", "numel", "stride", "is_floating_point", "requires_grad", "__len__"),
    *("is_cuda", "is_nested", "ndim", "layout", "grad_fn", "is_contiguous", "data_ptr", "item", "tolist", "_version"),
    *(
        "is_complex",
        "names",
        "is_sparse",
        "is_quantized",
        "is_meta",
        "get_device",
        "storage_offset",
        "_base",
        "ndimension",
    ),
}


@dataclass(frozen=True)
class Unresolved:
    """A softmax or fused kernel of the pass that became no record, and the operation where it was lost."""

    name: str
    """the path of the module that called it"""
    operation: str
    reason: str
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        size = f" {' x '.join(map(str, self.shape))}" if self.shape else ""
        return f"{self.name}: {self.operation}{size}, {self.reason}"


Receive = Callable[[str, AttentionCall, str, str], Tensor]
"""(name, call, kernel, note) -> the output that the model continues with"""


@contextmanager
def capture_attention(model: nn.Module, receive: Receive, count: bool = False) -> Iterator["Capture"]:
    """Inside the block, every attention call of the model is passed to `receive`; on exit the model is restored.

    With `count`, softmaxes and fused kernels that no Python function called, as in scripted code, are unresolved too.
    """
    capture = Capture(model, receive, torch.backends.mha.get_fastpath_enabled())
    with intercept(capture.stack, capture.handle, set(ALWAYS)) as mode:
        capture.mode = mode
        with Counting(capture) if count else nullcontext():
            yield capture


class Counting(TorchDispatchMode):
    """Sees every operator that really runs. One that no intercepted function accounts for is unresolved."""

    supports_higher_order_operators = True  # flex_attention
    KERNELS = "_softmax", "_safe_softmax", "_native_multi_head_attention", "_transformer_encoder_layer_fwd"

    def __init__(self, capture: "Capture"):
        super().__init__()
        self.capture = capture

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2] if isinstance(func, torch._ops.OpOverload) else str(func)
        is_attention = name in self.KERNELS or name.startswith("_scaled_dot_product")
        if is_attention and self.capture.stack.running and not self.capture.is_accounted_for:
            shape = tuple(args[0].shape) if args and isinstance(args[0], Tensor) else ()
            self.capture.give_up(f"aten.{name}", "not called through a Python function (torch.jit?)", shape)
        return func(*args, **(kwargs or {}))


class Capture:
    """Recognizes attention among the torch calls of a model. A call is named after the innermost running module."""

    def __init__(self, model: nn.Module, receive: Receive, fast_path: bool):
        self.stack, self.receive, self.fast_path = ModuleStack(model), receive, fast_path
        self.tracker = SoftmaxTracker()
        self.torch_nn: list[tuple[int, bool]] = []  # nn.MultiheadAttention: heads, whether the fast path was possible
        self.counts: Counter[str] = Counter()  # attention calls of each module in this pass
        self.counted_pass = 0
        self.mode: Intercept | None = None
        self.given_up: list[Unresolved] = []
        self.is_accounted_for = False
        """whether the operators that are running now belong to a call that was recognized"""

    def unresolved(self) -> list[Unresolved]:
        """What became no record, in order of execution within each kind."""
        lost = [
            Unresolved(softmax.path, softmax.operation, f"lost at {softmax.lost_at}", softmax.shape)
            for softmax in self.tracker.unresolved()
        ]
        return [*self.given_up, *lost]

    def give_up(self, operation: str, reason: str, shape: tuple[int, ...] = ()) -> None:
        self.given_up.append(Unresolved(self.path(), operation, reason, shape))

    def handle(self, name: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if name in METADATA or not self.stack.running:
            return func(*args, **kwargs)
        if name == SDPA:
            return self.on_sdpa(func, *args, **kwargs)
        if name == MULTI_HEAD_ATTENTION:
            return self.on_torch_nn(func, args, kwargs)  # type: ignore[arg-type]
        if name == "flex_attention":
            return self.on_flex(func, args, kwargs)
        if name in STARTS:
            return self.on_softmax(name, func, args, kwargs)
        if name in RANDOM:
            out = func(*args, **kwargs)
            self.tracker.start_random(out)
            self.intercept_all()
            return out
        if name in PRODUCT_NAMES or name == "sum":
            return self.on_product(name, func, args, kwargs)
        return self.tracker.call(name, func, args, kwargs)

    def intercept_all(self) -> None:
        if self.mode is not None and self.tracker.has_started:
            self.mode.names = None

    def on_softmax(self, name: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], Tensor) and torch._C._functorch.is_batchedtensor(args[0]):
            raise ValueError("look does not support torch.vmap; call the model with a batch instead")
        self.is_accounted_for = True
        try:
            out = func(*args, **kwargs)
        finally:
            self.is_accounted_for = False
        self.tracker.path = self.path()
        self.tracker.start(out, args, kwargs, name)
        self.intercept_all()
        return out

    def on_product(self, name: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        found = find_weighted_sum(self.tracker, name, args, kwargs, out, self.merged_heads())
        if found is None:
            scaled = self.tracker.get_scaled(argument(args, kwargs, 0, "input"))
            if scaled is not None:
                for softmax in scaled.result.softmaxes:
                    softmax.lost_at, softmax.is_multiplied = softmax.lost_at or name, True
            self.tracker.follow(name, func, args, kwargs, out)
            return out
        for softmax in found.result.softmaxes:
            softmax.is_recorded = True
        if (values := self.tracker.get(found.values)) is not None and values.stage == "weights":
            self.tracker.lose(name, values.softmaxes, out, ())  # the values are weights too
        notes = [] if found.is_normalized_over_keys else ["not normalized over the keys"]
        if found.result.stage == "sigmoid":
            notes = ["sigmoid: rows do not sum to 1"]
        if found.result.is_partial:
            notes.append("some keys of the softmax are left out or added")
        call = SoftmaxCall(
            found.weights, found.values, found.layout, found.result.dropout, found.out, kept_axis=found.kept_axis
        )
        kernel = "sigmoid" if found.result.stage == "sigmoid" else "softmax"
        replaced = self.report(call, kernel, found.out, notes)
        if replaced is found.out:
            return out
        replaced = replaced if found.out is out else out + (replaced - found.out)
        return replaced if kwargs.get("out") is None else kwargs["out"].copy_(replaced)

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
        self.is_accounted_for = True
        try:
            out = func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options)
        finally:
            self.is_accounted_for = False
        if torch._C._functorch.is_batchedtensor(query):
            raise ValueError("look does not support torch.vmap; call the model with a batch instead")
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        if query.is_nested:
            return self.on_nested(query, key, value, is_causal, scale, out)
        if isinstance(attn_mask, CausalBias):  # a subclass of Tensor that has no numbers of its own
            attn_mask = attn_mask._materialize(query.device)
        return self.report(SDPACall(query, key, value, attn_mask, dropout_p, is_causal, scale, out), "sdpa", out)

    def on_nested(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float, out: Tensor
    ) -> Tensor:
        """Sequences of different lengths are recorded with padding, whose weights are 0; they cannot be edited."""
        try:
            q, k, v, padded = (pad_nested(x) for x in (query, key, value, out))
            lengths = [[x.shape[-2] for x in tensor.unbind()] for tensor in (query, key)]
        except (RuntimeError, NotImplementedError, ValueError) as error:
            self.give_up(SDPA, f"nested tensors ({error})")
            return out
        real = [torch.arange(x.shape[-2]) < torch.tensor(n)[:, None] for x, n in zip((q, k), lengths, strict=True)]
        mask = (real[0][:, None, :, None] & real[1][:, None, None, :]).to(q.device)
        if is_causal:
            mask = mask & torch.ones(mask.shape[-2:], dtype=torch.bool, device=q.device).tril()
        call = SDPACall(q, k, v, mask, 0.0, False, scale, padded)
        if self.report(call, "sdpa", padded, ["nested tensors, padded"]) is not padded:
            raise ValueError("attention of nested tensors cannot be edited")
        return out

    def on_flex(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        self.is_accounted_for = True
        try:
            result = func(*args, **kwargs)
        finally:
            self.is_accounted_for = False
        query, key, value, score_mod, block_mask, scale, *_ = args
        out = result[0] if isinstance(result, tuple) else result
        buffers = [tuple(x) for x in args[7:9]]
        if any(buffers) or not callable(block_mask[-1]):
            self.give_up("flex_attention", "its score or mask function captures tensors", tuple(query.shape))
            return result
        call = SDPACall(query, key, value, None, 0.0, False, scale, out, score_mod, block_mask[-1])
        replaced = self.report(call, "flex_attention", out)
        return result if replaced is out else (replaced, *result[1:]) if isinstance(result, tuple) else replaced

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

    def merged_heads(self) -> int:
        """The number of heads where nn.MultiheadAttention merges batch and heads into one axis; 0 elsewhere."""
        if self.torch_nn:
            return self.torch_nn[-1][0]
        module = self.stack.running[-1].module
        return module.num_heads if isinstance(module, nn.MultiheadAttention) else 0

    def report(self, call: AttentionCall, kernel: str, out: Tensor, notes: Iterable[str] = ()) -> Tensor:
        """The output that the model continues with: `out`, unless the receiver replaces it."""
        notes = list(notes)
        if self.stack.running[-1].is_compiled:
            notes.append("compiled, ran eagerly")
        if self.torch_nn:
            kernel = "nn.MultiheadAttention"
            if self.torch_nn[-1][1]:
                notes.append("without its fast path")
        if call.dropout:
            notes.append(f"dropout {call.dropout:g}, not verified")
        received = self.receive(self.next_name(), call, kernel, "; ".join(notes))
        return out if received is call.raw_out else received

    def path(self) -> str:
        innermost = self.stack.running[-1]
        return innermost.path or type(innermost.module).__name__

    def next_name(self) -> str:
        """The path of the innermost running module; with #2, #3 and so on from its second attention call in a pass."""
        if self.counted_pass != self.stack.num_passes:
            self.counts.clear()
            self.counted_pass = self.stack.num_passes
        path = self.path()
        self.counts[path] += 1
        return path if self.counts[path] == 1 else f"{path}#{self.counts[path]}"


def pad_nested(x: Tensor) -> Tensor:
    """(B,H,L,D) with zeros after the end of each sequence."""
    return nn.utils.rnn.pad_sequence([part.transpose(0, 1) for part in x.unbind()], batch_first=True).transpose(1, 2)


def has_fast_path(module: nn.Module) -> bool:
    """Whether torch.nn would run this module as a single fused call, according to its main conditions."""
    if not isinstance(module, nn.MultiheadAttention) or module.training or not module.batch_first:
        return False
    return not (torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()))


def module_names(model: nn.Module) -> list[str]:
    """The path of every module; the model itself has the name of its class."""
    return [without_wrappers(path) or type(module).__name__ for path, module in model.named_modules()]


def module_named(model: nn.Module, name: str) -> nn.Module:
    """The module of a recorded call, whose name may end with #2 for the module's second call."""
    path = name.partition("#")[0]
    return dict(zip(module_names(model), model.modules(), strict=True))[path]


def unknown_name(name: str, known: Iterable[str], kind: str = "attention") -> LookupError:
    """The error for a name that does not exist: the most similar name, if there is one, and a list of all."""
    known = list(known)
    nearest = get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return LookupError(f"no {kind} named {name!r}; {hint}known names: {join_names(known)}")


def join_names(names: list[str], limit: int = 60) -> str:
    text = ", ".join(names[:limit]) or "none"
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more"
