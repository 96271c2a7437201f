"""Self-attention in five steps, with the numbers of each: project, score, scale and softargmax, weight, sum.

    five_steps(x=[[1, 0], [0, 1]], w_q=..., w_k=..., w_v=...)     from tokens and weights
    five_steps(q=..., k=..., v=...)                               from queries, keys and values
    five_steps(..., heads=2, w_o=..., mask=masks.causal(3))       several heads, an output projection, a mask

Tokens as rows. Dims: L length, Q queries, K keys, H heads, D head width of queries and keys, Dv of values,
E model width.
"""

import difflib
import io
import json
import math
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.data.user_files import MAX_MATRIX_BYTES, MAX_MATRIX_VALUES, read_user_file
from clearhead.messages import brief
from clearhead.models.mask_view import to_mask
from clearhead.nn import masks
from clearhead.nn.attention import check_attend, softargmax

PROJECTED = ("x", "w_q", "w_k", "w_v")
GIVEN = ("q", "k", "v")

EXAMPLE = {
    "x": [[1, 0, 1, 0], [0, 2, 0, 1], [1, 1, 0, 1]],
    "w_q": [[1, 0], [0, 1], [1, 1], [0, -1]],
    "w_k": [[0, 1], [1, 0], [1, 0], [1, 1]],
    "w_v": [[1, 0, 2], [0, 1, 0], [3, 0, 0], [0, 2, 1]],
}
"""three tokens of width 4, small enough to follow on paper"""

EXAMPLE_HEADS = {
    "x": EXAMPLE["x"],
    "w_q": [[1, 0, 0, 1], [0, 1, 1, 0], [1, 1, 0, 0], [0, -1, 1, 1]],
    "w_k": [[0, 1, 1, 0], [1, 0, 0, 1], [1, 0, 1, 1], [1, 1, 0, 0]],
    "w_v": [[1, 0, 2, 0], [0, 1, 0, 1], [3, 0, 0, 1], [0, 2, 1, 0]],
    "w_o": [[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]],
}
"""the same tokens with square weights, which 1, 2 or 4 heads share"""


MOST_NUMBERS = 2**22
"""of one step: far more than anybody reads"""
LARGEST = 1e30
"""products of larger numbers might not be finite"""


@dataclass(frozen=True)
class Panel:
    """One (rows, columns) matrix of a step, as it is shown: of one head, and in step 4 of one query, from 1."""

    name: str
    matrix: Tensor
    head: int | None = None
    query: int | None = None


@dataclass(frozen=True)
class Step:
    """One step: its formula and every matrix that it makes or needs, by name. Of several heads, (H, ...)."""

    number: int
    title: str
    formula: str
    words: str
    matrices: dict[str, Tensor]
    num_heads: int = 1

    def panels(self, name: str) -> Iterator[Panel]:
        """The matrix of that name, cut into two-dimensional ones."""
        matrix = self.matrices[name]
        by_query = name == "weighted"
        by_head = matrix.dim() > (3 if by_query else 2)
        for head, of_head in enumerate(matrix if by_head else [matrix], 1):
            for query, one in enumerate(of_head if by_query else [of_head], 1):
                yield Panel(name, one, head if by_head else None, query if by_query else None)

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
    w_o: Any = None,
    heads: int = 1,
    beta: float | None = None,
    causal: bool = False,
    mask: masks.Mask | None = None,
) -> list[Step]:
    """The steps from x (L,E), w_q, w_k (E,H D), w_v (E,H Dv), or from q (Q,H D), k (K,H D), v (K,H Dv), to z (Q,H Dv).

    Matrices are tensors or lists of rows; numbers are float64. Each head attends on its own slice of the columns; z is
    what `attend_reference` returns, the heads side by side. `mask` is bool, True = may attend, (Q,K) or (H,Q,K).
    """
    came = {"x": x, "w_q": w_q, "w_k": w_k, "w_v": w_v, "q": q, "k": k, "v": v}
    first = project({name: to_matrix(name, value) for name, value in came.items() if value is not None}, heads)
    q, k, v = (split_heads(name, first.matrices[name], heads) for name in GIVEN)
    check_room(q.shape[-2], k.shape[-2], first.matrices["v"].shape[-1], heads)
    mask = combined(mask, causal, q.shape[-2], k.shape[-2], heads)
    check_attend(q, k, v, mask, beta)
    beta = 1 / math.sqrt(q.shape[-1]) if beta is None else beta
    scores = q @ k.mT
    weights = softargmax(scores, beta, where=mask)
    weighted = weights[..., None] * v[..., None, :, :]  # (Q,K,1) * (1,K,Dv) -> (Q,K,Dv)
    per_head = " In each head." if heads > 1 else ""
    words = {
        "score": "How well the query of each row fits the key of each column.",
        "weight": "Each value times its weight: for each query, one row for each token.",
    }
    return [
        first,
        Step(2, "Score", "scores = q kᵀ", words["score"] + per_head, {"scores": scores}, heads),
        scale(scores, weights, mask, beta, heads),
        Step(4, "Weight the values", "weighted_ij = weights_ij v_j", words["weight"], {"weighted": weighted}, heads),
        add_up(weighted.sum(dim=-2), None if w_o is None else to_matrix("w_o", w_o), heads),
    ]


