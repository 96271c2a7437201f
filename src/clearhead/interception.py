"""Intercept the torch functions of a forward pass, and name the module that calls them.

`Intercept` is a TorchFunctionMode that passes chosen torch functions to a handler. torch switches the mode off while
its handler runs, so a handler may call torch itself. `ModuleStack` knows which modules are running. `intercept`
combines both, for one model: `look`, `edit`, `shapes` and the doctor are built on it.

The stack is kept by replacing each module's `forward` inside the `with` block. Forward hooks would also work, but with
any hook present torch releases inputs and outputs later, and a pass takes 1.15 times as long.
"""

import sys
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

SDPA = "scaled_dot_product_attention"
MULTI_HEAD_ATTENTION = "multi_head_attention_forward"
"""the function behind nn.MultiheadAttention"""
MATMULS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "mm"}

Handler = Callable[[str, Callable[..., Any], Any, dict[str, Any]], Any]
"""(name, func, args, kwargs) -> the result of the call: a handler calls func itself"""


class Intercept(TorchFunctionMode):
    """Calls `handler(name, func, args, kwargs)` in place of every torch function whose name is in `names`.

    None stands for every function. A property such as x.mT has the name of the property.
    """

    def __init__(self, handler: Handler, names: Container[str] | None = None):
        super().__init__()
        self.handler, self.names = handler, names
        self.known: dict[Any, str] = {}  # the names of functions that were called before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = self.known.get(func)
        if name is None:
            name = self.known[func] = function_name(func)
        if self.names is not None and name not in self.names:
            return func(*args, **kwargs) if kwargs else func(*args)
        return self.handler(name, func, args, kwargs or {})


def function_name(func: Any) -> str:
    """The name of a torch function, of a property, or of an operator of an exported program (softmax.int)."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    return name.partition(".")[0]


def argument(args: Any, kwargs: Any, position: int, *names: str, default: Any = None) -> Any:
    """An argument of a call, passed by position or by one of these names."""
    return args[position] if position < len(args) else next((kwargs[name] for name in names if name in kwargs), default)


class RunningModule(NamedTuple):
    path: str
    """the module's path in the model, empty for the model itself"""
    module: nn.Module
    is_compiled: bool
    """whether this module, or one that contains it, was compiled"""


OnEnter = Callable[[RunningModule, Any, Any], None]
OnExit = Callable[[RunningModule, Any], None]


class ModuleStack:
    """The modules of a model whose `forward` is running, outermost first.

    `on_enter(module, args, kwargs)` is called before a module is put on the stack, `on_exit(module, output)` before it
    is taken off. A module that raises is taken off without `on_exit`.
    """

    def __init__(self, model: nn.Module, on_enter: OnEnter | None = None, on_exit: OnExit | None = None):
        self.model, self.on_enter, self.on_exit = model, on_enter, on_exit
        self.running: list[RunningModule] = []
        self.num_passes = 0
        """how often the outermost module was called"""

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Inside the block every module has a `forward` that keeps the stack; afterwards each has its own again."""
        originals: list[tuple[nn.Module, dict[str, Any]]] = []
        try:
            for name, module in self.model.named_modules():
                if isinstance(module, torch.jit.ScriptModule):
                    continue  # its forward cannot be replaced, and its calls are not intercepted
                originals.append((module, {key: value for key, value in vars(module).items() if key == "forward"}))
                vars(module)["forward"] = self.wrap_forward(without_wrappers(name), module)
            yield
        finally:
            for module, own_forward in originals:
                del vars(module)["forward"]
                vars(module).update(own_forward)

    def wrap_forward(self, path: str, module: nn.Module) -> Callable[..., Any]:
        forward, compiled = module.forward, is_compiled(module)
        itself = RunningModule(path, module, compiled)
        inside_compiled = RunningModule(path, module, True)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            running = self.running
            if not running:
                self.num_passes += 1
            entered = inside_compiled if running and running[-1].is_compiled else itself
            if self.on_enter is not None:
                self.on_enter(entered, args, kwargs)
            running.append(entered)
            try:
                output = forward(*args, **kwargs)
                if self.on_exit is not None:
                    self.on_exit(entered, output)
                return output
            finally:
                running.pop()

        # functools.wraps takes five times as long, and this runs for every module of every pass
        wrapped.__wrapped__ = forward  # type: ignore[attr-defined]
        wrapped.__name__ = "forward"
        return wrapped


@contextmanager
def intercept(stack: ModuleStack, handler: Handler, names: Container[str] | None = None) -> Iterator[Intercept]:
    """Inside the block, calls of torch go to `handler`, and `stack` follows the modules of its model.

    Compiled modules and the inference fast path of torch.nn call no torch functions that could be intercepted, so both
    run eagerly inside the block.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as contexts:
        contexts.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        torch.backends.mha.set_fastpath_enabled(False)
        if "torch._dynamo" in sys.modules:  # otherwise nothing has been compiled
            contexts.enter_context(torch.compiler.set_stance("force_eager"))
        contexts.enter_context(stack.tracking())
        yield contexts.enter_context(Intercept(handler, names))


def is_compiled(module: nn.Module) -> bool:
    """Whether module.compile() was called, or this is the wrapper that torch.compile(module) returns."""
    return getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules


def without_wrappers(path: str) -> str:
    """The path of a module before the model was compiled."""
    return ".".join(part for part in path.split(".") if part != "_orig_mod") if "_orig_mod" in path else path


def without_dispatch(function: FunctionType) -> FunctionType:
    """A copy of a torch function that runs its body even under a TorchFunctionMode, so that inner calls are seen."""
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
