"""Loads the user's own module from `mymodel.py:GPT` (a file) or `package.mymodel:GPT` (as Python imports it)."""

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from clearhead.insight.doctor.call_plan import said
from clearhead.insight.doctor.report import listed

FORM = "a module is named as FILE.py:NAME"


def load(target: str, folder: Path) -> nn.Module:
    """The nn.Module of that name: an instance, a class built without arguments, or what a function returns.

    Files are found relative to `folder`, which is also searched for imports, as `python -m` does.
    """
    path, colon, name = target.rpartition(":")
    if not (colon and path and name):
        raise ValueError(f"{FORM}, got {target!r}; {example_of(target, folder)}")
    if path.startswith(".") and "/" not in path and not path.endswith(".py"):
        raise ValueError(f"{FORM}, got {target!r}; try {path.strip('.')}:{name}")
    with torch.random.fork_rng(devices=[]), on_cpu():
        torch.default_generator.manual_seed(0)
        made = find(imported(path, folder), path, name)
        if callable(made) and not isinstance(made, nn.Module):
            made = built(made, target, name)
    if not isinstance(made, nn.Module):
        raise ValueError(f"{target} must be an nn.Module or return one, got {type(made).__name__}")
    return made


def example_of(target: str, folder: Path) -> str:
    """A name to try: of the file's own classes and functions, if the file exists."""
    target = target.strip(":")
    file = folder / target if target.endswith(".py") else folder / f"{target.replace('.', '/')}.py"
    if file.is_file():
        if names := defined(file):
            return f"{target} defines {listed(names, 9)}: try {target}:{names[0]}"
        return f"{target} defines no class and no function"
    file_name, _, last = target.removesuffix(".py").rpartition(".")
    return f"try {file_name}:{last}" if file_name else f"try {last or 'mymodel'}.py:MyModel"


def defined(file: Path) -> list[str]:
    """The classes and functions at the top level of a file, without running it."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError):
        return []
    kinds = ast.ClassDef | ast.FunctionDef
    return [node.name for node in body if isinstance(node, kinds) and not node.name.startswith("_")]


@contextmanager
def on_cpu() -> Iterator[None]:
    """A file that asks for an accelerator hears that there is none: the copy that is examined is on the CPU."""
    with ExitStack() as stack:
        for kind in (torch.cuda, torch.backends.mps, torch.accelerator):
            stack.callback(setattr, kind, "is_available", kind.is_available)
            setattr(kind, "is_available", lambda: False)  # noqa: B010 - mypy forbids to assign a function
        yield


def built(make: Callable[[], Any], target: str, name: str) -> Any:
    needed = required(make)
    if needed:
        raise ValueError(
            f"{target} cannot be called without arguments: it needs {', '.join(needed)}; name "
            f"a function instead: def small(): return {name}({', '.join(f'{one}=...' for one in needed)})"
        )
    torch.default_generator.manual_seed(0)  # the same weights each time, and so the same report
    try:
        return make()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ValueError(f"{target} could not be built: {said(error)}") from None


def imported(path: str, folder: Path) -> ModuleType:
    """The Python module of `mymodel.py`, `folder/mymodel.py` or `package.mymodel`."""
    is_file = path.endswith(".py") or "/" in path
    file = existing(folder / (path if path.endswith(".py") else f"{path}.py"), path) if is_file else None
    search_first(folder)
    importlib.invalidate_caches()
    try:
        return by_name(path, folder) if file is None else by_file(file)
    except ClashError:
        raise
    except ModuleNotFoundError as error:
        if file is None and error.name and (path == error.name or path.startswith(f"{error.name}.")):
            raise LookupError(not_found(path, folder)) from None
        raise ValueError(f"{path} could not be imported: {said(error)}") from None
    except SystemExit:
        raise ValueError(
            f'{path} could not be imported: it ends the program; move what it runs below if __name__ == "__main__":'
        ) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ValueError(f"{path} could not be imported: {said_of_file(error)}") from None


class ClashError(ValueError):
    """Another module of the same name has been imported instead of the user's file."""


def by_name(path: str, folder: Path) -> ModuleType:
    """As Python imports it. Another module of that name, such as Python's own `token`, hides a file."""
    module = importlib.import_module(path)
    file = Path(folder.resolve(), *path.split(".")).with_suffix(".py")
    if file.is_file() and not is_of(module, file):
        raise ClashError(
            f"{path} resolves to another installed module; name the file: {'/'.join(path.split('.'))}.py:NAME"
        )
    return module


def by_file(file: Path) -> ModuleType:
    """A file of a package is imported as a part of it, so that its relative imports work; any other is run on its own,
    with its folder searched first for what it imports."""
    root, parts = file.parent, [file.stem]
    while (root / "__init__.py").is_file():
        root, parts = root.parent, [root.name, *parts]
    search_first(root)
    name = ".".join(parts)
    known = sys.modules.get(name)
    if known is not None and is_of(known, file):
        return known
    if len(parts) > 1:
        module = importlib.import_module(name)
        if not is_of(module, file):
            raise ClashError(f"{file.name} belongs to the package {parts[0]}, but Python has another one of that name")
        return module
    name = f"{name}_file" if known is not None or name in sys.stdlib_module_names else name
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def is_of(module: ModuleType, file: Path) -> bool:
    return Path(getattr(module, "__file__", None) or "").resolve() == file.resolve()


def search_first(folder: Path) -> None:
    here = str(folder.resolve())
    if here not in sys.path:
        sys.path.insert(0, here)


def existing(file: Path, path: str) -> Path:
    if file.is_file():
        return file.resolve()
    if not file.parent.is_dir():
        raise LookupError(f"no file {path}: there is no folder {Path(path).parent}")
    near = get_close_matches(file.name, [other.name for other in file.parent.glob("*.py")], n=1)
    raise LookupError(f"no file {path}" + (f"; did you mean {Path(path).with_name(near[0])}?" if near else ""))


def not_found(path: str, folder: Path) -> str:
    near = get_close_matches(path, [other.stem for other in folder.glob("*.py")], n=1)
    hint = f"did you mean {near[0]}.py?" if near else "a file elsewhere is named with its path: folder/mymodel.py:GPT"
    return f"no module {path!r} in this folder or installed; {hint}"


def said_of_file(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({Path(error.filename or '?').name}:{error.lineno})"
    return said(error)


def find(module: Any, path: str, name: str) -> Any:
    try:
        if hasattr(module, name):
            return getattr(module, name)
    except Exception as error:  # some packages import a name when it is asked for
        raise ValueError(f"{path} could not provide {name!r}: {said(error)}") from None
    known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    own = [key for key in known if getattr(vars(module)[key], "__module__", None) == module.__name__]
    near = get_close_matches(name, own, n=1) or get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"it has {listed(own or known, 9) or 'nothing to call'}"
    raise LookupError(f"{path} has no {name!r}; {hint}")


def required(make: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
