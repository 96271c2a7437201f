"""A claim about attention: a statement, an experiment that tests it, a figure, and the verdict.

`Claim.run` measures numbers and compares each with what the statement predicts: a `Check`. The claim holds if every
check passes. This module does not import torch.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

from clearhead.messages import html_table
from clearhead.validation import check_heads

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Verdict = Literal["holds", "refuted"]
Kind = Literal["demonstration", "experiment"]
"""A demonstration shows what follows from the definitions, so no choice of weights or inputs can refute it. The outcome
of an experiment depends on random weights or on training."""

WIDTH = 78
"""columns of a table of checks, so that it fits a terminal"""

LESSONS = (
    "Softargmax and temperature",
    "Attention weights",
    "Multi-head attention",
    "Positions and order",
    "Attention and recurrence",
    "What attention can compute",
    "Blocks: feed-forward network, normalization, skip connections",
    "Images and convolutions",
    "Masks, training and evaluation",
)


@dataclass(frozen=True)
class Check:
    """A measured value and the range that the claim predicts for it."""

    name: str
    value: float
    expectation: str
    """the predicted range, printed after the value: `= 0.5 ± 1e-12`, `at least 0.9`"""
    passed: bool


def equals(name: str, value: float, expected: float, tolerance: float) -> Check:
    """|value - expected| <= tolerance"""
    expectation = f"= {expected:g} ± {tolerance:g}" if tolerance else f"= {expected:g}"
    return Check(name, value, expectation, abs(value - expected) <= tolerance)


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
    """A measured series, stored in the result so that the figure does not repeat minutes of training."""

    quantity: str
    """such as `digit accuracy`; curves of the same quantity are drawn in one panel"""
    name: str
    """the model or variant that was measured"""
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, repr=False)
class Result:
    """The measurements of one experiment."""

    checks: tuple[Check, ...]
    curves: tuple[Curve, ...] = ()

    def __post_init__(self) -> None:
        assert self.checks, "an experiment needs at least one check"

    @property
    def verdict(self) -> Verdict:
        return "holds" if all(check.passed and not math.isnan(check.value) for check in self.checks) else "refuted"

    def __repr__(self) -> str:
        return "\n".join([self.verdict, *check_lines(self.checks)])

    def _repr_html_(self) -> str:
        header = ["measured", "value", "predicted", "as predicted"]
        rows = [(c.name, f"{c.value:.6g}", c.expectation, "yes" if c.passed else "no") for c in self.checks]
        return html_table(header, rows, caption=f"Verdict: {self.verdict}", right={1})


def check_lines(checks: Sequence[Check]) -> list[str]:
    """A table with one row for each check: whether it passed, the measured value, the prediction and the name."""
    rows = [("pass" if check.passed else "FAIL", f"{check.value:.6g}", check.expectation) for check in checks]
    rows.insert(0, ("", "measured", "predicted"))
    _, size, predicted_size = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = []
    for (verdict, value, predicted), name in zip(rows, ["", *(check.name for check in checks)], strict=True):
        start = f"  {verdict:4}  {value:>{size}}  {predicted:{predicted_size}}  "
        first, *others = wrap(name, max(24, WIDTH - len(start))) or [""]
        lines += [(start + first).rstrip(), *(" " * len(start) + line for line in others)]
    return lines


@dataclass(frozen=True, kw_only=True, repr=False)
class Claim:
    """A statement about attention, with the experiment that tests it and the figure that shows it."""

    slug: str
    lesson: str
    """one of LESSONS"""
    statement: str
    misconception: str
    """the false statement that the experiment refutes"""
    formula: str
    """formulas are separated by a semicolon and two spaces"""
    run: Callable[..., Result]
    """keyword arguments with defaults only: the settings that a reader may change, `seed` among them"""
    figure: "Callable[..., Figure]"
    """takes some of the settings and, if it shows measured numbers, `result`; a figure whose `result` has no default
    can be drawn only after the experiment"""
    try_next: str
    """a command to run after this claim"""
    kind: Kind = "experiment"
    conditions: str = ""
    """assumptions of the statement: the training budget, the initialization, the mode"""
    minimum: Mapping[str, float] = field(default_factory=dict)
    """the smallest value of a setting, if it is not 1"""
    maximum: Mapping[str, float] = field(default_factory=dict)
    """the largest value of a setting, if it is lower than the general limit"""
    multiple_of: Mapping[str, int] = field(default_factory=dict)
    """divisors of settings, such as the width of a model with a fixed number of heads"""
    expected: Verdict = "holds"
    trains: bool = False
    """whether it trains models; `clearhead lab` skips such claims without --all"""
    seconds: int = 60
    """approximate run time of a claim that trains, with its default settings on one core"""

    @property
    def formulas(self) -> list[str]:
        return self.formula.split(";  ")

    def __repr__(self) -> str:
        return f"{self.slug} ({self.kind}): {self.statement}"

    def _repr_html_(self) -> str:
        rows = [
            (self.kind, self.statement),
            *([("conditions", self.conditions)] if self.conditions else []),
            ("formula", "\n".join(self.formulas)),
            ("misconception", self.misconception),
            ("settings", ", ".join(f"{name}={parameter.default}" for name, parameter in settings(self).items())),
        ]
        return html_table([], rows, caption=f"{self.slug}: {self.lesson}")


@dataclass(frozen=True, repr=False)
class Finding:
    """A claim and its result, None if it was not run. `changed` holds the settings that differ from their defaults."""

    claim: Claim
    result: Result | None
    changed: Mapping[str, object] = field(default_factory=dict)

    @property
    def checks(self) -> tuple[Check, ...]:
        return self.result.checks if self.result else ()

    @property
    def curves(self) -> tuple[Curve, ...]:
        return self.result.curves if self.result else ()

    @property
    def verdict(self) -> str:
        return self.result.verdict if self.result else "not run"

    def __repr__(self) -> str:
        return f"{self.claim!r}\n{self.result!r}" if self.result else f"{self.claim!r}\nnot run"

    def _repr_html_(self) -> str:
        return self.claim._repr_html_() + (self.result._repr_html_() if self.result else "<p>not run</p>")

    @property
    def is_expected(self) -> bool:
        """With the default settings the verdict must be the expected one; with others, either verdict is valid."""
        return self.result is None or bool(self.changed) or self.result.verdict == self.claim.expected


SETTING_HELP = {
    "seed": "seed of the random inputs and weights",
    "width": "model width, or number of channels",
    "depth": "number of layers",
    "num_heads": "number of heads; must divide the width",
    "num_tokens": "number of tokens in the sequence",
    "num_keys": "number of keys",
    "num_queries": "number of queries",
    "batch_size": "number of sequences in the batch",
    "src_length": "number of encoder tokens",
    "tgt_length": "number of decoder tokens",
    "num_nodes": "number of nodes of the graph",
    "edge_probability": "probability that two nodes are connected",
    "length": "sequence length",
    "image_size": "image height and width in pixels",
    "grid_size": "number of patches along each side of the image",
    "patch_size": "patch height and width in pixels",
    "stride": "stride of the convolution; 0 for the patch size",
    "kernel_size": "kernel size, an odd number",
    "context_length": "number of rows of the learned position table",
    "steps": "number of training steps",
    "num_seeds": "number of training runs, each with its own seed; results are their mean",
    "num_images": "number of training images",
    "crop": "padding of the random crops: the largest shift of a training image in pixels",
    "beta": "inverse temperature, a factor of the scores; may be inf",
    "alpha": "factor by which the key is scaled",
    "step_size": "length of the perturbation of the key",
    "mask_value": "number that is added to masked scores",
    "forget_bias": "added to the bias of the LSTM's forget gates",
    "dropout": "dropout probability",
}
"""help texts of numeric settings; boolean settings are described in the docstring of the experiment"""

MAX_SIZE = 10_000
"""limit of integer settings: larger values exhaust the memory and show nothing new"""
MAX_SEED = 2**32 - 1
MAX_NUMBER = 1e30
"""limit of float settings other than beta: larger values overflow in float32"""


def settings(claim: Claim) -> dict[str, inspect.Parameter]:
    """The settings that a reader may change: the numeric and boolean arguments of the experiment."""
    parameters = inspect.signature(claim.run).parameters.values()
    return {p.name: p for p in parameters if isinstance(p.default, int | float)}


def changed(claim: Claim, values: Mapping[str, object]) -> dict[str, object]:
    """The values that differ from the claim's defaults."""
    return {name: values[name] for name, p in settings(claim).items() if name in values and values[name] != p.default}


