"""Loads a user's module, data or loss from `mymodel.py:GPT` (a file) or `package.mymodel:GPT` (an import path)."""

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

from clearhead.insight.doctor.report import error_summary, join_names

EXPECTED = "expected FILE.py:NAME"


def load(target: str, folder: Path, seed: int = 0) -> nn.Module:
    """The nn.Module of that name: an instance, a class that is built without arguments, or a function's return value.

    Files are relative to `folder`, which is also searched for imports, as with `python -m`.
    """
    loaded = load_value(target, folder, seed)
    if not isinstance(loaded, nn.Module):
        raise ValueError(f"{target} must be an nn.Module or return one, got {type(loaded).__name__}")
    return loaded


def load_value(target: str, folder: Path, seed: int = 0, *, call_functions: bool = True) -> Any:
    """The object of that name; an instance of a class; and what a function returns, if `call_functions`.

    A data set, which has a length or can be iterated over, and a module are used as they are.
    """
    path, colon, name = target.rpartition(":")
    if not (colon and path and name):
        raise ValueError(f"{EXPECTED}, got {target!r}; {suggestion(target, folder)}")
    if path.startswith(".") and "/" not in path and not path.endswith(".py"):
        raise ValueError(f"{EXPECTED}, got {target!r}; try {path.strip('.')}:{name}")
    with torch.random.fork_rng(devices=[]), accelerators_hidden():
        torch.default_generator.manual_seed(seed)
        loaded = find_attribute(import_python(path, folder), path, name)
        is_object = isinstance(loaded, nn.Module) or hasattr(loaded, "__len__") or hasattr(loaded, "__iter__")
        if isinstance(loaded, type) or (call_functions and callable(loaded) and not is_object):
            return build(loaded, target, name, seed)
    return loaded


def suggestion(target: str, folder: Path) -> str:
    """A target to try: the first class or function of the file, if it exists."""
    target = target.strip(":")
    file = folder / target if target.endswith(".py") else folder / f"{target.replace('.', '/')}.py"
    if file.is_file():
        if names := defined_names(file):
            return f"{target} defines {join_names(names, 9)}: try {target}:{names[0]}"
        return f"{target} defines no class and no function"
    file_name, _, last = target.removesuffix(".py").rpartition(".")
    return f"try {file_name}:{last}" if file_name else f"try {last or 'mymodel'}.py:MyModel"


def defined_names(file: Path) -> list[str]:
    """The public classes and functions of a file, without running it."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError):
        return []
    kinds = ast.ClassDef | ast.FunctionDef
    return [node.name for node in body if isinstance(node, kinds) and not node.name.startswith("_")]


@contextmanager
def accelerators_hidden() -> Iterator[None]:
    """Lets is_available() return False, so that the user's file builds its module on the CPU."""
    with ExitStack() as stack:
        for backend in (torch.cuda, torch.backends.mps, torch.accelerator):
            stack.callback(setattr, backend, "is_available", backend.is_available)
            setattr(backend, "is_available", lambda: False)  # noqa: B010 - mypy rejects an assignment to a function
        yield


def build(factory: Callable[[], Any], target: str, name: str, seed: int = 0) -> Any:
    required = required_parameters(factory)
    if required:
        raise ValueError(
            f"{target} requires arguments ({', '.join(required)}); write a function without any: "
            f"def small(): return {name}({', '.join(f'{parameter}=...' for parameter in required)})"
        )
    torch.default_generator.manual_seed(seed)  # the same weights, and so the same report, every time
    try:
        return factory()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ValueError(f"{target} could not be built: {error_summary(error)}") from None


