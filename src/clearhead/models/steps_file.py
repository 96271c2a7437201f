"""The user's own matrices from a .json or .npz file, read without ever running what is in it."""

import difflib
import io
import json
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from clearhead.data.limits import MOST_MATRIX_BYTES, MOST_MATRIX_VALUES
from clearhead.data.own_files import read_own
from clearhead.messages import brief
from clearhead.models.mask_file import to_mask
from clearhead.models.steps import GIVEN, PROJECTED

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
    data = read_own(path, MOST_MATRIX_BYTES)
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
    data = read_own(path, MOST_MATRIX_BYTES)
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
            if values > MOST_MATRIX_VALUES or size > MOST_MATRIX_VALUES * BYTES_PER_VALUE:
                raise MatrixError(
                    f"a file of matrices may have {MOST_MATRIX_VALUES:,} numbers, got more in {name}: "
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
