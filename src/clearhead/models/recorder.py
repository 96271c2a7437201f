"""Record the tensors of one forward pass of any module, in order, without changing the module.

Only the main operations are recorded: linear layers, matrix products, norms, activations, residual sums and attention.
nn.MultiheadAttention is a single torch call, so the shapes of its inner tensors are derived from its arguments.
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
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from clearhead.interception import MULTI_HEAD_ATTENTION, SDPA, ModuleStack, RunningModule, argument, intercept

LAYERS = {
    "linear": "linear",
    "embedding": "embedding lookup",
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
"""calls whose output is named after the module that makes them"""

PRODUCTS = {
    "matmul": "matrix product",
    "baddbmm": "matrix product",
    "addmm": "matrix product",
    "einsum": "matrix product",
    "softmax": "softargmax",
}
"""calls of an attention that does not use a fused kernel"""

RESIDUAL_OPS = {"add": "sum", "cat": "concatenation", "gelu": "GELU", "relu": "ReLU", "silu": "SiLU"}
"""calls that are recorded only if an operand is; this excludes, for example, sums of indices"""

POOLS = {f"max_pool{n}d": "max pooling" for n in (1, 2, 3)} | {f"avg_pool{n}d": "average pooling" for n in (1, 2, 3)}
POOLS |= {f"adaptive_{name}": description for name, description in POOLS.items()}
"""calls that are recorded under the same condition"""

OPERATIONS = LAYERS | PRODUCTS | RESIDUAL_OPS | POOLS

REDUCTIONS = {"mean": "mean", "amax": "maximum", "max": "maximum", "__getitem__": "selection", "select": "selection"}
"""calls that change the shape of a module's input; without one of them, the input was reshaped"""

ALIASES = {
    "__matmul__": "matmul",
    "__rmatmul__": "matmul",
    "bmm": "matmul",
    "mm": "matmul",
    "add_": "add",
    "__iadd__": "add",
    "relu_": "relu",
}

COUNTED_BY_TORCH = {"einsum", "baddbmm", "addmm"}
"""calls whose multiply-adds are taken from torch's own counter"""

TIED, UNUSED = "tied to", "not used in this pass"
TIED_OUTPUT = "lm_head.weight"
"""name of an output matrix that is another module's embedding and has no module of its own"""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorShape:
    """One tensor of a pass: an input, a parameter, or the result of an operation."""

    name: str
    """the path of the parameter or module, and the name of the tensor inside it"""
    operation: str
    """the origin of the tensor: "input", "parameter", or the operation that computed it"""
    rows: Shape
    """tokens as rows: (B,L,E); attention weights sum to 1 along each row"""
    columns: Shape
    """tokens as columns: (E,L) of one example, without the heads dimension if there is a single head"""
    parameters: int = 0
    multiply_adds: int = 0


def record(
    model: nn.Module, inputs: Mapping[str, Tensor], forward: Callable[[], Any] | None = None
) -> list[TensorShape]:
    """The tensors of model(*inputs), in order, or of a `forward` that calls the model in another way."""
    recorder = Recorder(model, inputs)
    with torch.no_grad(), intercept(recorder.stack, recorder.handle):
        model(*inputs.values()) if forward is None else forward()
    return [*recorder.tensors, *recorder.unrecorded_parameters(model)]


