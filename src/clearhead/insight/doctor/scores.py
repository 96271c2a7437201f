"""From queries and keys to the softmax: what the scores are multiplied by, and which operand is which.

A TorchFunctionMode follows tensors through products with a number and through changes of shape, so that it does not
matter whether queries, keys or scores are scaled. What it cannot follow it does not judge.
Dims: Q queries, K keys, D width of queries and keys.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from clearhead.insight.doctor.module_under_test import Inputs, Masks, ModuleUnderTest, undisturbed
from clearhead.insight.doctor.report import Finding, counted, listed
from clearhead.insight.look import AttentionRecord, look
from clearhead.insight.softmaxes import CASTS, MULTIPLICATIONS, SHAPE_OPS, SOFTMAXES
from clearhead.interception import MATMULS, SDPA, ModuleStack, RunningModule, intercept

DIVISIONS = {"div", "div_", "true_divide", "divide", "__truediv__", "__itruediv__"}
HIDING = {"add", "__add__", "__radd__", "__iadd__", "add_", "masked_fill", "masked_fill_", "where", "sub", "__sub__"}
QUERY_NAME = re.compile(r"(.*[._])?w?(q|query|queries)(_(proj|lin|linear|layer))?")
KEY_NAME = re.compile(r"(.*[._])?w?(k|key|keys)(_(proj|lin|linear|layer))?")


@dataclass(frozen=True, eq=False)
class Scored:
    """Scores before their softmax, so far; or, without queries and keys, a tensor times `factor`."""

    factor: float = 1.0
    width: int = 0
    """of a query and a key"""
    queries: Tensor | None = None
    keys: Tensor | None = None


class Scores:
    """Collects the scores of each softmax over keys, as many as n_keys."""

    def __init__(self, n_keys: int):
        self.n_keys = n_keys
        self.followed = WeakTensorKeyDictionary()
        self.found: list[Scored] = []

    def handle(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            self.follow(name, [*args, *kwargs.values()], kwargs, out)
        return out

    def follow(self, name: str, operands: list[Any], kwargs: dict[str, Any], out: Tensor) -> None:
        tensors = [x for x in operands if isinstance(x, Tensor) and x.dim()]
        if name == SDPA:
            scale = kwargs.get("scale") or 1 / math.sqrt(tensors[0].shape[-1])
            factor = scale * self.factor(tensors[0], tensors[1])
            self.found.append(Scored(factor, tensors[0].shape[-1], tensors[0], tensors[1]))
        elif name in MATMULS and len(tensors) == 2:
            left, right = tensors[::-1] if name == "__rmatmul__" else tensors
            self.followed[out] = Scored(self.factor(left, right), left.shape[-1], left, right)
        elif name == "einsum" and len(tensors) == 2 and isinstance(operands[0], str):
            self.followed[out] = of_einsum(operands[0], tensors, self.factor(*tensors))
        elif name in SOFTMAXES and tensors and tensors[0] in self.followed:
            scored = self.of(tensors[0])
            if scored.queries is not None and out.shape[-1] == self.n_keys and out.dim() > 2:
                self.found.append(scored)
        elif name in MULTIPLICATIONS | DIVISIONS and tensors:
            number = number_of(operands)
            if number is not None:
                scored = self.of(tensors[0])
                self.followed[out] = replace(
                    scored, factor=scored.factor * (1 / number if name in DIVISIONS else number)
                )
        elif name in SHAPE_OPS | CASTS | HIDING and tensors:
            source = next((x for x in tensors if x in self.followed), None)
            if source is not None and source is not out:
                self.followed[out] = self.of(source)

    def factor(self, left: Tensor, right: Tensor) -> float:
        return self.of(left).factor * self.of(right).factor

    def of(self, x: Tensor) -> Scored:
        return self.followed.get(x, Scored())


def of_einsum(equation: str, tensors: list[Tensor], factor: float) -> Scored:
    """Keys are those whose places are the last axis of the result."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or len(terms) != 2 or "." in equation:
        return Scored()
    summed = [i for i, letter in enumerate(terms[0]) if letter in terms[1] and letter not in out]
    width = tensors[0].shape[summed[0]] if len(summed) == 1 else 0
    queries, keys = tensors if out[-1] in terms[1] else tensors[::-1]
    return Scored(factor, width, queries, keys) if width else Scored()


