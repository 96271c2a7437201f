"""The settings of a claim that a reader may change: what they mean, and which values are accepted."""

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from clearhead.lab.claim import Claim
from clearhead.nn.sizes import check_heads

MEANING = {
    "seed": "another number draws other random inputs and weights",
    "width": "numbers in a token, or channels",
    "depth": "layers",
    "n_heads": "heads; width must be a multiple of it",
    "n_tokens": "tokens in a sequence",
    "n_keys": "keys",
    "n_queries": "queries",
    "n_examples": "sequences in a batch",
    "n_source": "tokens that the encoder reads",
    "n_target": "tokens that the decoder has",
    "n_nodes": "nodes of the graph",
    "length": "places along the sequence",
    "side": "rows, and columns, of the image or of its patches",
    "patch": "rows, and columns, of one patch",
    "stride": "steps of the convolution; 0 for the size of a patch",
    "kernel": "places that one convolution covers, an odd number",
    "context": "rows of the learned table",
    "steps": "training steps",
    "num_seeds": "training runs, each with its own seed; results are their mean",
    "n_images": "images to learn from",
    "crop": "pixels that images are moved by in training",
    "beta": "1 / temperature: scores are multiplied by it; inf is taken",
    "alpha": "how many times longer the key becomes",
    "size": "length of the key's step",
    "low": "the number that is added to hidden scores",
    "forget": "added to the bias of the LSTMs' forget gates: the higher, the longer a cell is kept",
    "share": "of all edges, those that the graph has",
    "dropout": "share of numbers that are dropped in training",
}
"""of every setting that is a number; those that are true or false are explained by their experiment's docstring"""

LARGEST = 10_000
"""of all sizes: larger ones ask nothing else of a claim, and take all memory"""
LARGEST_SEED = 2**32 - 1
LARGEST_NUMBER = 1e30
"""of numbers that are no size, but for beta: beyond it, sums overflow in float32"""


def settings(claim: Claim) -> dict[str, inspect.Parameter]:
    """What a reader may change: the numbers among the arguments of its `run`."""
    parameters = inspect.signature(claim.run).parameters.values()
    return {p.name: p for p in parameters if isinstance(p.default, int | float)}


def changed(claim: Claim, values: Mapping[str, object]) -> dict[str, object]:
    """Those of the values that are not the claim's own."""
    return {name: values[name] for name, p in settings(claim).items() if name in values and values[name] != p.default}


def check_settings(claim: Claim, changes: Mapping[str, object]) -> None:
    """Refuses what the experiment would answer with an error, or with a number that means nothing."""
    known = settings(claim)
    values: dict[str, Any] = {name: changes.get(name, parameter.default) for name, parameter in known.items()}
    for name, value in values.items():
        check_kind(name, value, known[name].default)
        if not isinstance(value, bool):
            check_range(claim, name, value)
    for name, factor in claim.multiples.items():
        if values[name] % factor:
            above = values[name] + factor - values[name] % factor
            raise ValueError(
                f"{name} of {claim.slug} must be a multiple of {factor}, got {values[name]}; try {name}={above}"
            )
    if "n_heads" in values:
        check_heads(values["width"], values["n_heads"])
    if "kernel" in values and values["kernel"] % 2 == 0:
        raise ValueError(
            f"kernel of {claim.slug} must be odd, got {values['kernel']}; try kernel={values['kernel'] + 1}"
        )


def check_kind(name: str, value: object, default: object) -> None:
    kinds = {bool: (bool,), int: (int,), float: (int, float)}[type(default)]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = {bool: "True or False", int: "a whole number", float: "a number"}[type(default)]
        raise ValueError(f"{name} must be {wanted}, got {value!r}; its own is {default!r}")


def check_range(claim: Claim, name: str, value: float) -> None:
    least, most = limits(claim, name)
    if not least <= value <= most:  # NaN is refused, too
        raise ValueError(f"{name} of {claim.slug} must be from {least:.10g} to {most:.10g}, got {value!r}")


def limits(claim: Claim, name: str) -> tuple[float, float]:
    """The lowest and the highest number that a setting takes."""
    default = settings(claim)[name].default
    if isinstance(default, int):
        least, most = float(min(1, default)), float(LARGEST_SEED if name == "seed" else LARGEST)
    else:
        most = math.inf if name == "beta" else LARGEST_NUMBER
        least = -most
    return claim.least.get(name, least), claim.most.get(name, most)


@contextmanager
def enough_memory() -> Iterator[None]:
    """Sizes that do not fit the machine's memory are the reader's to change: one line, no traceback."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "allocate" in str(error):
            raise ValueError(
                "all sizes together must fit into memory, got too many numbers; try smaller ones"
            ) from None
        raise
