"""Lazy public names: a package imports the module behind a name when that name is first used.

    __getattr__, __dir__, __all__ = lazy_exports(__name__, {"clearhead.nn.attention": ("softargmax", "attend_fused")})

Type checkers do not follow this, so each package repeats its names in an `if TYPE_CHECKING:` block; a contract test
compares the two.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_exports(
    package: str, exports: Mapping[str, Sequence[str]], modules: Sequence[str] = (), own: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package, from {module: names in it} and public modules.

    `own` are public names that the package defines or imports itself.
    """
    homes = {name: module for module, names in exports.items() for name in names}
    submodules = {module.rpartition(".")[2]: module for module in modules}
    public = sorted({*homes, *submodules, *own})

    def get_attribute(name: str) -> Any:
        if name in submodules:
            return import_module(submodules[name])
        if name not in homes:
            raise AttributeError(f"{package} has no {name!r}; it has {', '.join(public)}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        """The public names and the module's own dunders; neither imports nor submodules that happen to be loaded."""
        return sorted({*public, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return get_attribute, list_names, public