def check_room(n_queries: int, n_keys: int, columns: int, heads: int) -> None:
    """Step 4 has a row of values for each query and each key, step 2 a score for each of them and each head."""
    if (n := n_queries * n_keys * max(columns, heads)) > MOST_NUMBERS:
        raise ValueError(
            f"the steps may have {MOST_NUMBERS:,} numbers, got {n:,} from {n_queries} queries, {n_keys} keys and "
            f"{columns} columns of v; take fewer tokens"
        )


def split_heads(name: str, matrix: Tensor, heads: int) -> Tensor:
    """(L,H D) -> (H,L,D); a single head needs no dimension of its own."""
    if heads < 1 or matrix.shape[1] % heads:
        raise ValueError(f"heads must divide the {matrix.shape[1]} columns of {name}, got {heads} heads")
    return matrix if heads == 1 else matrix.unflatten(1, (heads, -1)).transpose(0, 1)


def combined(mask: masks.Mask | None, causal: bool, n_queries: int, n_keys: int, heads: int) -> Tensor | None:
    """The user's mask and the causal one."""
    if mask is not None and tuple(mask.shape) not in {(n_queries, n_keys), (heads, n_queries, n_keys)}:
        raise ValueError(
            f"the mask must have a row for each of the {n_queries} queries and a column for each of the {n_keys} keys, "
            f"got shape {tuple(mask.shape)}"
        )
    if mask is not None and heads == 1 and mask.dim() == 3:
        mask = mask[0]
    if causal:
        below = masks.causal(n_queries, n_keys)
        return below.dense() if mask is None else below & mask
    return None if mask is None else masks.dense(mask)


def project(given: Mapping[str, Tensor], heads: int) -> Step:
    parts = f" Each of the {heads} heads has its own columns of q, k and v." if heads > 1 else ""
    if set(given) == set(GIVEN):
        words = "Given: what each token asks for (q), what it offers (k), and what it says (v)." + parts
        return Step(1, "Project", "q, k, v given", words, {name: given[name] for name in GIVEN}, heads)
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
    for name in PROJECTED[1:]:
        if (n := len(x) * given[name].shape[1]) > MOST_NUMBERS:
            raise ValueError(
                f"the steps may have {MOST_NUMBERS:,} numbers, got {n:,} in x times {name}; take fewer tokens"
            )
    projected = {name: x @ given[f"w_{name}"] for name in GIVEN}
    words = "What each token asks for (q), what it offers (k), and what it says (v)." + parts
    return Step(1, "Project", "q = x W_Q,  k = x W_K,  v = x W_V", words, {**given, **projected}, heads)


def scale(scores: Tensor, weights: Tensor, mask: Tensor | None, beta: float, heads: int) -> Step:
    width = "head width" if heads > 1 else "query width"
    words = f"beta = {beta:.4g}, 1/sqrt({width}) unless given. Each row sums to 1."
    matrices = {"weights": weights}
    if math.isinf(beta):
        words = f"beta = {beta:g}: all weight goes to the {'largest' if beta > 0 else 'smallest'} score of each row."
    else:
        scaled = beta * scores
        matrices = {"scaled": scaled if mask is None else scaled.masked_fill(~mask, -math.inf), **matrices}
        words += "" if mask is None else " A dash: may not be seen, gets no weight."
    if mask is not None and not mask.any(-1).all():
        words += " A row that may attend to nothing gets zeros."
    return Step(3, "Scale and softargmax", "weights = softargmax(beta scores)", words, matrices, heads)


def add_up(z: Tensor, w_o: Tensor | None, heads: int) -> Step:
    """z of each head, the heads side by side, and what the output projection makes of them."""
    title, formula = "Sum", "z_i = sum over j of weighted_ij"
    words = "The rows of step 4 added up, for each query. In one formula: z = weights v."
    matrices = {"z": z}
    if heads > 1:
        dots = ", ..." if heads > 2 else ""
        title, formula = "Sum and concatenate", f"{formula};  z = [z of head 1{dots}, z of head {heads}]"
        words = "The rows of step 4 added up, for each query; then the heads side by side."
        matrices = {"z_per_head": z, "z": z.transpose(0, 1).flatten(1)}
    if w_o is not None:
        joined = matrices["z"]
        if len(w_o) != joined.shape[1]:
            raise ValueError(f"w_o must have a row for each of the {joined.shape[1]} columns of z, got {len(w_o)} rows")
        title, formula = f"{title}, then project", f"{formula};  output = z W_O"
        if (n := len(joined) * w_o.shape[1]) > MOST_NUMBERS:
            raise ValueError(
                f"the steps may have {MOST_NUMBERS:,} numbers, got {n:,} in z times w_o; take fewer tokens"
            )
        matrices |= {"w_o": w_o, "output": joined @ w_o}
    return Step(5, title, formula, words, matrices, heads)


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