def number_of(operands: list[Any]) -> float | None:
    """The number that a tensor is multiplied with or divided by, if it is one."""
    for x in operands:
        if isinstance(x, int | float) and not isinstance(x, bool) and x:
            return float(x)
        if isinstance(x, Tensor) and x.numel() == 1 and x.dim() == 0 and x.item():
            return float(x.item())
    return None


def check_scores(subject: ModuleUnderTest) -> list[Finding]:
    """Two things that work, but are seldom meant: another scale, and keys in the place of queries."""
    found, outputs = watched(subject)
    if not found:
        return [Finding("scale", "not checked", "no product of queries and keys was seen before a softmax")]
    unusual: dict[str, None] = {}
    for scored in found:
        width = scored.width
        if not math.isclose(scored.factor, 1 / math.sqrt(width), rel_tol=0.01):
            text = f"scores are multiplied by {scored.factor:.3g}, not by 1/sqrt({width}) = {width**-0.5:.3g}"
            unusual[text] = None
    findings = []
    if unusual:
        text = f"{listed(list(unusual), 1)}: on purpose, or forgotten? softmax saturates or flattens with it"
        findings.append(Finding("scale", "warning", text))
    swapped = [names for scored in found if (names := swapped_names(scored, outputs))]
    if swapped:
        text = f"what {swapped[0][0]} makes asks, and {swapped[0][1]} answers"
        why = "the same function by other names, until weights come from elsewhere or the two are masked differently"
        findings.append(Finding("keys and queries", "warning", f"{text}: {why}"))
    return findings or [Finding("scale", "fine", "scores are multiplied by 1/sqrt(width of a head)")]


def watched(subject: ModuleUnderTest) -> tuple[list[Scored], dict[str, Tensor]]:
    """The scores of one call, and what modules named after queries and keys returned."""
    outputs: dict[str, Tensor] = {}

    def keep_output(module: RunningModule, output: Any) -> None:
        if QUERY_NAME.fullmatch(module.path.lower()) or KEY_NAME.fullmatch(module.path.lower()):
            outputs[module.path] = output

    scores, stack = Scores(subject.length), ModuleStack(subject.model, on_exit=keep_output)
    with torch.no_grad(), undisturbed(subject.dtype, 0), intercept(stack, scores.handle):
        subject.model(**subject.arguments(subject.draw(0), {}))
    return scores.found, outputs


def swapped_names(scored: Scored, outputs: dict[str, Tensor]) -> tuple[str, str] | None:
    """The two modules by whose names keys stand where queries should, if so."""
    assert scored.queries is not None
    assert scored.keys is not None
    asking = next((p for p, x in outputs.items() if KEY_NAME.fullmatch(p.lower()) and alike(x, scored.queries)), None)
    asked = next((p for p, x in outputs.items() if QUERY_NAME.fullmatch(p.lower()) and alike(x, scored.keys)), None)
    return None if asking is None or asked is None else (asking, asked)


def alike(x: Any, y: Tensor) -> bool:
    """The same numbers in any order, up to one factor: a reshape, a transposition, a scale. (One head of several is
    not found.)"""
    if not isinstance(x, Tensor) or x.numel() != y.numel() or not y.any():
        return False
    x, y = (z.flatten().sort().values / z.norm() for z in (x, y))
    return torch.allclose(x, y, rtol=1e-6, atol=1e-9)


