"""Self-attention in five steps with all numbers: project, score, scale and softargmax, weight, sum.

    five_steps(x=[[1, 0], [0, 1]], w_q=..., w_k=..., w_v=...)     from tokens and weights
    five_steps(q=..., k=..., v=...)                               from queries, keys and values
    five_steps(..., heads=2, w_o=..., mask=masks.causal(3))       several heads, an output projection, a mask

`read_steps_file` reads these arguments from a .json or .npz file, without pickle. Tokens are rows.
Dims: L length, Q queries, K keys, H heads, D head width of queries and keys, Dv of values, E model width.
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
from clearhead.messages import short_repr
from clearhead.models.mask_view import to_mask
from clearhead.nn import masks
from clearhead.nn.attention import check_attend, softargmax

PROJECTED = ("x", "w_q", "w_k", "w_v")
QKV = ("q", "k", "v")

EXAMPLE = {
    "x": [[1, 0, 1, 0], [0, 2, 0, 1], [1, 1, 0, 1]],
    "w_q": [[1, 0], [0, 1], [1, 1], [0, -1]],
    "w_k": [[0, 1], [1, 0], [1, 0], [1, 1]],
    "w_v": [[1, 0, 2], [0, 1, 0], [3, 0, 0], [0, 2, 1]],
}
"""three tokens of width 4, small enough to check by hand"""

EXAMPLE_HEADS = {
    "x": EXAMPLE["x"],
    "w_q": [[1, 0, 0, 1], [0, 1, 1, 0], [1, 1, 0, 0], [0, -1, 1, 1]],
    "w_k": [[0, 1, 1, 0], [1, 0, 0, 1], [1, 0, 1, 1], [1, 1, 0, 0]],
    "w_v": [[1, 0, 2, 0], [0, 1, 0, 1], [3, 0, 0, 1], [0, 2, 1, 0]],
    "w_o": [[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]],
}
"""the same tokens with square weights, for 1, 2 or 4 heads"""


MAX_VALUES = 2**22
"""the number of values in one step"""
LARGEST = 1e30
"""products of larger values might overflow"""
NAMES = {"w_q": "W_Q", "w_k": "W_K", "w_v": "W_V", "w_o": "W_O", "z_per_head": "z"}
"""names in titles, where they differ"""


@dataclass(frozen=True)
class Panel:
    """A matrix (rows, columns) of a step as it is shown, of one head and, in step 4, of one query, numbered from 1."""

    name: str
    matrix: Tensor
    head: int | None = None
    query: int | None = None

    @property
    def title(self) -> str:
        """For example "scores", "scores, head 2", "query 1" or "head 2, query 1"."""
        name = [] if self.query else [NAMES.get(self.name, self.name)]
        head = [f"head {self.head}"] if self.head else []
        query = [f"query {self.query}"] if self.query else []
        return ", ".join([*name, *head, *query])


@dataclass(frozen=True)
class Step:
    """One step: its formula, an explanation, and its matrices by name, with a leading axis H for several heads."""

    number: int
    title: str
    formula: str
    explanation: str
    matrices: dict[str, Tensor]
    num_heads: int = 1

    def panels(self, name: str) -> Iterator[Panel]:
        """The matrix of that name, split into two-dimensional panels."""
        matrix = self.matrices[name]
        by_query = name == "weighted"
        by_head = matrix.dim() > (3 if by_query else 2)
        for head, head_matrix in enumerate(matrix if by_head else [matrix], 1):
            for query, panel in enumerate(head_matrix if by_query else [head_matrix], 1):
                yield Panel(name, panel, head if by_head else None, query if by_query else None)

    def to_dict(self) -> dict[str, Any]:
        """Data for JSON, where masked scores are None."""
        return {
            "number": self.number,
            "title": self.title,
            "formula": self.formula,
            "explanation": self.explanation,
            "matrices": {
                name: {"shape": list(m.shape), "values": without_infinities(m.tolist())}
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

    Matrices are tensors or lists of rows; the arithmetic is float64. Each head has its own slice of the columns; z is
    the output of `attend_reference` with the heads concatenated. `mask` is bool, True = may attend, (Q,K) or (H,Q,K).
    """
    arguments = {"x": x, "w_q": w_q, "w_k": w_k, "w_v": w_v, "q": q, "k": k, "v": v}
    first = project({name: to_matrix(name, value) for name, value in arguments.items() if value is not None}, heads)
    q, k, v = (split_heads(name, first.matrices[name], heads) for name in QKV)
    check_size(q.shape[-2], k.shape[-2], first.matrices["v"].shape[-1], heads)
    mask = combine_masks(mask, causal, q.shape[-2], k.shape[-2], heads)
    check_attend(q, k, v, mask, beta)
    beta = 1 / math.sqrt(q.shape[-1]) if beta is None else beta
    scores = q @ k.mT
    weights = softargmax(scores, beta, where=mask)
    weighted = weights[..., None] * v[..., None, :, :]  # (Q,K,1) * (1,K,Dv) -> (Q,K,Dv)
    per_head = " Each head has its own scores." if heads > 1 else ""
    text = {
        "score": "The dot product of the query of each row and the key of each column.",
        "weight": "Each value times its weight: one matrix per query, with one row per key.",
    }
    return [
        first,
        Step(2, "Score", "scores = q kᵀ", text["score"] + per_head, {"scores": scores}, heads),
        scale(scores, weights, mask, beta, heads),
        Step(4, "Weight the values", "weighted_ij = weights_ij v_j", text["weight"], {"weighted": weighted}, heads),
        sum_values(weighted.sum(dim=-2), None if w_o is None else to_matrix("w_o", w_o), heads),
    ]