def without_infinities(numbers: Any) -> Any:
    if isinstance(numbers, list):
        return [without_infinities(number) for number in numbers]
    return numbers if math.isfinite(numbers) else None


# The user's own matrices from a .json or .npz file, read without ever running what is in it.


MOST_HEAD_BYTES, BYTES_PER_VALUE = 16_384, 8
HEAD_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
"""by the version of numpy's format"""
KEYS = (*PROJECTED, *GIVEN, "w_o", "heads", "beta", "mask")


def read_steps_file(path: str | Path) -> dict[str, Any]:
    """What `five_steps` takes, by name."""
    path = Path(path)
    readers = {".json": read_json, ".npz": read_npz}
    if path.suffix not in readers:
        raise ValueError(f"a file of matrices must end in .json or .npz, got {path.name!r}; save it as one of them")
    try:
        content = readers[path.suffix](path)
    except OSError as error:
        raise ValueError(f"the file must be readable, got {path}: {error.strerror or error}; check its path") from None
    for key in content:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else "rename or remove it"
            raise ValueError(f"a file of matrices has the keys {', '.join(KEYS)}, got {key!r} in {path.name}; {hint}")
    mask, beta, heads = content.pop("mask", None), content.pop("beta", None), content.pop("heads", 1)
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
        raise ValueError(f"heads must be a whole number above 0, got {brief(heads)}")
    read = {"heads": heads, "beta": None if beta is None else to_beta(beta), "causal": mask == "causal"}
    if mask not in (None, "causal"):
        read["mask"] = rows_to_mask(mask, path.name)
    return content | read


def rows_to_mask(mask: Any, name: str) -> Tensor:
    """A mask written as rows of 0 and 1, or in its additive form."""
    if isinstance(mask, str):
        raise ValueError(f'mask must be "causal" or a matrix of 0 and 1, got {brief(mask)} in {name}')
    if isinstance(mask, list) and mask and all(isinstance(row, list) for row in mask):
        words = {"-inf": -math.inf}
        mask = [[words.get(n, n) if isinstance(n, str) else n for n in row] for row in mask]
    try:
        values = np.array(mask)
    except ValueError:
        values = np.array(None)
    if values.dtype.kind not in "biuf" or values.ndim not in (2, 3) or not values.size:
        raise ValueError(f"mask must be a matrix of 0 and 1 with a row for each query, got {brief(mask)} in {name}")
    return to_mask(values, "auto", f"mask in {name}")[0]


def read_json(path: Path) -> dict[str, Any]:
    data = read_user_file(path, MAX_MATRIX_BYTES)
    try:
        content = json.loads(data.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} must be JSON, got an error: {error}; correct it there") from None
    except RecursionError:
        raise ValueError(f"{path.name} must be lists of rows, got lists far too deep; correct it there") from None
    if not isinstance(content, dict):
        raise ValueError(f'{path.name} must name its matrices, got {brief(content)}; write {{"x": ..., "w_q": ...}}')
    return content


def read_npz(path: Path) -> dict[str, Any]:
    data = read_user_file(path, MAX_MATRIX_BYTES)
    try:
        check_arrays(data, path.name)
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return {name: arrays[name].tolist() for name in arrays.files}
    except (MatrixError, MemoryError):
        raise
    except Exception as error:  # what a damaged file makes zipfile, zlib and numpy say is of many kinds
        raise ValueError(
            f"{path.name} must be arrays of numbers saved by numpy.savez, got an error: {error}; save it again"
        ) from None


class MatrixError(ValueError):
    """Arrays that are refused, by a rule of ours."""


def check_arrays(data: bytes, name: str) -> None:
    """The shapes that the arrays of a .npz declare, and the sizes that the zip around them does: all of them are small
    enough before one of them is read, however well they are compressed."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members, values, size = archive.infolist(), 0, 0
        if len(members) > len(KEYS):
            raise MatrixError(f"a file of matrices has at most {len(KEYS)} arrays, got {len(members)} in {name}")
        for member in members:
            with archive.open(member) as file:
                head = io.BytesIO(file.read(MOST_HEAD_BYTES))  # numpy would read as much as a header claims to have
            reader = HEAD_READERS[np.lib.format.read_magic(head)]
            shape, _, dtype = reader(head)
            values += math.prod(shape)
            size += max(member.file_size - MOST_HEAD_BYTES, math.prod(shape) * dtype.itemsize)
            if values > MAX_MATRIX_VALUES or size > MAX_MATRIX_VALUES * BYTES_PER_VALUE:
                raise MatrixError(
                    f"a file of matrices may have {MAX_MATRIX_VALUES:,} numbers, got more in {name}: "
                    f"{member.filename.removesuffix('.npy')!r} has the shape {shape}"
                )


def to_beta(value: Any) -> float:
    """A number, or "inf" and "-inf", which JSON has no number for."""
    try:
        beta = float(value)
    except (TypeError, ValueError, OverflowError):
        beta = math.nan
    if isinstance(value, bool) or math.isnan(beta):
        raise ValueError(f"beta must be a number or inf, got {brief(value)}; leave it out for 1/sqrt(query width)")
    return beta