class Recorder:
    def __init__(self, model: nn.Module, inputs: Mapping[str, Tensor]):
        self.stack = ModuleStack(model, self.on_enter, self.on_exit)
        self.parameter_names = {id(p): name for name, p in model.named_parameters()}
        self.tensors = [TensorShape(name, "input", tuple(x.shape), as_columns(x)) for name, x in inputs.items()]
        self.recorded = {id(x): x for x in inputs.values()}  # keeps the tensors alive, so that no id is reused
        self.pending: dict[int, nn.Parameter] = {}  # parameters that were used but belong to no recorded step yet
        self.counted: set[int] = set()
        self.used: set[int] = set()
        self.reduction = ""  # the last reduction since a tensor was recorded

    def handle(self, func_name: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        name = ALIASES.get(func_name, func_name)
        out, work = count_flops(func, args, kwargs) if name in COUNTED_BY_TORCH else (func(*args, **kwargs), 0)
        if not self.stack.running or not isinstance(out, Tensor | tuple | list):  # p.shape and p.device are calls too
            return out
        leaves = tree_leaves((args, kwargs))
        self.pending |= {id(p): p for p in leaves if isinstance(p, nn.Parameter) and id(p) in self.parameter_names}
        self.used |= set(self.pending)
        if name == SDPA:
            q, k, v = (argument(args, kwargs, i, key) for i, key in enumerate(("query", "key", "value")))
            self.add_attention(q, k, v, first_tensor(out))
        elif name == MULTI_HEAD_ATTENTION:
            self.add_torch_nn(args, kwargs, first_tensor(out))
        elif name in LAYERS | PRODUCTS or (
            name in RESIDUAL_OPS | POOLS and any(id(x) in self.recorded for x in leaves)
        ):
            self.add_step(name, (*args, *kwargs.values()), first_tensor(out), work)
        elif name in REDUCTIONS:
            self.reduction = REDUCTIONS[name]
        return out

    def add_step(self, func: str, args: Any, out: Tensor, work: int = 0) -> None:
        owner, parameters = self.take_parameters(func, args)
        name = owner if func in LAYERS else join(owner, func)
        columns = as_columns(out, has_heads=func in PRODUCTS and out.dim() > 3)
        self.add(name, OPERATIONS[func], out, columns, parameters, work or multiply_adds(func, args, out))

    def add_attention(self, q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> None:
        """q, k, v (B,H,L,D) and z, the arguments and output of the kernel, and the weights (B,H,Q,K) inside it."""
        path = self.stack.running[-1].path
        for name, plural, x in (("q", "queries", q), ("k", "keys", k), ("v", "values", v)):
            self.add(join(path, f"{name}_per_head"), f"{plural} per head", tokens_first(x), as_columns(x, True))
        weights = torch.empty(*q.shape[:-1], k.shape[-2], device="meta")
        work = weights.numel() * q.shape[-1]
        self.add(join(path, "weights"), "softargmax(beta q kᵀ)", weights, as_columns(weights, True), work=work)
        work = z.numel() * k.shape[-2]
        self.add(join(path, "z_per_head"), "weights v", tokens_first(z), as_columns(z, True), work=work)
        self.recorded[id(z)] = z

    def add_torch_nn(self, args: Any, kwargs: dict[str, Any], out: Tensor) -> None:
        """The inner tensors of nn.MultiheadAttention for inputs (L,B,E), or (L,E) without a batch."""
        bound = signature(F.multi_head_attention_forward).bind(*args, **kwargs).arguments
        path, num_heads, width = self.stack.running[-1].path, bound["num_heads"], out.shape[-1]
        _, parameters = self.take_parameters("linear", ())
        extra_keys = (bound["bias_k"] is not None) + bool(bound["add_zero_attn"])
        per_head = []
        for name in ("query", "key", "value"):
            x = bound[name] if bound[name].dim() == 3 else bound[name][:, None]
            projected = torch.empty(x.shape[1], x.shape[0], width, device="meta")
            work = projected.numel() * x.shape[-1]
            self.add(join(path, f"{name[0]}_proj"), "linear", projected, as_columns(projected), work=work)
            length = x.shape[0] + (extra_keys if name != "query" else 0)
            per_head.append(torch.empty(x.shape[1], num_heads, length, width // num_heads, device="meta"))
        q, k, v = per_head
        self.add_attention(q, k, v, torch.empty_like(q))
        rows = out.transpose(0, 1) if out.dim() == 3 else out[None]
        self.add(join(path, "out_proj"), "linear", rows, as_columns(rows), parameters, rows.numel() * width)
        self.recorded[id(out)] = out

    def unrecorded_parameters(self, model: nn.Module) -> list[TensorShape]:
        """Parameters that belong to no recorded step."""
        return [
            TensorShape(name, "parameter" if id(p) in self.used else UNUSED, tuple(p.shape), tuple(p.shape), p.numel())
            for name, p in model.named_parameters()
            if id(p) not in self.counted
        ]

    def take_parameters(self, func: str, args: Any) -> tuple[str, int]:
        """Record the weight matrices of a step; return the path of its module, and the size of its other parameters."""
        path, module = self.stack.running[-1][:2]
        own = {id(p): join(path, name) for name, p in module.named_parameters(recurse=False)}
        others = 0
        for p in self.pending.values():
            size = 0 if id(p) in self.counted else p.numel()
            self.counted.add(id(p))
            original = self.parameter_names[id(p)]
            is_tied = not size and func == "linear" and own.get(id(p)) != original  # not a layer that runs again
            name = own.get(id(p)) or (join(path, TIED_OUTPUT) if is_tied else original)
            path = name.rpartition(".")[0]
            if not size and not is_tied:
                continue  # an embedding that is looked up again is recorded already
            if p.dim() == 1:
                others += size
                continue
            operation = "parameter" if size else f"{TIED} {original}"
            rows, columns = matrix_shapes(func, args, p)
            self.tensors.append(TensorShape(name, operation, rows, columns, size))
        self.pending.clear()
        return path, others

    def on_enter(self, module: RunningModule, args: Any, kwargs: Any) -> None:
        if self.stack.running and (x := first_tensor((args, kwargs))) is not None:
            self.add_if_new(x, join(module.path, "input"), self.reduction or "reshaped")

    def on_exit(self, module: RunningModule, output: Any) -> None:
        if (out := first_tensor(output)) is not None:
            self.add_if_new(out, module.path, f"output of {type(module.module).__name__}")

    def add_if_new(self, x: Tensor, name: str, operation: str) -> None:
        """Record the input or output of a module if no step has recorded it and its shape is new."""
        last = self.tensors[-1]
        if id(x) not in self.recorded and tuple(x.shape) != last.rows:
            if last.name.endswith("z_per_head"):
                name, operation = last.name.removesuffix("_per_head"), "concatenated heads"
            parameters = self.take_parameters("", ())[1]
            self.add(name, operation, x, as_columns(x), parameters)
        self.recorded[id(x)] = x

    def add(self, name: str, operation: str, x: Tensor, columns: Shape, parameters: int = 0, work: int = 0) -> None:
        name = name or "output"  # of a module that is a single layer
        repeats = sum(tensor.name.split("#")[0] == name for tensor in self.tensors)
        name = f"{name}#{repeats + 1}" if repeats else name
        self.tensors.append(TensorShape(name, operation, tuple(x.shape), columns, parameters, work))
        self.recorded[id(x)] = x
        self.reduction = ""


def multiply_adds(func: str, args: Any, out: Tensor) -> int:
    match func:
        case "linear" | "matmul":
            return out.numel() * args[0].shape[-1]
        case "conv1d" | "conv2d" | "conv3d":
            return out.numel() * args[1][0].numel()
        case "lstm" | "gru":  # every token is multiplied by each matrix
            matrices = [p.numel() for p in tree_leaves(args) if isinstance(p, nn.Parameter) and p.dim() == 2]
            return sum(matrices) * math.prod(args[0].shape[:-1])
    return 0


def count_flops(func: Any, args: Any, kwargs: Any) -> tuple[Any, int]:
    """The result of a call, and its multiply-adds by torch's own counter."""
    with FlopCounterMode(display=False) as counter:
        out = func(*args, **kwargs)
    return out, counter.get_total_flops() // 2


def first_tensor(tree: Any) -> Any:
    """The first tensor among the arguments or outputs of a call."""
    return next((leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)), None)


def tokens_first(x: Tensor) -> Tensor:
    """(B,H,L,D) -> (B,L,H,D); a tensor without heads is returned as it is."""
    return x.transpose(-3, -2) if x.dim() > 3 else x


def matrix_shapes(func: str, args: Any, p: nn.Parameter) -> tuple[Shape, Shape]:
    """In both conventions. nn.Linear stores the W of y = W x; an embedding table has one row per token or position."""
    shape = tuple(p.shape)
    if len(shape) != 2:
        return shape, shape
    if func in ("linear", "lstm", "gru"):
        return shape[::-1], shape
    rows = tuple(args[1].shape) if func == "embedding" and args[1].is_floating_point() else shape
    return rows, rows[::-1]


def as_columns(x: Tensor, has_heads: bool = False) -> Shape:
    """Tokens as columns, for one example: (B,L,E) -> (E,L), (B,E) -> (E,1), and (B,H,L,D) -> (H,D,L) for heads."""
    shape = tuple(x.shape[1:])
    if not x.is_floating_point():  # token ids (B,L)
        return (1, *shape)
    if has_heads:
        *heads, length, width = shape
        return (width, length) if heads == [1] else (*heads, width, length)
    match shape:
        case (width,):
            return (width, 1)
        case (length, width):
            return (width, length)
    return shape  # images are not rows or columns of tokens


def join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