def check_size(num_queries: int, num_keys: int, columns: int, heads: int) -> None:
    """Step 4 has Q x K rows of values, and step 2 has H x Q x K scores."""
    if (n := num_queries * num_keys * max(columns, heads)) > MAX_VALUES:
        raise ValueError(
            f"a step may have at most {MAX_VALUES:,} values, got {n:,} from {num_queries} queries, {num_keys} keys and "
            f"{columns} columns of v"
        )


def split_heads(name: str, matrix: Tensor, heads: int) -> Tensor:
    """(L,H D) -> (H,L,D); a single head has no axis of its own."""
    if heads < 1 or matrix.shape[1] % heads:
        raise ValueError(f"heads must divide the {matrix.shape[1]} columns of {name}, got {heads} heads")
    return matrix if heads == 1 else matrix.unflatten(1, (heads, -1)).transpose(0, 1)


def combine_masks(mask: masks.Mask | None, causal: bool, num_queries: int, num_keys: int, heads: int) -> Tensor | None:
    """The given mask and the causal mask."""
    if mask is not None and tuple(mask.shape) not in {(num_queries, num_keys), (heads, num_queries, num_keys)}:
        raise ValueError(
            f"the mask must have one row for each of {num_queries} queries and one column for each of {num_keys} keys, "
            f"got shape {tuple(mask.shape)}"
        )
    if mask is not None and heads == 1 and mask.dim() == 3:
        mask = mask[0]
    if causal:
        below = masks.causal(num_queries, num_keys)
        return below.dense() if mask is None else below & mask
    return None if mask is None else masks.dense(mask)


def project(matrices: Mapping[str, Tensor], heads: int) -> Step:
    heads_note = f" Each of the {heads} heads has its own columns of q, k and v." if heads > 1 else ""
    if set(matrices) == set(QKV):
        text = "Queries, keys and values are given." + heads_note
        return Step(1, "Project", "q, k, v given", text, {name: matrices[name] for name in QKV}, heads)
    if set(matrices) != set(PROJECTED):
        required = QKV if "x" not in matrices and "q" in matrices else PROJECTED
        missing = [name for name in required if name not in matrices]
        hint = f"add {', '.join(missing)}" if missing else "pass either x and its weights or q, k, v"
        raise ValueError(
            f"the five steps need x, w_q, w_k, w_v, or q, k, v, got {', '.join(matrices) or 'nothing'}; {hint}"
        )
    x = matrices["x"]
    for name in PROJECTED[1:]:
        if len(matrices[name]) != x.shape[1]:
            raise ValueError(
                f"{name} must have one row for each of the {x.shape[1]} columns of x, "
                f"got {name} {list(matrices[name].shape)} for x {list(x.shape)}; is it transposed?"
            )
    for name in PROJECTED[1:]:
        if (n := len(x) * matrices[name].shape[1]) > MAX_VALUES:
            raise ValueError(f"a step may have at most {MAX_VALUES:,} values, got {n:,} in x times {name}")
    projected = {name: x @ matrices[f"w_{name}"] for name in QKV}
    text = "Each token is projected to a query (q), a key (k) and a value (v)." + heads_note
    return Step(1, "Project", "q = x W_Q,  k = x W_K,  v = x W_V", text, {**matrices, **projected}, heads)


