"""Self-attention in five steps, with the numbers of each: project, score, scale and softargmax, weight, sum.

    five_steps(x=[[1, 0], [0, 1]], w_q=..., w_k=..., w_v=...)     from tokens and weights
    five_steps(q=..., k=..., v=...)                               from queries, keys and values

One head, tokens as rows. Dims: L length, Q queries, K keys, D query and key width, E model width.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.nn import masks
from clearhead.nn.attention import softargmax
from clearhead.nn.checks import check_attend

PROJECTED = ("x", "w_q", "w_k", "w_v")
GIVEN = ("q", "k", "v")

EXAMPLE = {
    "x": [[1, 0, 1, 0], [0, 2, 0, 1], [1, 1, 0, 1]],
    "w_q": [[1, 0], [0, 1], [1, 1], [0, -1]],
    "w_k": [[0, 1], [1, 0], [1, 0], [1, 1]],
    "w_v": [[1, 0, 2], [0, 1, 0], [3, 0, 0], [0, 2, 1]],
}
"""three tokens of width 4, small enough to follow on paper"""


LARGEST = 1e30
"""products of larger numbers might not be finite"""


@dataclass(frozen=True)
class Step:
    """One step: its formula and every matrix that it makes or needs, by name."""

    number: int
    title: str
    formula: str
    words: str
    matrices: dict[str, Tensor]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; what a mask hides is None."""
        return {
            "number": self.number,
            "title": self.title,
            "formula": self.formula,
            "words": self.words,
            "matrices": {
                name: {"shape": list(m.shape), "numbers": without_infinities(m.tolist())}
                for name, m in self.matrices.items()
            },
        }


def five_steps(
    *,
    x: Any = None,
    w_q: Any = None,
    w_k: Any = None,
    w_v: Any = None,
    q: Any = None,
    k: Any = None,
    v: Any = None,
    beta: float | None = None,
    causal: bool = False,
) -> list[Step]:
    """The steps from x (L,E), w_q, w_k (E,D), w_v (E,Dv), or from q (Q,D), k (K,D), v (K,Dv), to z (Q,Dv).

    Matrices are tensors or lists of rows; numbers are float64. z is what `attend_reference` answers.
    """
    came = {"x": x, "w_q": w_q, "w_k": w_k, "w_v": w_v, "q": q, "k": k, "v": v}
    first = project({name: to_matrix(name, value) for name, value in came.items() if value is not None})
    q, k, v = (first.matrices[name] for name in GIVEN)
    mask = masks.causal(len(q), len(k)).clone() if causal else None
    check_attend(q, k, v, mask, beta)
    beta = 1 / math.sqrt(q.shape[-1]) if beta is None else beta
    scores = q @ k.T
    weights = softargmax(scores, beta, where=mask)
    weighted = weights[:, :, None] * v  # (Q,K,1) * (K,Dv) -> (Q,K,Dv)
    words = {
        "score": "How well the query of each row fits the key of each column.",
        "weight": "Each value times its weight: for each query, one row for each token.",
        "sum": "The rows of step 4 added up, for each query. In one formula: z = weights v.",
    }
    return [
        first,
        Step(2, "Score", "scores = q kᵀ", words["score"], {"scores": scores}),
        scale(scores, weights, mask, beta),
        Step(4, "Weight the values", "weighted_ij = weights_ij v_j", words["weight"], {"weighted": weighted}),
        Step(5, "Sum", "z_i = sum over j of weighted_ij", words["sum"], {"z": weighted.sum(dim=1)}),
    ]


def project(given: Mapping[str, Tensor]) -> Step:
    if set(given) == set(GIVEN):
        words = "Given: what each token asks for (q), what it offers (k), and what it says (v)."
        return Step(1, "Project", "q, k, v given", words, {name: given[name] for name in GIVEN})
    if set(given) != set(PROJECTED):
        lacking = [name for name in (GIVEN if "x" not in given and "q" in given else PROJECTED) if name not in given]
        advice = f"add {', '.join(lacking)}" if lacking else "leave out q, k, v or x and its weights"
        raise ValueError(
            f"the five steps need x, w_q, w_k, w_v, or q, k, v, got {', '.join(given) or 'nothing'}; {advice}"
        )
    x = given["x"]
    for name in PROJECTED[1:]:
        if len(given[name]) != x.shape[1]:
            raise ValueError(
                f"{name} must have a row for each of the {x.shape[1]} numbers of a token, "
                f"got {name} {list(given[name].shape)} for x {list(x.shape)}; is it transposed?"
            )
    projected = {name: x @ given[f"w_{name}"] for name in GIVEN}
    words = "What each token asks for (q), what it offers (k), and what it says (v)."
    return Step(1, "Project", "q = x W_Q,  k = x W_K,  v = x W_V", words, {**given, **projected})


def scale(scores: Tensor, weights: Tensor, mask: Tensor | None, beta: float) -> Step:
    words = f"beta = {beta:.4g}, 1/sqrt(query width) unless given. Each row sums to 1."
    matrices = {"weights": weights}
    if math.isinf(beta):
        words = f"beta = {beta:g}: all weight goes to the {'largest' if beta > 0 else 'smallest'} score of each row."
    else:
        scaled = beta * scores
        matrices = {"scaled": scaled if mask is None else scaled.masked_fill(~mask, -math.inf), **matrices}
        words += "" if mask is None else " A dash: may not be seen, gets no weight."
    return Step(3, "Scale and softargmax", "weights = softargmax(beta scores)", words, matrices)


def to_matrix(name: str, value: Any) -> Tensor:
    """A (rows, columns) matrix of finite numbers in float64."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if not isinstance(value, list) or not value or not all(isinstance(row, list) and row for row in value):
        raise ValueError(f"{name} must be a list of rows of numbers, got {brief(value)}; try [[1, 0], [0, 1]]")
    for i, row in enumerate(value, 1):
        if len(row) != len(value[0]):
            raise ValueError(
                f"every row of {name} must be as long as its first, {len(value[0])} numbers, "
                f"got {len(row)} in row {i}; make it complete"
            )
        for number in row:
            if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) <= LARGEST:
                raise ValueError(
                    f"{name} must hold numbers of at most {LARGEST:g}, got {brief(number)} in row {i}; replace it"
                )
    return torch.tensor(value, dtype=torch.float64)


def brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def without_infinities(numbers: Any) -> Any:
    if isinstance(numbers, list):
        return [without_infinities(number) for number in numbers]
    return numbers if math.isfinite(numbers) else None
