"""Internals of attention: the scale of the scores, swapped queries and keys, and the attention weights.

Shapes: B batch, H heads, Q queries, K keys, D head width.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from clearhead.insight.doctor.module_under_test import Inputs, Masks, ModuleUnderTest, isolated_state
from clearhead.insight.doctor.report import Finding, count, join_names
from clearhead.insight.softmaxes import CASTS, MULTIPLICATIONS, SHAPE_OPS, SOFTMAXES
from clearhead.insight.trace import look
from clearhead.interception import MATMULS, SDPA, ModuleStack, RunningModule, intercept

Visibility = Literal["causal", "sees next", "excludes self", "inverted", "full", "other"]


@dataclass(frozen=True, eq=False)
class AttentionPattern:
    """The attention weights (B,H,Q,K) of one layer."""

    name: str
    weights: Tensor
    is_torch_nn: bool
    is_finite: bool

    @property
    def visibility(self) -> Visibility:
        """Which keys have a positive weight, by position."""
        num_queries, num_keys = self.weights.shape[-2:]
        if num_queries != num_keys or num_keys < 3:
            return "other"
        visible = (self.weights > 0).flatten(0, 1).any(0)
        full = torch.ones_like(visible)
        if visible.equal(full.tril()):
            return "causal"
        if visible.equal(full.tril(1)):
            return "sees next"
        if visible[1:].equal(full.tril(-1)[1:]):  # the first row has no visible key, so its weights can be anything
            return "excludes self"
        if visible[:-1].equal(full.triu(1)[:-1]) or visible.equal(full.triu()):
            return "inverted"
        return "full" if visible.all() else "other"

    @property
    def excludes_self(self) -> bool:
        """Whether no query gives weight to its own token, ignoring the first query, which then has no visible key."""
        num_queries, num_keys = self.weights.shape[-2:]
        return num_queries == num_keys > 2 and not bool(self.weights.diagonal(dim1=-2, dim2=-1)[..., 1:].any())

    @property
    def is_masked_after_softmax(self) -> bool:
        """Whether rows with zeros, and only those, sum to less than 1."""
        sums = self.weights.sum(-1)
        is_short = (sums > 0) & (sums < 1 - 1e-4)
        has_zeros = (self.weights == 0).any(-1)
        return bool((is_short & has_zeros).any()) and not bool((is_short & ~has_zeros).any())

    @property
    def row_sums(self) -> tuple[float, float]:
        """The smallest and the largest sum of a row with any visible key."""
        sums = self.weights.sum(-1)
        sums = sums[sums != 0]
        return (sums.min().item(), sums.max().item()) if sums.numel() else (1.0, 1.0)


def attention_patterns(
    module: ModuleUnderTest, masks: Masks | None = None, inputs: Inputs | None = None
) -> list[AttentionPattern]:
    """All attention that clearhead.look finds in one call; none if the call fails."""
    arguments = module.arguments(module.sample_inputs(0) if inputs is None else inputs, masks or {})
    with torch.no_grad(), isolated_state(module.dtype, 0):
        try:
            trace = look(module.model, **arguments)
        except Exception:  # no attention, or a module that cannot be traced; other checks go on
            return []
        return [
            AttentionPattern(
                name=record.name,
                weights=record.weights(),
                is_torch_nn=record.kernel == "nn.MultiheadAttention",
                is_finite=bool(record.out.isfinite().all()),
            )
            for record in trace.values()
        ]


def check_weights(module: ModuleUnderTest) -> Finding:
    """The weights of a query sum to 1, or to 0 if it may attend to no key."""
    check, patterns = "attention weights", attention_patterns(module)
    if not patterns:
        return Finding(check, "not checked", "no attention was found inside the module")
    for pattern in patterns:
        low, high = pattern.row_sums
        if pattern.is_masked_after_softmax:
            text = f"rows sum to {low:.2f} in {pattern.name}: the mask is applied after the softmax"
            return Finding(check, "fault", f"{text}; mask the scores before it")
        if abs(low - 1) > 1e-4 or abs(high - 1) > 1e-4:
            text = f"rows sum to {low:.2f} to {high:.2f} in {pattern.name}, not to 1"
            return Finding(check, "warning", f"{text}: are heads mixed, or is the softmax over the wrong axis?")
    return Finding(check, "fine", f"rows sum to 1 in {count(len(patterns), 'attention layer')}")


QUERY_MODULE = re.compile(r"(.*[._])?w?(q|query|queries)(_(proj|lin|linear|layer))?")
KEY_MODULE = re.compile(r"(.*[._])?w?(k|key|keys)(_(proj|lin|linear|layer))?")


def check_scale(module: ModuleUnderTest) -> list[Finding]:
    """Warns about a scale other than 1/sqrt(D), and about keys in place of queries."""
    recorded, projections = record_scores(module)
    if not recorded:
        return [Finding("scale", "not checked", "no product of queries and keys was found before a softmax")]
    findings = []
    unusual = [
        f"scores are multiplied by {scores.factor:.3g}, not by 1/sqrt({scores.width}) = {scores.width**-0.5:.3g}"
        for scores in recorded
        if not math.isclose(scores.factor, 1 / math.sqrt(scores.width), rel_tol=0.01)
    ]
    if unusual:
        text = f"{join_names(list(dict.fromkeys(unusual)), 1)}: is that intended? The softmax may saturate or flatten"
        findings.append(Finding("scale", "warning", text))
    swapped = [names for scores in recorded if (names := swapped_projections(scores, projections))]
    if swapped:
        text = f"the output of {swapped[0][0]} is used as queries, and that of {swapped[0][1]} as keys"
        consequence = "the same function, until weights come from elsewhere or masks treat the two differently"
        findings.append(Finding("keys and queries", "warning", f"{text}: {consequence}"))
    return findings or [Finding("scale", "fine", "scores are multiplied by 1/sqrt(head_dim)")]


def record_scores(module: ModuleUnderTest) -> "tuple[list[Scores], dict[str, Tensor]]":
    """The scores of one call, and the outputs of modules that are named after queries and keys."""
    projections: dict[str, Tensor] = {}

    def keep_projection(running: RunningModule, output: Any) -> None:
        if QUERY_MODULE.fullmatch(running.path.lower()) or KEY_MODULE.fullmatch(running.path.lower()):
            projections[running.path] = output

    tracker, stack = ScoreTracker(module.length), ModuleStack(module.model, on_exit=keep_projection)
    with torch.no_grad(), isolated_state(module.dtype, 0), intercept(stack, tracker.handle):
        module.model(**module.arguments(module.sample_inputs(0), {}))
    return tracker.recorded, projections


def swapped_projections(scores: "Scores", projections: dict[str, Tensor]) -> tuple[str, str] | None:
    """(the key module that makes queries, the query module that makes keys), if they are swapped."""
    assert scores.queries is not None
    assert scores.keys is not None
    as_queries = (p for p, x in projections.items() if KEY_MODULE.fullmatch(p.lower()) and matches(x, scores.queries))
    as_keys = (p for p, x in projections.items() if QUERY_MODULE.fullmatch(p.lower()) and matches(x, scores.keys))
    key_module, query_module = next(as_queries, None), next(as_keys, None)
    return None if key_module is None or query_module is None else (key_module, query_module)


def matches(x: Any, y: Tensor) -> bool:
    """Whether two tensors have the same values up to order and one factor, as after a reshape, transpose or scale."""
    if not isinstance(x, Tensor) or x.numel() != y.numel() or not y.any():
        return False
    x, y = (z.flatten().sort().values / z.norm() for z in (x, y))
    return torch.allclose(x, y, rtol=1e-6, atol=1e-9)


@dataclass(frozen=True, eq=False)
class Scores:
    """factor * q kᵀ so far; without queries and keys, any tensor times `factor`."""

    factor: float = 1.0
    width: int = 0
    """D"""
    queries: Tensor | None = None
    keys: Tensor | None = None


DIVISIONS = {"div", "div_", "true_divide", "divide", "__truediv__", "__itruediv__"}
MASKING = {"add", "__add__", "__radd__", "__iadd__", "add_", "masked_fill", "masked_fill_", "where", "sub", "__sub__"}


class ScoreTracker:
    """Records the scores of every softmax over num_keys keys.

    Tensors are followed through products with a number and changes of shape, so that queries, keys or scores may be
    scaled. Scores that cannot be followed are left out.
    """

    def __init__(self, num_keys: int):
        self.num_keys = num_keys
        self.followed = WeakTensorKeyDictionary()
        self.recorded: list[Scores] = []

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
            self.recorded.append(Scores(factor, tensors[0].shape[-1], tensors[0], tensors[1]))
        elif name in MATMULS and len(tensors) == 2:
            left, right = tensors[::-1] if name == "__rmatmul__" else tensors
            self.followed[out] = Scores(self.factor(left, right), left.shape[-1], left, right)
        elif name == "einsum" and len(tensors) == 2 and isinstance(operands[0], str):
            self.followed[out] = einsum_scores(operands[0], tensors, self.factor(*tensors))
        elif name in SOFTMAXES and tensors and tensors[0] in self.followed:
            scores = self.scores_of(tensors[0])
            if scores.queries is not None and out.shape[-1] == self.num_keys and out.dim() > 2:
                self.recorded.append(scores)
        elif name in MULTIPLICATIONS | DIVISIONS and tensors:
            number = scalar_operand(operands)
            if number is not None:
                scores = self.scores_of(tensors[0])
                factor = scores.factor * (1 / number if name in DIVISIONS else number)
                self.followed[out] = replace(scores, factor=factor)
        elif name in SHAPE_OPS | CASTS | MASKING and tensors:
            source = next((x for x in tensors if x in self.followed), None)
            if source is not None and source is not out:
                self.followed[out] = self.scores_of(source)

    def factor(self, left: Tensor, right: Tensor) -> float:
        return self.scores_of(left).factor * self.scores_of(right).factor

    def scores_of(self, x: Tensor) -> Scores:
        return self.followed.get(x, Scores())


def einsum_scores(equation: str, tensors: list[Tensor], factor: float) -> Scores:
    """The operand that has the last axis of the result holds the keys."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or len(terms) != 2 or "." in equation:
        return Scores()
    summed = [i for i, letter in enumerate(terms[0]) if letter in terms[1] and letter not in out]
    width = tensors[0].shape[summed[0]] if len(summed) == 1 else 0
    queries, keys = tensors if out[-1] in terms[1] else tensors[::-1]
    return Scores(factor, width, queries, keys) if width else Scores()


def scalar_operand(operands: list[Any]) -> float | None:
    """The nonzero number among the operands of a product or a division."""
    for x in operands:
        if isinstance(x, int | float) and not isinstance(x, bool) and x:
            return float(x)
        if isinstance(x, Tensor) and x.numel() == 1 and x.dim() == 0 and x.item():
            return float(x.item())
    return None