def scale(scores: Tensor, weights: Tensor, mask: Tensor | None, beta: float, heads: int) -> Step:
    width = "head width" if heads > 1 else "query width"
    text = f"beta = {beta:.4g} (default: 1/sqrt({width})). Each row sums to 1."
    matrices = {"weights": weights}
    if math.isinf(beta):
        text = f"beta = {beta:g}: all weight goes to the {'largest' if beta > 0 else 'smallest'} score of each row."
    else:
        scaled = beta * scores
        matrices = {"scaled": scaled if mask is None else scaled.masked_fill(~mask, -math.inf), **matrices}
        text += "" if mask is None else " A dash marks a masked key, whose weight is 0."
    if mask is not None and not mask.any(-1).all():
        text += " A row without visible keys is zero."
    return Step(3, "Scale and softargmax", "weights = softargmax(beta scores)", text, matrices, heads)


def sum_values(z: Tensor, w_o: Tensor | None, heads: int) -> Step:
    """z of each head, the concatenated heads, and their output projection."""
    title, formula = "Sum", "z_i = sum over j of weighted_ij"
    text = "The rows of step 4 are summed for each query, which gives z = weights v."
    matrices = {"z": z}
    if heads > 1:
        dots = ", ..." if heads > 2 else ""
        title, formula = "Sum and concatenate", f"{formula};  z = [z of head 1{dots}, z of head {heads}]"
        text = "The rows of step 4 are summed for each query; then the heads are concatenated."
        matrices = {"z_per_head": z, "z": z.transpose(0, 1).flatten(1)}
    if w_o is not None:
        concatenated = matrices["z"]
        if len(w_o) != concatenated.shape[1]:
            raise ValueError(
                f"w_o must have one row for each of the {concatenated.shape[1]} columns of z, got {len(w_o)} rows"
            )
        title, formula = f"{title}, then project", f"{formula};  output = z W_O"
        if (n := len(concatenated) * w_o.shape[1]) > MAX_VALUES:
            raise ValueError(f"a step may have at most {MAX_VALUES:,} values, got {n:,} in z times w_o")
        matrices |= {"w_o": w_o, "output": concatenated @ w_o}
    return Step(5, title, formula, text, matrices, heads)


