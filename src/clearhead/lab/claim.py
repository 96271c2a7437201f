"""What a claim is: a sentence about attention, a test of it, and the verdict of the measured numbers.

A claim's `run` measures and compares; each comparison is a `Check`, and the claim holds if all its checks do.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from clearhead.validation import check_heads

Verdict = Literal["holds", "refuted"]
Kind = Literal["demonstration", "experiment"]
"""A demonstration shows what follows from the definitions: an identity or a construction, which no other weights or
inputs could refute. The outcome of an experiment is measured: it depends on random weights or on training."""


@dataclass(frozen=True)
class Check:
    """One measured number beside what the claim says of it."""

    name: str
    value: float
    says: str
    """what the claim says of the number, to be read after it: `= 0.5 to 1e-12`, `at least 0.9`"""
    ok: bool


def equals(name: str, value: float, expected: float, tolerance: float) -> Check:
    """|value - expected| <= tolerance"""
    says = f"= {expected:g} to {tolerance:g}" if tolerance else f"= {expected:g}"
    return Check(name, value, says, abs(value - expected) <= tolerance)


def at_most(name: str, value: float, limit: float) -> Check:
    return Check(name, value, f"at most {limit:g}", value <= limit)


def at_least(name: str, value: float, limit: float) -> Check:
    return Check(name, value, f"at least {limit:g}", value >= limit)


def above(name: str, value: float, limit: float) -> Check:
    return Check(name, value, f"above {limit:g}", value > limit)


def below(name: str, value: float, limit: float) -> Check:
    return Check(name, value, f"below {limit:g}", value < limit)


def within(name: str, value: float, low: float, high: float) -> Check:
    return Check(name, value, f"from {low:g} to {high:g}", low <= value <= high)


@dataclass(frozen=True)
class Curve:
    """Numbers that were measured one after the other, for a figure: what took minutes is not measured twice."""

    what: str
    """the quantity, such as `right digits`; curves of one quantity are drawn together"""
    name: str
    """whose it is"""
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True)
class Result:
    """What an experiment found."""

    checks: tuple[Check, ...]
    curves: tuple[Curve, ...] = ()

    def __post_init__(self) -> None:
        assert self.checks, "an experiment without a check proves nothing"

    @property
    def verdict(self) -> Verdict:
        return "holds" if all(check.ok and not math.isnan(check.value) for check in self.checks) else "refuted"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence about attention that is put to the test."""

    slug: str
    rows: tuple[str, ...]
    """the rows of the course reports that it answers, such as R4.5"""
    lesson: str
    """the chapter that it belongs to, one of LESSONS"""
    statement: str
    mistake: str
    """what a mistaken reader would say instead"""
    formula: str
    """several of them are separated by a semicolon and two spaces"""
    run: Callable[..., Result]
    """keyword arguments with defaults only: what a reader may play with, `seed` among them"""
    try_next: str
    """a command that is worth a look after this one"""
    kind: Kind = "experiment"
    conditions: str = ""
    """what the statement takes for granted, where it does not say so itself"""
    least: Mapping[str, float] = field(default_factory=dict)
    """the lowest number that a setting takes, where it is not 1: below it, the statement says nothing"""
    most: Mapping[str, float] = field(default_factory=dict)
    """the highest, where it is not that of all claims"""
    multiples: Mapping[str, int] = field(default_factory=dict)
    """of what a setting must be a multiple, as width of a fixed number of heads"""
    expected: Verdict = "holds"
    trains: bool = False
    """it trains models, for up to five minutes, so `clearhead lab` runs it only when asked to"""
    seconds: int = 60
    """about how long a claim that trains takes with its own settings, on one processor core"""

    @property
    def formulas(self) -> list[str]:
        return self.formula.split(";  ")


LESSONS = (
    "Softargmax and its temperature",
    "Attention and its weights",
    "Heads",
    "Positions and order",
    "Beside recurrence",
    "What attention can compute",
    "Blocks: feed-forward, norm, skip connections",
    "Images and convolutions",
    "Masks, training and testing",
)


# The settings of a claim that a reader may change: what they mean, and which values are accepted.


MEANING = {
    "seed": "another number draws other random inputs and weights",
    "width": "numbers in a token, or channels",
    "depth": "layers",
    "num_heads": "heads; width must be a multiple of it",
    "n_tokens": "tokens in a sequence",
    "n_keys": "keys",
    "n_queries": "queries",
    "n_examples": "sequences in a batch",
    "src_vocab_size": "tokens that the encoder reads",
    "tgt_vocab_size": "tokens that the decoder has",
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
    if "num_heads" in values:
        check_heads(values["width"], values["num_heads"])
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
