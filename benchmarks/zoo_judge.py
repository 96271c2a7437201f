"""An independent judge of `look`: what attention really ran, recorded below Python functions, at the dispatcher.

    with Judge() as judge:
        model(images)
    judge.attention()      # one event for each softmax that was multiplied with values, and for each fused kernel

The judge shares no code with `look`. It marks the memory of every softmax result, follows the mark through all
operations of aten, and notes the matrix products that a marked tensor takes part in. A softmax that is never
multiplied with anything, as in a classifier or in a router of experts, is not attention.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
SOFTMAXES = {aten._softmax, aten._safe_softmax, aten._log_softmax}
FUSED = {
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
}
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot"}
LAYERS = {"mm", "addmm"}
"""what a linear layer is at the dispatcher"""
MULTIPLICATIONS = {"mul", "mul_"}
SELECTIONS = {"topk", "sort", "scatter", "scatter_", "index_put", "index_put_", "gather", "one_hot", "index"}
"""steps of a router: afterwards the weights belong to experts, not to tokens"""
VIEWS = {
    "view",
    "_unsafe_view",
    "reshape",
    "permute",
    "transpose",
    "unsqueeze",
    "squeeze",
    "expand",
    "clone",
    "_to_copy",
}
MAX_PRODUCTS = 2
"""a softmax may first be multiplied with a matrix that mixes heads"""


@dataclass(eq=False)
class Event:
    """A softmax or a fused kernel, and the memory of everything that it was multiplied into."""

    kind: str
    shape: tuple[int, ...]
    products: set[int] = field(default_factory=set)
    is_attention: bool = False


@dataclass(frozen=True)
class Mark:
    event: Event
    num_products: int = 0
    is_selected: bool = False
    is_gated: bool = False
    """multiplied elementwise with a tensor of the same size: weights of features, unless a matrix product follows"""
    is_scaled_values: bool = False
    """weights * values, before the sum over keys"""


class Judge(TorchDispatchMode):
    supports_higher_order_operators = True  # flex_attention

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.marks: dict[int, list[Mark]] = {}
        self.exponentials: dict[int, int] = {}  # memory of exp(x), and of its sum: memory of exp(x)
        self.kept: list[Tensor] = []  # marked memory must not be used again

    def attention(self) -> list[Event]:
        return [event for event in self.events if event.is_attention]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        with suppress(NotImplementedError, RuntimeError):  # a tensor without memory of its own
            self.observe(func, args, kwargs or {}, out)
        return out

    def observe(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = getattr(getattr(func, "overloadpacket", func), "__name__", str(func))
        outs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if name in FUSED or "flex_attention" in name:
            self.add(Event(name.strip("_"), tuple(args[0].shape), {memory(outs[0])}, True), outs[0], mark=False)
            return
        if getattr(func, "overloadpacket", None) in SOFTMAXES:
            self.add(Event("softmax", tuple(outs[0].shape)), outs[0])
            return
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self.observe_exponentials(name, inputs, outs)
        marked = [(x, mark) for x in inputs for mark in self.marks.get(memory(x), [])]
        if marked and outs:
            self.follow(name, marked, inputs, outs, args, kwargs)

    def follow(
        self,
        name: str,
        marked: list[tuple[Tensor, Mark]],
        inputs: list[Tensor],
        outs: list[Tensor],
        args: Any,
        kwargs: Any,
    ) -> None:
        for x, mark in marked:
            event = mark.event
            if mark.is_scaled_values:
                if name == "sum":
                    event.is_attention = True
                    event.products |= {memory(out) for out in outs}
                    self.kept += outs
                elif name in VIEWS:
                    self.set_mark(outs, mark)
            elif name in PRODUCTS and not (mark.is_gated and name in LAYERS):
                event.is_attention = event.is_attention or mark.num_products == 0
                event.products |= {memory(out) for out in outs}
                if mark.num_products + 1 < MAX_PRODUCTS:
                    self.set_mark(outs, Mark(event, mark.num_products + 1, mark.is_selected))
            elif name in MULTIPLICATIONS and outs[0].numel() > x.numel():
                if not mark.is_selected and mark.num_products == 0:
                    self.set_mark(outs, Mark(event, is_scaled_values=True))
            elif name in MULTIPLICATIONS and is_dense(x, inputs):
                self.set_mark(outs, Mark(event, is_scaled_values=True))
                self.set_mark(outs, Mark(event, mark.num_products, mark.is_selected, True))
            else:
                outs = outs if mark.num_products == 0 else [out for out in outs if out.numel() == x.numel()]
                self.set_mark(
                    outs, Mark(event, mark.num_products, mark.is_selected or name in SELECTIONS, mark.is_gated)
                )

    def observe_exponentials(self, name: str, inputs: list[Tensor], outs: list[Tensor]) -> None:
        """exp(x) / exp(x).sum(), and exp(x - logsumexp(x)), are softmaxes too."""
        if name in ("exp", "exp_"):
            if self.exponentials.get(memory(inputs[0])) == -1:
                self.add(Event("exp", tuple(outs[0].shape)), outs[0])
            else:
                self.set_exponential(outs[0], memory(outs[0]))
        elif name == "logsumexp":
            self.set_exponential(outs[0], -1)
        elif name in ("sub", "sub_", "sum") or (len(inputs) == 1 and len(outs) == 1 and name != "log"):
            for x in inputs:
                if (source := self.exponentials.get(memory(x))) is not None:
                    self.set_exponential(outs[0], source)
        elif name in ("div", "div_") and len(inputs) == 2:
            sources = {self.exponentials.get(memory(x)) for x in inputs}
            if len(sources) == 1 and None not in sources and inputs[0].numel() > inputs[1].numel():
                self.add(Event("exp", tuple(outs[0].shape)), outs[0])

    def set_exponential(self, x: Tensor, source: int) -> None:
        self.exponentials[memory(x)] = source
        self.kept.append(x)

    def add(self, event: Event, out: Tensor, mark: bool = True) -> None:
        self.events.append(event)
        self.kept.append(out)
        if mark:
            self.set_mark([out], Mark(event))

    def set_mark(self, outs: list[Tensor], mark: Mark) -> None:
        for out in outs:
            if out.is_floating_point():
                self.kept.append(out)
                marks = self.marks.setdefault(memory(out), [])
                if mark not in marks:
                    marks.append(mark)


def is_dense(x: Tensor, inputs: list[Tensor]) -> bool:
    """Whether x is multiplied with a tensor of its own size that is no mask of 0 and 1."""
    others = [other for other in inputs if other is not x and other.numel() == x.numel() > 1]
    return any(bool(((other != 0) & (other != 1)).any()) and other.unique().numel() > 2 for other in others)


def memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