def to_matrix(name: str, value: Any) -> Tensor:
    """A matrix (rows, columns) of finite values in float64."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if not isinstance(value, list) or not value or not all(isinstance(row, list) and row for row in value):
        raise ValueError(f"{name} must be a list of rows of numbers, got {short_repr(value)}; try [[1, 0], [0, 1]]")
    for i, row in enumerate(value, 1):
        if len(row) != len(value[0]):
            raise ValueError(
                f"every row of {name} must be as long as its first, {len(value[0])} numbers, got {len(row)} in row {i}"
            )
        for number in row:
            if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) <= LARGEST:
                raise ValueError(
                    f"{name} must hold numbers of at most {LARGEST:g}, got {short_repr(number)} in row {i}"
                )
    return torch.tensor(value, dtype=torch.float64)


def without_infinities(numbers: Any) -> Any:
    if isinstance(numbers, list):
        return [without_infinities(number) for number in numbers]
    return numbers if math.isfinite(numbers) else None


MAX_HEADER_BYTES, BYTES_PER_VALUE = 16_384, 8
HEADER_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
"""by the version of the .npy format"""
KEYS = (*PROJECTED, *QKV, "w_o", "heads", "beta", "mask")


def read_steps_file(path: str | Path) -> dict[str, Any]:
    """The arguments of `five_steps`, by name."""
    path = Path(path)
    readers = {".json": read_json, ".npz": read_npz}
    if path.suffix not in readers:
        raise ValueError(f"a file of matrices must end in .json or .npz, got {path.name!r}")
    try:
        content = readers[path.suffix](path)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    for key in content:
        if key not in KEYS:
            nearest = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise ValueError(f"the keys of a file of matrices are {', '.join(KEYS)}, got {key!r} in {path.name}{hint}")
    mask, beta, heads = content.pop("mask", None), content.pop("beta", None), content.pop("heads", 1)
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
        raise ValueError(f"heads must be a positive integer, got {short_repr(heads)}")
    options = {"heads": heads, "beta": None if beta is None else to_beta(beta), "causal": mask == "causal"}
    if mask not in (None, "causal"):
        options["mask"] = rows_to_mask(mask, path.name)
    return content | options


def rows_to_mask(mask: Any, name: str) -> Tensor:
    """A mask given as rows of 0 and 1, or in the additive form."""
    if isinstance(mask, str):
        raise ValueError(f'mask must be "causal" or a matrix of 0 and 1, got {short_repr(mask)} in {name}')
    if isinstance(mask, list) and mask and all(isinstance(row, list) for row in mask):
        infinity = {"-inf": -math.inf}
        mask = [[infinity.get(n, n) if isinstance(n, str) else n for n in row] for row in mask]
    try:
        values = np.array(mask)
    except ValueError:
        values = np.array(None)
    if values.dtype.kind not in "biuf" or values.ndim not in (2, 3) or not values.size:
        raise ValueError(
            f"mask must be a matrix of 0 and 1 with one row for each query, got {short_repr(mask)} in {name}"
        )
    return to_mask(values, "auto", f"mask in {name}")[0]


def read_json(path: Path) -> dict[str, Any]:
    data = read_user_file(path, MAX_MATRIX_BYTES)
    try:
        content = json.loads(data.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{path.name} must contain lists of rows, got lists nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError(
            f'{path.name} must contain an object such as {{"x": ..., "w_q": ...}}, got {short_repr(content)}'
        )
    return content


def read_npz(path: Path) -> dict[str, Any]:
    data = read_user_file(path, MAX_MATRIX_BYTES)
    try:
        check_arrays(data, path.name)
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return {name: arrays[name].tolist() for name in arrays.files}
    except (MatrixError, MemoryError):
        raise
    except Exception as error:  # zipfile, zlib and numpy raise many kinds of errors for a damaged file
        raise ValueError(f"{path.name} is not a file of numeric arrays saved by numpy.savez: {error}") from None


class MatrixError(ValueError):
    """A file whose arrays exceed a limit."""


def check_arrays(data: bytes, name: str) -> None:
    """Check the declared shapes and sizes of all arrays before any of them is decompressed."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members, values, size = archive.infolist(), 0, 0
        if len(members) > len(KEYS):
            raise MatrixError(f"a file of matrices may have at most {len(KEYS)} arrays, got {len(members)} in {name}")
        for member in members:
            with archive.open(member) as file:
                header = io.BytesIO(file.read(MAX_HEADER_BYTES))  # numpy would read as many bytes as the header claims
            reader = HEADER_READERS[np.lib.format.read_magic(header)]
            shape, _, dtype = reader(header)
            values += math.prod(shape)
            size += max(member.file_size - MAX_HEADER_BYTES, math.prod(shape) * dtype.itemsize)
            if values > MAX_MATRIX_VALUES or size > MAX_MATRIX_VALUES * BYTES_PER_VALUE:
                raise MatrixError(
                    f"a file of matrices may have at most {MAX_MATRIX_VALUES:,} values, got more in {name}: "
                    f"{member.filename.removesuffix('.npy')!r} has shape {shape}"
                )


def to_beta(value: Any) -> float:
    """A number, or "inf" and "-inf", which JSON cannot express as numbers."""
    try:
        beta = float(value)
    except (TypeError, ValueError, OverflowError):
        beta = math.nan
    if isinstance(value, bool) or math.isnan(beta):
        raise ValueError(f"beta must be a number or inf, got {short_repr(value)}")
    return beta