# What the attention weights themselves show, where they can be seen: how far they reach, and whether rows sum to 1.
#
# Dims: B batch, H heads, Q queries, K keys.


NAME = "weights"


@dataclass(frozen=True, eq=False)
class AttentionPattern:
    """The weights of one attention layer."""

    address: str
    weights: Tensor
    is_torch_nn: bool
    is_finite: bool

    @property
    def reach(self) -> str:
        """causal, one too far, not itself, inverted, open, or other: which keys have any weight, by place."""
        n_queries, n_keys = self.weights.shape[-2:]
        if n_queries != n_keys or n_keys < 3:
            return "other"
        sees = (self.weights > 0).flatten(0, 1).any(0)
        full = torch.ones_like(sees)
        if sees.equal(full.tril()):
            return "causal"
        if sees.equal(full.tril(1)):
            return "one too far"
        if sees[1:].equal(full.tril(-1)[1:]):  # the first row sees nothing, or whatever that is turned into
            return "not itself"
        if sees[:-1].equal(full.triu(1)[:-1]) or sees.equal(full.triu()):
            return "inverted"
        return "open" if sees.all() else "other"

    @property
    def sees_not_itself(self) -> bool:
        """Whether no query has any weight on its own token; the first is left out, which then sees none."""
        n_queries, n_keys = self.weights.shape[-2:]
        return n_queries == n_keys > 2 and not bool(self.weights.diagonal(dim1=-2, dim2=-1)[..., 1:].any())

    @property
    def is_masked_late(self) -> bool:
        """Some keys weigh exactly nothing, and what they would have had is missing from the row's sum."""
        sums = self.weights.sum(-1)
        short = (sums > 0) & (sums < 1 - 1e-4)
        has_holes = (self.weights == 0).any(-1)
        return bool((short & has_holes).any()) and not bool((short & ~has_holes).any())

    @property
    def sums(self) -> tuple[float, float]:
        """The smallest and the largest sum of a row that sees something."""
        sums = self.weights.sum(-1)
        sums = sums[sums != 0]
        return (sums.min().item(), sums.max().item()) if sums.numel() else (1.0, 1.0)


def patterns(
    subject: ModuleUnderTest, masks: Masks | None = None, inputs: Inputs | None = None
) -> list[AttentionPattern]:
    """All attention that can be seen in one ordinary call; none if it is hidden, or if the call fails."""
    arguments = subject.arguments(subject.draw(0) if inputs is None else inputs, masks or {})
    with torch.no_grad(), undisturbed(subject.dtype, 0):
        try:
            seen = look(subject.model, **arguments)
        except Exception:  # no attention, or a module that does not like to be watched: other checks go on
            return []
        return [patterns_of(layer) for layer in seen.values()]


def patterns_of(layer: AttentionRecord) -> AttentionPattern:
    is_finite = bool(layer.out.isfinite().all())
    return AttentionPattern(layer.name, layer.weights(), layer.kernel == "nn.MultiheadAttention", is_finite)


def check_rows(subject: ModuleUnderTest) -> Finding:
    """The weights of a query sum to 1, or to 0 where it may see nothing."""
    layers = patterns(subject)
    if not layers:
        return Finding(NAME, "not checked", "no attention was seen inside; clearhead.look says what it looks for")
    for layer in layers:
        low, high = layer.sums
        if layer.is_masked_late:
            text = f"at {layer.address} rows of weights sum to {low:.2f}: the mask comes after the softmax"
            return Finding(NAME, "fault", f"{text}; hide scores before it")
        if abs(low - 1) > 1e-4 or abs(high - 1) > 1e-4:
            text = f"at {layer.address} rows of weights sum to {low:.2f} to {high:.2f}, not 1"
            return Finding(NAME, "warning", f"{text}: heads that are mixed, or a softmax over the wrong axis?")
    return Finding(NAME, "fine", f"rows of weights sum to 1 in {counted(len(layers), 'attention layer')}")
