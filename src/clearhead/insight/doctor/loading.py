"""The user's own module, from `file:Class` or `package.file:function`, found from the current folder."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clearhead.insight.doctor.calling import said
from clearhead.insight.doctor.report import listed


def load(target: str, folder: Path) -> nn.Module:
    """What the class gives without arguments, or what the function returns."""
    path, colon, name = target.partition(":")
    if not (colon and path and name):
        file, _, last = target.removesuffix(".py").strip(":").rpartition(".")
        hint = f"{file}:{last}" if file else f"{last or 'mymodel'}:MyModel"
        raise ValueError(f"a module is named as file:Class or file:function, got {target!r}; try {hint}")
    if path.endswith(".py") or "/" in path or path.startswith("."):
        raise ValueError(f"a module is named as Python imports it, got {path!r}; {named_as(Path(path), name)}")
    with torch.random.fork_rng(devices=[]), on_cpu():
        torch.default_generator.manual_seed(0)
        made = find(imported(path, folder), path, name)
        if callable(made) and not isinstance(made, nn.Module):
            made = built(made, target, name)
    if not isinstance(made, nn.Module):
        raise ValueError(f"{target} must be or return an nn.Module, got {type(made).__name__}; name another")
    return made


@contextmanager
def on_cpu() -> Iterator[None]:
    """A file that asks for an accelerator hears that there is none: the copy that is examined is on the CPU."""
    with ExitStack() as stack:
        for kind in (torch.cuda, torch.backends.mps, torch.accelerator):
            stack.callback(setattr, kind, "is_available", kind.is_available)
            setattr(kind, "is_available", lambda: False)  # noqa: B010 - mypy forbids to assign a function
        yield


def named_as(file: Path, name: str) -> str:
    """How Python would name this file of the current folder; of another one, where to go first."""
    if file.is_absolute() or ".." in file.parts:
        return f"go to {file.parent} and try {file.stem}:{name}"
    parts = Path(str(file).removesuffix(".py")).parts
    return f"try {'.'.join(parts).strip('.')}:{name}"


def built(make: Callable[[], Any], target: str, name: str) -> Any:
    needed = required(make)
    if needed:
        raise ValueError(
            f"{target} must be one that is called without arguments, got one that needs {', '.join(needed)}; name "
            f"a function: def small(): return {name}({', '.join(f'{one}=...' for one in needed)})"
        )
    torch.default_generator.manual_seed(0)  # the same weights each time, and so the same report
    try:
        return make()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{target} must return a module, got {said(error)}; build it in Python first") from None


def imported(path: str, folder: Path) -> Any:
    """The Python module; the folder is searched first, as in `python -m`."""
    here = str(folder.resolve())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name and (path == error.name or path.startswith(f"{error.name}.")):
            raise LookupError(
                f"a module is looked for in this folder and where Python looks, got {path!r}, which is in neither; "
                "go to the folder of its file, and leave out .py"
            ) from None
        raise ValueError(f"{path} must import what is installed, got {said(error)}; install it") from None
    except SystemExit:
        raise ValueError(
            f"{path} must be a file that can be imported, got one that ends the program; "
            'put what it runs below if __name__ == "__main__":'
        ) from None
    except Exception as error:
        raise ValueError(f"{path} must be a file that Python can import, got {said_of_file(error)}; mend it") from None
    file = Path(here, *path.split(".")).with_suffix(".py")
    if file.is_file() and file != Path(getattr(module, "__file__", None) or "").resolve():
        raise ValueError(f"a file must have a name that Python has no module of, got {file.name}; rename it")
    return module


def said_of_file(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({Path(error.filename or '?').name}:{error.lineno})"
    return said(error)


def find(module: Any, path: str, name: str) -> Any:
    try:
        if hasattr(module, name):
            return getattr(module, name)
    except Exception as error:  # some packages import a name when it is asked for
        raise ValueError(f"{path} must have {name!r}, got {said(error)}; install what it needs, or mend it") from None
    known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    own = [key for key in known if getattr(vars(module)[key], "__module__", None) == module.__name__]
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there is {listed(own or known, 9) or 'nothing to call'}"
    raise LookupError(f"{path} has no {name!r}; {hint}")


def required(make: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
