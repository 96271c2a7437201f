"""Inside attention: heads, the scale of the scores, swapped projections, and the attention weights.

Shapes: B batch, H heads, Q queries, K keys, D head width.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from clearhead.insight.calls import AttentionCall
from clearhead.insight.capture import capture_attention, module_named
from clearhead.insight.doctor.module_under_test import (
    Inputs,
    Masks,
    ModuleUnderTest,
    isolated_state,
    output_tensors,
)
from clearhead.insight.doctor.report import Finding, count, join_names
from clearhead.insight.softmaxes import CASTS, MULTIPLICATIONS, SHAPE_OPS, SOFTMAXES
from clearhead.insight.trace import AttentionRecord, look
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
    def is_over_queries(self) -> bool:
        """Whether the softmax is over the queries: columns sum to 1, and rows do not."""
        sums = self.weights.sum(-2)
        return self.row_sums[0] < 1 - 1e-3 and torch.allclose(sums, torch.ones_like(sums), atol=1e-3)

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


HEADS = "heads"
ROUNDING = 1e-6
"""relative: experts, for example, multiply other groups of tokens when one token changes"""


def check_heads(module: ModuleUnderTest) -> Finding:
    """Every head must get a part of each token, and return it to the same token; no two heads may be the same."""
    inputs = module.sample_inputs(0)
    if not module.has_tokens:
        return Finding(HEADS, "not checked", "image inputs have no tokens to change")
    records, length = traced(module, inputs), module.length
    first = next((r for r in records if r.num_heads > 1 and r.v.shape[2] == r.num_queries == length), None)
    if first is None:
        return Finding(HEADS, "not checked", "no self-attention with several heads was found")
    for position in dict.fromkeys((length // 2, 0, length - 1)):
        changed = module.replace_tokens(inputs, module.plan.main, (slice(None), position))
        other = next(record for record in traced(module, changed) if record.name == first.name)
        for x, y in ((first.q, other.q), (first.k, other.k), (first.v, other.v)):
            if x is None or y is None:
                continue
            rows = ((x - y).abs() > ROUNDING * x.abs().max()).any(-1).any(0)  # (H,L)
            if (rows != rows[:1]).any():
                text = f"when token {position} changes, the heads of {first.name} change at different tokens"
                text += ": heads are split by view() or reshape() without transpose()"
                return Finding(HEADS, "fault", text)
    position = length // 2
    outputs = [rows_of_head(module, first.name, head, position) for head in range(min(first.num_heads, 4))]
    if len({tuple(rows) for rows in outputs if rows}) > 1:
        text = f"the weights of query {position} reach output {outputs[0]} by head 0 of {first.name}, but output "
        text += f"{outputs[1]} by head 1: heads are merged by view() or reshape() without transpose()"
        return Finding(HEADS, "fault", text)
    for record in records:
        weights = record.weights()
        is_uniform = (weights.amax(-1) - weights.amin(-1)).max() < 1e-6
        if record.num_heads > 1 and not is_uniform and torch.allclose(weights, weights[:, :1].expand_as(weights)):
            text = f"all {record.num_heads} heads of {record.name} have the same weights: are queries and keys shared?"
            return Finding(HEADS, "warning", text)
    return Finding(HEADS, "fine", f"heads get a part of each token and return it to the same token ({first.name})")


def traced(module: ModuleUnderTest, inputs: Inputs) -> list[AttentionRecord]:
    with torch.no_grad(), isolated_state(module.dtype, 0):
        try:
            return list(look(module.model, **module.arguments(inputs, {})).values())
        except LookupError:
            return []


def rows_of_head(module: ModuleUnderTest, name: str, head: int, query: int) -> list[int]:
    """The tokens of the attention module's output that change when one query of one head returns zeros."""
    outputs: list[Tensor] = []

    def receive(call_name: str, call: AttentionCall, kernel: str, note: str) -> Tensor:
        if call_name != name:
            return call.raw_out
        cleared = call.arrange_out(call.raw_out)[:, [head]].index_fill(2, torch.tensor(query), 0.0)
        return call.replace_heads([head], cleared)

    part = module_named(module.model, name)
    hook = part.register_forward_hook(lambda _, args, output: outputs.append(output_tensors(output)[0]))
    arguments = module.arguments(module.sample_inputs(0), {})
    try:
        with torch.no_grad(), isolated_state(module.dtype, 0):
            module.model(**arguments)
            with capture_attention(module.model, receive):
                module.model(**arguments)
    finally:
        hook.remove()
    before, after = outputs[0], outputs[len(outputs) // 2]
    if before.dim() != 3 or before.shape[1] != module.length:
        return []
    change = (before - after).abs().amax(-1).amax(0)
    return (change > ROUNDING * before.abs().max()).nonzero().flatten().tolist()


def check_weights(module: ModuleUnderTest) -> Finding:
    """The weights of a query sum to 1, or to 0 if it may attend to no key."""
    check, patterns, tracker = "attention weights", attention_patterns(module), record_scores(module)[0]
    for pattern in patterns:
        low, high = pattern.row_sums
        if pattern.is_masked_after_softmax:
            text = f"rows sum to {low:.2f} in {pattern.name}: the mask is applied after the softmax"
            return Finding(check, "fault", f"{text}; mask the scores before it")
        if abs(low - 1) > 1e-4 or abs(high - 1) > 1e-4:
            text = f"rows sum to {low:.2f} to {high:.2f} in {pattern.name}, not to 1"
            return Finding(check, "warning", f"{text}: are heads mixed, or is the softmax over the wrong axis?")
    if tracker.oddities:
        return Finding(check, "warning", f"{tracker.oddities[0]}: is that intended?")
    if not patterns:
        return Finding(check, "not checked", "no attention was found inside the module")
    return Finding(check, "fine", f"rows sum to 1 in {count(len(patterns), 'attention layer')}")


QUERY_MODULE = re.compile(r"(.*[._])?w?(q|query|queries)(_(proj|lin|linear|layer))?")
VALUE_MODULE = re.compile(r"(.*[._])?w?(v|value|values)(_(proj|lin|linear|layer))?")
KEY_MODULE = re.compile(r"(.*[._])?w?(k|key|keys)(_(proj|lin|linear|layer))?")


def check_scale(module: ModuleUnderTest) -> list[Finding]:
    """Warns about a scale other than 1/sqrt(D), and about keys in place of queries."""
    tracker, projections = record_scores(module)
    recorded = tracker.recorded
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
    values = {path: x for path, x in projections.items() if VALUE_MODULE.fullmatch(path.lower())}
    as_keys = [path for scores in recorded for path, x in values.items() if matches(x, scores.keys)]
    if as_keys:
        text = (
            f"the output of {as_keys[0]} is used as keys: are keys and values swapped? The same function, until weights"
        )
        findings.append(Finding("keys and queries", "warning", f"{text} come from elsewhere"))
    return findings or [Finding("scale", "fine", "scores are multiplied by 1/sqrt(head_dim)")]


def record_scores(module: ModuleUnderTest) -> "tuple[ScoreTracker, dict[str, Tensor]]":
    """The scores of one call, and the outputs of modules that are named after queries, keys and values."""
    projections: dict[str, Tensor] = {}

    def keep_projection(running: RunningModule, output: Any) -> None:
        if any(kind.fullmatch(running.path.lower()) for kind in (QUERY_MODULE, KEY_MODULE, VALUE_MODULE)):
            projections[running.path] = output

    stack = ModuleStack(module.model, on_exit=keep_projection)
    tracker = ScoreTracker(module.length, stack)
    with torch.no_grad(), isolated_state(module.dtype, 0), intercept(stack, tracker.handle):
        module.model(**module.arguments(module.sample_inputs(0), {}))
    return tracker, projections


def swapped_projections(scores: "Scores", projections: dict[str, Tensor]) -> tuple[str, str] | None:
    """(the key module that makes queries, the query module that makes keys), if they are swapped."""
    assert scores.queries is not None
    assert scores.keys is not None
    as_queries = (p for p, x in projections.items() if KEY_MODULE.fullmatch(p.lower()) and matches(x, scores.queries))
    as_keys = (p for p, x in projections.items() if QUERY_MODULE.fullmatch(p.lower()) and matches(x, scores.keys))
    key_module, query_module = next(as_queries, None), next(as_keys, None)
    return None if key_module is None or query_module is None else (key_module, query_module)


def matches(x: Any, y: Tensor | None) -> bool:
    """Whether two tensors have the same values up to order and one factor, as after a reshape, transpose or scale."""
    if not isinstance(x, Tensor) or y is None or x.numel() != y.numel() or not y.any():
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
    activation: str = ""
    """the function that the scores went through"""
    is_moved: bool = False
    """whether an operation may have moved the axis of the keys"""


ACTIVATIONS = {"sigmoid", "relu", "log_softmax", "tanh", "gelu", "silu", "softplus", "square"}
DIVISIONS = {"div", "div_", "true_divide", "divide", "__truediv__", "__itruediv__"}
MASKING = {"add", "__add__", "__radd__", "__iadd__", "add_", "masked_fill", "masked_fill_", "where", "sub", "__sub__"}


class ScoreTracker:
    """Records the scores of every softmax over num_keys keys.

    Tensors are followed through products with a number and changes of shape, so that queries, keys or scores may be
    scaled. Scores that cannot be followed are left out.
    """

    def __init__(self, num_keys: int, stack: ModuleStack):
        self.num_keys, self.stack = num_keys, stack
        self.followed = WeakTensorKeyDictionary()
        self.recorded: list[Scores] = []
        self.softmax_paths: list[str] = []
        """the modules that call a softmax or a fused kernel over this number of keys"""
        self.oddities: list[str] = []
        """descriptions of scores that do not go through one softmax over the keys"""
        self.softmaxed_twice: list[str] = []

    @property
    def path(self) -> str:
        return (self.stack.running[-1].path if self.stack.running else "") or "forward()"

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
            self.softmax_paths.append(self.path)
        elif name in MATMULS and len(tensors) == 2:
            left, right = tensors[::-1] if name == "__rmatmul__" else tensors
            scores, size = self.scores_of(left), (self.num_keys, self.num_keys)
            if scores.queries is not None and left.shape[-2:] == size and scores.activation != "softmax":
                how = f"go through {scores.activation}, not through softmax," if scores.activation else "lack a softmax"
                self.oddities.append(f"the scores {how} before they multiply the values in {self.path}")
            self.followed[out] = Scores(self.factor(left, right), left.shape[-1], left, right)
        elif name == "einsum" and len(tensors) == 2 and isinstance(operands[0], str):
            self.followed[out] = einsum_scores(operands[0], tensors, self.factor(*tensors))
        elif name in SOFTMAXES and tensors:
            self.follow_softmax(tensors[0], operands, kwargs, out)
        elif name in ACTIVATIONS and tensors and tensors[0] in self.followed:
            self.followed[out] = replace(self.scores_of(tensors[0]), activation=name)
        elif name in MULTIPLICATIONS | DIVISIONS and tensors:
            number = scalar_operand(operands)
            if number is not None:
                scores = self.scores_of(tensors[0])
                factor = scores.factor * (1 / number if name in DIVISIONS else number)
                self.followed[out] = replace(scores, factor=factor)
        elif name in SHAPE_OPS | CASTS | MASKING and tensors:
            source = next((x for x in tensors if x in self.followed), None)
            if source is not None and source is not out:
                scores = self.scores_of(source)
                self.followed[out] = replace(scores, is_moved=scores.is_moved or name in SHAPE_OPS)

    def follow_softmax(self, x: Tensor, operands: list[Any], kwargs: dict[str, Any], out: Tensor) -> None:
        scores, axis = self.scores_of(x), kwargs.get("dim", operands[1] if len(operands) > 1 else -1)
        if scores.activation == "softmax":
            self.softmaxed_twice.append(self.path)
            if scores.queries is not None:
                self.oddities.append(f"a softmax is applied twice to the scores of {self.path}")
        elif scores.queries is not None and out.shape[-1] == self.num_keys and out.dim() > 2:
            self.recorded.append(scores)
            self.softmax_paths.append(self.path)
            if isinstance(axis, int) and axis % out.dim() != out.dim() - 1 and not scores.is_moved:
                text = f"the softmax of {self.path} is over axis {axis} of the scores {tuple(out.shape)}"
                self.oddities.append(f"{text}, not over the keys")
        self.followed[out] = replace(scores, activation="softmax")

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