def check_settings(claim: Claim, changes: Mapping[str, object]) -> None:
    """Raises ValueError for settings with which the experiment would fail or be meaningless."""
    known = settings(claim)
    values: dict[str, Any] = {name: changes.get(name, parameter.default) for name, parameter in known.items()}
    for name, value in values.items():
        check_type(name, value, known[name].default)
        if not isinstance(value, bool):
            check_range(claim, name, value)
    for name, divisor in claim.multiple_of.items():
        if values[name] % divisor:
            larger = values[name] + divisor - values[name] % divisor
            raise ValueError(
                f"{name} of {claim.slug} must be a multiple of {divisor}, got {values[name]}; try {name}={larger}"
            )
    if "num_heads" in values:
        check_heads(values["width"], values["num_heads"])
    if "kernel_size" in values and values["kernel_size"] % 2 == 0:
        size = values["kernel_size"]
        raise ValueError(f"kernel_size of {claim.slug} must be odd, got {size}; try kernel_size={size + 1}")


def check_type(name: str, value: object, default: object) -> None:
    accepted = {bool: (bool,), int: (int,), float: (int, float)}[type(default)]
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
        expected = {bool: "True or False", int: "an integer", float: "a number"}[type(default)]
        raise ValueError(f"{name} must be {expected}, got {value!r} (default: {default!r})")


def check_range(claim: Claim, name: str, value: float) -> None:
    minimum, maximum = limits(claim, name)
    if not minimum <= value <= maximum:  # also refuses NaN
        raise ValueError(f"{name} of {claim.slug} must be from {minimum:.10g} to {maximum:.10g}, got {value!r}")


def limits(claim: Claim, name: str) -> tuple[float, float]:
    """The smallest and largest value of a setting."""
    default = settings(claim)[name].default
    if isinstance(default, int):
        minimum, maximum = float(min(1, default)), float(MAX_SEED if name == "seed" else MAX_SIZE)
    else:
        maximum = math.inf if name == "beta" else MAX_NUMBER
        minimum = -maximum
    return claim.minimum.get(name, minimum), claim.maximum.get(name, maximum)


@contextmanager
def readable_memory_errors() -> Iterator[None]:
    """Turns out-of-memory errors into a one-line ValueError that suggests smaller sizes."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "allocate" in str(error):
            raise ValueError("out of memory; try smaller sizes") from None
        raise
