"""The lab: claims about attention, each an experiment with a verdict, and the layers that attention can imitate.

clearhead.lab.run("elongated-key", alpha=3).verdict
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clearhead.lab.registry import run as run


def __getattr__(name: str) -> Any:
    if name == "run":  # loaded when first used: the command line must answer without torch
        from clearhead.lab.registry import run

        return run
    raise AttributeError(f"clearhead.lab has no {name!r}; it has run")
