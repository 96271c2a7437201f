"""What a claim is: a sentence about attention, a test of it, and the verdict of the measured numbers.

A claim's `run` measures and compares; each comparison is a `Check`, and the claim holds if all its checks do.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

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
