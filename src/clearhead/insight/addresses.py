"""Where in a model a call happens: the path of the innermost module that is running.

A stack of the modules that are running is kept by a `forward` of their own, which they have only as long as the `with`
block. Hooks would do as well, but where there are any torch lets go of inputs and outputs later, and the pass takes
1.15 times as long.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import nn


class Running(NamedTuple):
    path: str
    module: nn.Module
    is_compiled: bool


class Places:
    """The stack of running modules, and how often each address was given in this pass."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.inside: list[Running] = []
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
                vars(module)["forward"] = self.announced(path, module)
            yield
        finally:
            for module, own in before:
                del vars(module)["forward"]
                vars(module).update(own)

    def announced(self, path: str, module: nn.Module) -> Callable[..., Any]:
        """The module's forward, on the stack while it runs, and off it also when it raises."""
        forward, compiled = module.forward, is_compiled(module)

        @wraps(forward)
        def announced(*args: Any, **kwargs: Any) -> Any:
            if not self.inside:
                self.given.clear()
                self.n_passes += 1
            outer = bool(self.inside) and self.inside[-1].is_compiled
            self.inside.append(Running(path, module, compiled or outer))
            try:
                return forward(*args, **kwargs)
            finally:
                self.inside.pop()

        return announced

    def next_address(self) -> str:
        """The path of the innermost running module; the second time in one pass with #2, and so on."""
        path = self.inside[-1].path
        self.given[path] += 1
        return path if self.given[path] == 1 else f"{path}#{self.given[path]}"


def is_compiled(module: nn.Module) -> bool:
    """By module.compile(), or the wrapper that torch.compile(module) returns."""
    return getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules


def without_wrappers(name: str) -> str:
    """A compiled model has the addresses of the model that was compiled."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def paths_of(model: nn.Module) -> list[str]:
    return [without_wrappers(name) or type(module).__name__ for name, module in model.named_modules()]


def unknown(address: str, known: Iterable[str], what: str = "attention") -> LookupError:
    """The error for an address that is not there: the nearest ones if any are near, and all that there are."""
    known = list(known)
    nearest = get_close_matches(address, known, n=1, cutoff=0.6)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return LookupError(f"no {what} at {address!r}; {hint}there is {listed(known)}")


def listed(names: list[str], most: int = 60) -> str:
    shown = ", ".join(names[:most]) or "none"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
