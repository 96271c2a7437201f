"""Attention masks from the user's own file: rows of numbers in .txt or .csv, or an array in .npy (never unpickled).

A file may hold a mask in one of three forms; `form="auto"` tells the first two apart by their values:

    bool       1 or True = may attend, 0 or False = may not (the convention of Clearhead)
    additive   values added to the scores: 0 = may attend, -10000 or less (also -inf) = may not
    torch      bool as in torch.nn.MultiheadAttention, where True = may NOT attend

Dims: B batch, H heads, Q queries, K keys.
"""

from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from clearhead.data.limits import MOST_MATRIX_BYTES, MOST_MATRIX_VALUES
from clearhead.data.own_files import own_file, read_own
from clearhead.nn import masks

Form = Literal["bool", "additive", "torch"]
FORMS = ("auto", *get_args(Form))
SUFFIXES = (".txt", ".csv", ".npy")
MOST_ARRAY_BYTES = 16 * MOST_MATRIX_VALUES + 16_384
"""bytes of a .npy file: numbers of up to 16 bytes, and the header"""
WORDS = {"true": 1.0, "false": 0.0}


def read_mask(path: str | Path, form: str = "auto") -> tuple[Tensor, Form]:
    """The bool mask (..., Q, K), True = may attend, and the form it was written in."""
    path = Path(path)
    if form not in FORMS:
        raise ValueError(f"the form of a mask must be one of {', '.join(FORMS)}, got {form!r}")
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"a mask is read from a {', '.join(SUFFIXES)} file, got {path.name!r}")
    try:
        values = read_npy(path) if path.suffix.lower() == ".npy" else read_text(path)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    if values.size == 0 or not 2 <= values.ndim <= 4:
        raise ValueError(
            f"a mask has the shape (Q,K), (B,Q,K) or (B,H,Q,K), with at least one query and one key, "
            f"got {values.shape} in {path.name}"
        )
    return to_mask(values, form, path.name)


def read_text(path: Path) -> np.ndarray:
    """Rows of values between commas, semicolons or spaces; empty lines and what follows a # are left out."""
    try:
        lines = read_own(path, MOST_MATRIX_BYTES).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{path.name} is not a text file; save it as UTF-8, or as .npy") from None
    rows: list[list[float]] = []
    for number, line in enumerate(lines, 1):
        line = line.partition("#")[0].replace(",", " ").replace(";", " ")
        cells = line.translate(str.maketrans("[]()", "    ")).split()
        if not cells:
            continue
        rows.append([to_value(cell, f"line {number} of {path.name}") for cell in cells])
        if len(cells) != len(rows[0]):
            raise ValueError(
                f"every row of a mask must have a value for each key, "
                f"got {len(rows[0])} and {len(cells)} values (line {number} of {path.name})"
            )
        if len(rows) * len(rows[0]) > MOST_MATRIX_VALUES:
            raise ValueError(f"a mask may have at most {MOST_MATRIX_VALUES:,} values, got more in {path.name}")
    return np.array(rows, dtype=np.float64)


def to_value(cell: str, place: str) -> float:
    if cell.lower() in WORDS:
        return WORDS[cell.lower()]
    try:
        return float(cell)
    except ValueError:
        raise ValueError(f"a mask holds numbers, True or False, got {cell!r} in {place}") from None


def read_npy(path: Path) -> np.ndarray:
    """Mapped, not loaded: a header that claims more than the file holds allocates nothing."""
    own_file(path, MOST_ARRAY_BYTES)
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # a damaged header raises errors of many kinds
        first = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{path.name} is not an array saved by numpy.save: {first}") from None
    if array.dtype.kind not in "biuf":
        raise ValueError(f"a mask holds numbers or bool, got {array.dtype} in {path.name}")
    if array.size > MOST_MATRIX_VALUES:
        raise ValueError(f"a mask may have at most {MOST_MATRIX_VALUES:,} values, got {array.size:,} in {path.name}")
    return np.array(array, dtype=bool if array.dtype.kind == "b" else np.float64)


def to_mask(values: np.ndarray, form: str, name: str) -> tuple[Tensor, Form]:
    """By the values alone, all zeros could mean everything or nothing: then the form has to be given."""
    is_zero, is_one, is_low = values == 0, values == 1, values <= -10_000
    if form == "auto" and values.dtype != bool and is_zero.all():
        raise ValueError(
            f"{name} holds zeros only: as a bool mask it hides every key, as an additive one it hides none; "
            "add --form bool or --form additive"
        )
    if form == "auto":
        form = "additive" if is_low.any() else "bool"
    allowed = is_zero | (is_low if form == "additive" else is_one)
    if not allowed.all():
        at = tuple(int(i) for i in np.argwhere(~allowed)[0])
        rule = "0, or -10000 and less" if form == "additive" else "0 and 1"
        both = "" if form == "additive" else ", or an additive one 0 and -10000 or less"
        raise ValueError(
            f"{'an additive' if form == 'additive' else 'a bool'} mask holds {rule}{both}, got {values[at]:g} "
            f"in row {at[-2] + 1}, column {at[-1] + 1} of {name}"
        )
    if form == "additive":
        return masks.from_additive(torch.from_numpy(values.astype(np.float64))), "additive"
    mask = torch.from_numpy(np.ascontiguousarray(is_one))
    return (~mask, "torch") if form == "torch" else (mask, "bool")