def required_parameters(factory: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def find_attribute(module: ModuleType, path: str, name: str) -> Any:
    try:
        if hasattr(module, name):
            return getattr(module, name)
    except Exception as error:  # a lazy package imports names on first access
        raise ValueError(f"{path} could not provide {name!r}: {error_summary(error)}") from None
    known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    own = [key for key in known if getattr(vars(module)[key], "__module__", None) == module.__name__]
    close = get_close_matches(name, own, n=1) or get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"it has {join_names(own or known, 9) or 'no class or function'}"
    raise LookupError(f"{path} has no {name!r}; {hint}")


class NameClashError(ValueError):
    """Python imports another module of the same name instead of the user's file."""


def import_python(path: str, folder: Path) -> ModuleType:
    """The Python module of `mymodel.py`, `folder/mymodel.py` or `package.mymodel`."""
    is_file = path.endswith(".py") or "/" in path
    file = existing_file(folder / (path if path.endswith(".py") else f"{path}.py"), path) if is_file else None
    add_to_sys_path(folder)
    importlib.invalidate_caches()
    try:
        return import_by_name(path, folder) if file is None else import_file(file)
    except NameClashError:
        raise
    except ModuleNotFoundError as error:
        if file is None and error.name and (path == error.name or path.startswith(f"{error.name}.")):
            raise LookupError(not_found(path, folder)) from None
        raise ValueError(f"{path} could not be imported: {error_summary(error)}") from None
    except SystemExit:
        raise ValueError(
            f'{path} could not be imported: it exits Python; move its script under if __name__ == "__main__":'
        ) from None
    except KeyboardInterrupt:
        raise
    except SyntaxError as error:
        location = f"{Path(error.filename or '?').name}:{error.lineno}"
        raise ValueError(f"{path} could not be imported: SyntaxError: {error.msg} ({location})") from None
    except BaseException as error:
        raise ValueError(f"{path} could not be imported: {error_summary(error)}") from None


def import_by_name(path: str, folder: Path) -> ModuleType:
    """Another module of that name, such as Python's own `token`, shadows a file."""
    module = importlib.import_module(path)
    file = Path(folder.resolve(), *path.split(".")).with_suffix(".py")
    if file.is_file() and not is_loaded_from(module, file):
        raise NameClashError(
            f"{path} resolves to another installed module; name the file: {'/'.join(path.split('.'))}.py:NAME"
        )
    return module


def import_file(file: Path) -> ModuleType:
    """A file of a package is imported as part of it, so that relative imports work; any other file is run by itself,
    with its folder first in sys.path."""
    root, parts = file.parent, [file.stem]
    while (root / "__init__.py").is_file():
        root, parts = root.parent, [root.name, *parts]
    add_to_sys_path(root)
    name = ".".join(parts)
    imported = sys.modules.get(name)
    if imported is not None and is_loaded_from(imported, file):
        return imported
    if len(parts) > 1:
        module = importlib.import_module(name)
        if not is_loaded_from(module, file):
            raise NameClashError(
                f"{file.name} belongs to the package {parts[0]}, but Python imports another package of that name"
            )
        return module
    name = f"{name}_file" if imported is not None or name in sys.stdlib_module_names else name
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


def is_loaded_from(module: ModuleType, file: Path) -> bool:
    return Path(getattr(module, "__file__", None) or "").resolve() == file.resolve()


def add_to_sys_path(folder: Path) -> None:
    entry = str(folder.resolve())
    if entry not in sys.path:
        sys.path.insert(0, entry)


def existing_file(file: Path, path: str) -> Path:
    if file.is_file():
        return file.resolve()
    if not file.parent.is_dir():
        raise LookupError(f"no file {path}: the folder {Path(path).parent} does not exist")
    close = get_close_matches(file.name, [other.name for other in file.parent.glob("*.py")], n=1)
    raise LookupError(f"no file {path}" + (f"; did you mean {Path(path).with_name(close[0])}?" if close else ""))


def not_found(path: str, folder: Path) -> str:
    close = get_close_matches(path, [other.stem for other in folder.glob("*.py")], n=1)
    hint = f"did you mean {close[0]}.py?" if close else "for a file elsewhere, give its path: folder/mymodel.py:GPT"
    return f"no module {path!r} in this folder or installed; {hint}"
