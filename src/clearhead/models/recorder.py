"""Records the tensors of one forward pass of any module, step by step, without changing the module.

A TorchFunctionMode sees every call of torch; hooks on the modules tell where in the model it happens. Of all calls it
keeps the steps that a reader would name: products, norms, activations, sums along the way of the tokens, attention.
nn.MultiheadAttention is one call to torch; its inner tensors are listed from its arguments.
Dims: B batch, L length, Q queries, K keys, H heads, D head width, E model width.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

LAYERS = {
    "linear": "linear",
    "embedding": "its row of the table, per id",
    "conv1d": "convolution",
    "conv2d": "convolution",
    "conv3d": "convolution",
    "layer_norm": "layer norm",
    "rms_norm": "RMS norm",
    "batch_norm": "batch norm",
    "group_norm": "group norm",
    "lstm": "LSTM",
    "gru": "GRU",
}
"""calls that are a whole module's work, and go by its name"""

PRODUCTS = {
    "matmul": "matrix product",
    "baddbmm": "matrix product",
    "addmm": "matrix product",
    "einsum": "matrix product",
    "softmax": "softargmax",
}
"""calls of attention where it is written as its formula"""

ON_THE_WAY = {"add": "sum", "cat": "joined", "gelu": "gelu", "relu": "relu", "silu": "silu"}
"""calls that count when they are done to a tensor that is already written down: other sums are bookkeeping"""

POOLS = {f"max_pool{n}d": "max pooling" for n in (1, 2, 3)} | {f"avg_pool{n}d": "average pooling" for n in (1, 2, 3)}
POOLS |= {f"adaptive_{name}": what for name, what in POOLS.items()}
"""the same, by their own names"""

REDUCTIONS = {"mean": "mean", "amax": "maximum", "max": "maximum", "__getitem__": "selected", "select": "selected"}
"""calls that say what became of a tensor that comes to a module in another shape; without one it was rearranged"""

SAME = {
    "__matmul__": "matmul",
    "__rmatmul__": "matmul",
    "bmm": "matmul",
    "mm": "matmul",
    "add_": "add",
    "__iadd__": "add",
    "relu_": "relu",
}
"""other names of the same calls"""

KERNEL, TORCH_NN = "scaled_dot_product_attention", "multi_head_attention_forward"

COUNTED = {"einsum", "baddbmm", "addmm"}
"""calls whose work torch's own counter knows best"""

TIED, UNUSED = "tied to", "not used in this pass"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorShape:
    """One tensor of a pass: an input, a weight, or the result of a step."""

    name: str
    """where: the path of a parameter or of a module, and what happens there"""
    what: str
    rows: Shape
    """a token is a row: (B,L,E); the weights of attention sum to 1 along each row"""
    columns: Shape
    """a token is a column: (E,L) of one example, a heads dimension of one left out"""
    parameters: int = 0
    multiply_adds: int = 0


def record(
    model: nn.Module, inputs: Mapping[str, Tensor], forward: Callable[[], Any] | None = None
) -> list[TensorShape]:
    """The tensors of model(*inputs), in order, or of the `forward` that calls the model in another way."""
    recorder = Recorder(model, inputs)
    hooks = [
        hook
        for name, module in model.named_modules()
        for hook in (
            module.register_forward_pre_hook(recorder.entering(name, module), with_kwargs=True),
            module.register_forward_hook(recorder.leaving()),
        )
    ]
    try:
        with torch.no_grad(), recorder:
            model(*inputs.values()) if forward is None else forward()
    finally:
        for hook in hooks:
            hook.remove()
    return [*recorder.tensors, *recorder.others(model)]


class Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module, inputs: Mapping[str, Tensor]):
        super().__init__()
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.inside: list[tuple[str, nn.Module]] = []
        self.tensors = [TensorShape(name, "input", tuple(x.shape), as_columns(x)) for name, x in inputs.items()]
        self.known = {id(x): x for x in inputs.values()}  # kept alive, so that no id is given twice
        self.waiting: dict[int, nn.Parameter] = {}  # parameters that were cut or turned, until a step takes them in
        self.counted: set[int] = set()
        self.touched: set[int] = set()
        self.reduction = ""  # the last one since a tensor was written down

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        name = SAME.get(name, name)
        out, work = counted(func, args, kwargs) if name in COUNTED else (func(*args, **kwargs), 0)
        if not self.inside or not isinstance(out, Tensor | tuple | list):  # p.shape and p.device are calls too
            return out
        leaves = tree_leaves((args, kwargs))
        self.waiting |= {id(p): p for p in leaves if isinstance(p, nn.Parameter) and id(p) in self.names}
        self.touched |= set(self.waiting)
        if name == KERNEL:
            q, k, v = (args[i] if i < len(args) else kwargs[key] for i, key in enumerate(("query", "key", "value")))
            self.attention(q, k, v, first_tensor(out))
        elif name == TORCH_NN:
            self.torch_nn(args, kwargs, first_tensor(out))
        elif name in LAYERS | PRODUCTS or (name in ON_THE_WAY | POOLS and any(id(x) in self.known for x in leaves)):
            self.step(name, (*args, *kwargs.values()), first_tensor(out), work)
        elif name in REDUCTIONS:
            self.reduction = REDUCTIONS[name]
        return out

    def step(self, func: str, args: Any, out: Tensor, work: int = 0) -> None:
        owner, parameters = self.take_parameters(func, args)
        word = (LAYERS | PRODUCTS | ON_THE_WAY | POOLS)[func]
        name = owner if func in LAYERS else join(owner, ON_THE_WAY.get(func, func))
        is_heads = func in PRODUCTS and out.dim() > 3
        self.add(name, word, out, as_columns(out, is_heads), parameters, work or multiply_adds(func, args, out))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> None:
        """The kernel's own q, k, v (B,H,L,D) and z; the weights (B,H,Q,K) that it does not show, from the formula."""
        path = self.inside[-1][0]
        for name, what, x in (("q", "queries", q), ("k", "keys", k), ("v", "values", v)):
            self.add(join(path, f"{name}_per_head"), f"{what}, per head", tokens_first(x), as_columns(x, True))
        weights = torch.empty(*q.shape[:-1], k.shape[-2], device="meta")
        what = "softargmax of q · k, scaled"
        self.add(join(path, "weights"), what, weights, as_columns(weights, True), work=weights.numel() * q.shape[-1])
        what = "weighted sum of the values"
        work = z.numel() * k.shape[-2]
        self.add(join(path, "z_per_head"), what, tokens_first(z), as_columns(z, True), work=work)
        self.known[id(z)] = z

    def torch_nn(self, args: Any, kwargs: Any, out: Tensor) -> None:
        """What torch.nn.MultiheadAttention computes: (L,B,E), or (L,E) without a batch."""
        given = signature(F.multi_head_attention_forward).bind(*args, **kwargs).arguments
        path, num_heads, width = self.inside[-1][0], given["num_heads"], out.shape[-1]
        _, others = self.take_parameters("linear", ())
        more_keys = (given["bias_k"] is not None) + bool(given["add_zero_attn"])
        per_head = []
        for name in ("query", "key", "value"):
            x = given[name] if given[name].dim() == 3 else given[name][:, None]
            projected = torch.empty(x.shape[1], x.shape[0], width, device="meta")
            work = projected.numel() * x.shape[-1]
            self.add(join(path, name), "linear", projected, as_columns(projected), work=work)
            n_tokens = x.shape[0] + (more_keys if name != "query" else 0)
            per_head.append(torch.empty(x.shape[1], num_heads, n_tokens, width // num_heads, device="meta"))
        q, k, v = per_head
        self.attention(q, k, v, torch.empty_like(q))
        rows = out.transpose(0, 1) if out.dim() == 3 else out[None]
        self.add(join(path, "out_proj"), "linear", rows, as_columns(rows), others, rows.numel() * width)
        self.known[id(out)] = out

    def others(self, model: nn.Module) -> list[TensorShape]:
        """Parameters that no step has shown."""
        return [
            TensorShape(name, "learned" if id(p) in self.touched else UNUSED, tuple(p.shape), tuple(p.shape), p.numel())
            for name, p in model.named_parameters()
            if id(p) not in self.counted
        ]

    def take_parameters(self, func: str, args: Any) -> tuple[str, int]:
        """Writes down the matrices that a step uses; returns whose step it is, and how many other numbers it learns."""
        path, module = self.inside[-1]
        own = {id(p): join(path, name) for name, p in module.named_parameters(recurse=False)}
        others = 0
        for p in self.waiting.values():
            count = 0 if id(p) in self.counted else p.numel()
            self.counted.add(id(p))
            is_tied = not count and func == "linear" and id(p) not in own
            name = join(path, "weight") if is_tied else own.get(id(p)) or self.names[id(p)]
            path = name.rpartition(".")[0]
            if not count and not is_tied:
                continue  # a table that is looked up again has its line already
            if p.dim() == 1:
                others += count
                continue
            what = "learned" if count else f"{TIED} {self.names[id(p)]}"
            rows, columns = matrix_shapes(func, args, p)
            self.tensors.append(TensorShape(name, what, rows, columns, count))
        self.waiting.clear()
        return path, others

    def entering(self, name: str, module: nn.Module) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self.inside and (x := first_tensor((args, kwargs))) is not None:
                self.notice(x, join(name, "input"), self.reduction or "rearranged")
            self.inside.append((name, module))

        return hook

    def leaving(self) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            if (out := first_tensor(output)) is not None:
                self.notice(out, self.inside[-1][0], f"output of {type(module).__name__}")
            self.inside.pop()

        return hook

    def notice(self, x: Tensor, name: str, what: str) -> None:
        """A tensor that comes by without a step of its own is worth a line when its shape is new."""
        before = self.tensors[-1]
        if id(x) not in self.known and tuple(x.shape) != before.rows:
            if before.name.endswith("z_per_head"):
                name, what = before.name.removesuffix("_per_head"), "the heads side by side"
            parameters = self.take_parameters("", ())[1]
            self.add(name, what, x, as_columns(x), parameters)
        self.known[id(x)] = x

    def add(self, name: str, what: str, x: Tensor, columns: Shape, parameters: int = 0, work: int = 0) -> None:
        name = name or "output"  # of a module that is a single layer
        repeats = sum(tensor.name.split("#")[0] == name for tensor in self.tensors)
        name = f"{name}#{repeats + 1}" if repeats else name
        self.tensors.append(TensorShape(name, what, tuple(x.shape), columns, parameters, work))
        self.known[id(x)] = x
        self.reduction = ""


def multiply_adds(func: str, args: Any, out: Tensor) -> int:
    match func:
        case "linear" | "matmul":
            return out.numel() * args[0].shape[-1]
        case "conv1d" | "conv2d" | "conv3d":
            return out.numel() * args[1][0].numel()
        case "lstm" | "gru":  # each matrix is multiplied with every token
            matrices = [p.numel() for p in tree_leaves(args) if isinstance(p, nn.Parameter) and p.dim() == 2]
            return sum(matrices) * math.prod(args[0].shape[:-1])
    return 0


def counted(func: Any, args: Any, kwargs: Any) -> tuple[Any, int]:
    """What a call returns, and its multiply-adds by torch's own count."""
    with FlopCounterMode(display=False) as counter:
        out = func(*args, **kwargs)
    return out, counter.get_total_flops() // 2


def first_tensor(tree: Any) -> Any:
    """Of the arguments or the outputs of a call."""
    return next((leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)), None)


def tokens_first(x: Tensor) -> Tensor:
    """(B,H,L,D) -> (B,L,H,D); without heads, as it is."""
    return x.transpose(-3, -2) if x.dim() > 3 else x


def matrix_shapes(func: str, args: Any, p: nn.Parameter) -> tuple[Shape, Shape]:
    """In both conventions. A linear layer stores the W of y = W x; a table has a row for each token or place."""
    shape = tuple(p.shape)
    if len(shape) != 2:
        return shape, shape
    if func in ("linear", "lstm", "gru"):
        return shape[::-1], shape
    rows = tuple(args[1].shape) if func == "embedding" and args[1].is_floating_point() else shape
    return rows, rows[::-1]


def as_columns(x: Tensor, is_heads: bool = False) -> Shape:
    """One example with tokens as columns. (B,L,E) -> (E,L), (B,E) -> (E,1), per head (B,H,L,D) -> (H,D,L)"""
    shape = tuple(x.shape[1:])
    if not x.is_floating_point():  # ids (B,L): one in each column
        return (1, *shape)
    if is_heads:
        *heads, length, width = shape
        return (width, length) if heads == [1] else (*heads, width, length)
    match shape:
        case (width,):
            return (width, 1)
        case (length, width):
            return (width, length)
    return shape  # an image has neither rows nor columns of tokens


def join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
