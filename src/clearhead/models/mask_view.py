"""Attention masks from the user's own file: rows of numbers in .txt or .csv, or an array in .npy (never unpickled).

A file may hold a mask in one of three forms; `form="auto"` tells the first two apart by their values:

    bool       1 or True = may attend, 0 or False = may not (the convention of Clearhead)
    additive   values added to the scores: 0 = may attend, -10000 or less (also -inf) = may not
    torch      bool as in torch.nn.MultiheadAttention, where True = may NOT attend

Dims: B batch, H heads, Q queries, K keys.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal, get_args

import numpy as np
import torch
from rich.text import Text
from torch import Tensor

from clearhead.data.user_files import MAX_MATRIX_BYTES, MAX_MATRIX_VALUES, check_user_file, read_user_file
from clearhead.nn import masks
from clearhead.nn.masks import check_bool_mask

Form = Literal["bool", "additive", "torch"]
FORMS = ("auto", *get_args(Form))
SUFFIXES = (".txt", ".csv", ".npy")
MOST_ARRAY_BYTES = 16 * MAX_MATRIX_VALUES + 16_384
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
        lines = read_user_file(path, MAX_MATRIX_BYTES).decode("utf-8-sig").splitlines()
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
        if len(rows) * len(rows[0]) > MAX_MATRIX_VALUES:
            raise ValueError(f"a mask may have at most {MAX_MATRIX_VALUES:,} values, got more in {path.name}")
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
    check_user_file(path, MOST_ARRAY_BYTES)
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # a damaged header raises errors of many kinds
        first = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{path.name} is not an array saved by numpy.save: {first}") from None
    if array.dtype.kind not in "biuf":
        raise ValueError(f"a mask holds numbers or bool, got {array.dtype} in {path.name}")
    if array.size > MAX_MATRIX_VALUES:
        raise ValueError(f"a mask may have at most {MAX_MATRIX_VALUES:,} values, got {array.size:,} in {path.name}")
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


# A mask for people and programs: as a grid of numbers, as additive values, as JSON, and what deserves a warning.
#
# Tokens are counted from 1, as in a sentence. Dims: B batch, H heads, Q queries, K keys.


MOST_GRIDS = 4
"""grids of a batch that are shown in the terminal"""
MOST_ROWS = 40
HIDES = -10_000.0
"""a larger additive value lets a visible amount of weight through"""
CONVENTION = "True = may attend"


@dataclass(frozen=True)
class MaskView:
    """A bool mask (..., Q, K), True = may attend."""

    mask: Tensor
    title: str
    """such as "causal & window(2) mask" """
    labels: tuple[str, ...] = ()
    """a name for each example of a batch"""
    first_query: int = 1
    """the token that the first row belongs to: with a cache, queries are the last tokens of the sequence"""
    low: float | None = None
    """for the additive form: what is added to the score of a hidden key"""

    def __post_init__(self) -> None:
        check_bool_mask(self.mask)
        if self.low is not None and not self.low < 0:
            raise ValueError(f"an additive mask hides keys by a negative number, got {self.low:g}; try -10000 or -inf")

    @property
    def size(self) -> str:
        n_queries, n_keys = self.mask.shape[-2:]
        return (
            ("1 token" if n_keys == 1 else f"{n_keys} tokens")
            if n_queries == n_keys
            else f"{n_queries} queries, {n_keys} keys"
        )

    def grids(self) -> Iterator[tuple[str, Tensor]]:
        """A label and a (Q,K) mask for each example and head."""
        lead = self.mask.shape[:-2]
        for number, index in enumerate(product(*map(range, lead))):
            yield self.label_of(number, index), self.mask[index]

    def label_of(self, number: int, index: tuple[int, ...]) -> str:
        if self.labels:
            return self.labels[number]
        names = ("example", "head")[: len(index)]
        return ", ".join(f"{name} {i + 1}" for name, i in zip(names, index, strict=True))

    def cell(self, seen: bool) -> str:
        if self.low is None:
            return "1" if seen else "0"
        return "0" if seen else f"{self.low:g}"

    def empty_queries(self) -> list[tuple[str, list[int]]]:
        """Queries that may attend to nothing, as they are numbered, for each grid that has any."""
        found = [(label, (~mask.any(-1)).nonzero().flatten().tolist()) for label, mask in self.grids()]
        return [(label, [row + self.first_query for row in rows]) for label, rows in found if rows]

    def notes(self) -> list[str]:
        """What a reader should know about this mask."""
        notes = [
            f"{label}: {sentence}" if label else sentence[0].upper() + sentence[1:]
            for label, rows in self.empty_queries()
            for sentence in [empty_sentence(rows, self.low)]
        ]
        if self.low is not None and self.low > HIDES:
            notes.append(
                f"{self.low:g} does not hide a key: before normalization its weight is only multiplied by "
                f"e^{self.low:g} = {math.exp(self.low):.2g}. Use {HIDES:g} or -inf."
            )
        return notes

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; -inf, which JSON has no number for, is a string."""
        n_visible, n_pairs = int(self.mask.sum()), self.mask.numel()
        data: dict[str, Any] = {
            "mask": self.title,
            "convention": CONVENTION,
            "shape": list(self.mask.shape),
            "visible": n_visible,
            "pairs": n_pairs,
            "values": self.mask.tolist(),
            "empty_rows": (~self.mask.any(-1)).nonzero().tolist(),
        }
        if self.low is not None:
            low = self.low if math.isfinite(self.low) else str(self.low)
            data["additive"] = written(self.mask.tolist(), low)
        return data


def written(values: Any, low: float | str) -> Any:
    if isinstance(values, list):
        return [written(value, low) for value in values]
    return 0 if values else low


def empty_sentence(rows: Sequence[int], low: float | None) -> str:
    """What happens to queries that may attend to nothing, in the bool and in the additive form."""
    one = len(rows) == 1
    who = f"query {rows[0]}" if one else f"queries {joined(rows)}"
    outputs = "its output is zeros" if one else "their outputs are zeros"
    if low is None:
        return f"{who} may attend to nothing: {outputs}."
    row = "its row" if one else "each row"
    if math.isinf(low):
        what = f"softmax of {row} is 0/0, NaN"
    else:
        what = f"{low:g} is added to all of {row}, which softmax cannot see, so no key is hidden"
    return f"{who} may attend to nothing: {what}. With the bool mask, {outputs}."


def joined(rows: Sequence[int], most: int = 6) -> str:
    """1, 2 and 5; a run of consecutive numbers as 3 to 9."""
    if len(rows) > 2 and rows[-1] - rows[0] == len(rows) - 1:
        return f"{rows[0]} to {rows[-1]}"
    if len(rows) > most:
        return f"{', '.join(map(str, rows[:most]))} and {len(rows) - most} more"
    return f"{', '.join(map(str, rows[:-1]))} and {rows[-1]}"


def mask_text(view: MaskView, width: int = 80) -> Text:
    """Title, grids one below the other, convention and notes; no wider than `width` columns."""
    text = Text(no_wrap=True, overflow="ignore")
    shape = ",".join(map(str, view.mask.shape))
    form = "" if view.low is None else ", additive form"
    text.append(f"{view.title}{form}: {view.size}", "bold").append(f"   shape [{shape}]\n\n", "dim")
    grids = list(view.grids())
    is_cut = False
    for label, mask in grids[:MOST_GRIDS]:
        is_cut |= append_grid(text, view, label, mask, width)
    if len(grids) > MOST_GRIDS or is_cut:
        text.append(f"Not all of it is shown{too_many(grids)}; --json and --figure show everything.\n\n", "dim")
    text.append("\n".join(wrap(legend(view), width)) + "\n", "dim")
    for note in view.notes():
        text.append("\n".join(wrap(f"Note: {note}", width)) + "\n", "yellow")
    text.rstrip()
    return text


def too_many(grids: Sequence[Any]) -> str:
    return f" ({MOST_GRIDS} of {len(grids)} grids)" if len(grids) > MOST_GRIDS else ""


def legend(view: MaskView) -> str:
    n_visible, n_pairs = int(view.mask.sum()), view.mask.numel()
    count = f"{n_visible:,} of {n_pairs:,} query-key pairs are visible ({n_visible / n_pairs:.0%})."
    if view.low is None:
        return f"1 (True) = may attend, 0 (False) = may not. {count}"
    return f"Added to the scores before softmax: 0 = may attend, {view.low:g} = may not. {count}"


def append_grid(text: Text, view: MaskView, label: str, mask: Tensor, width: int) -> bool:
    """Rows are queries, columns are keys. Returns whether rows or columns had to be left out."""
    n_queries, n_keys = mask.shape
    size = max(len(view.cell(False)), len(str(n_keys)))
    margin = max(len("query"), len(str(n_keys))) + 2
    fits = max(1, (width - margin - 5) // (size + 2))
    n_columns = min(n_keys, fits)
    n_rows = min(n_queries, MOST_ROWS if n_columns == n_keys else n_columns)
    if label:
        text.append(f"{label}\n", "bold")
    text.append(" " * margin + "key\n", "dim")
    header = "".join(f"{key:>{size}}  " for key in range(1, n_columns + 1))
    text.append(f"{'query':<{margin}}{header}".rstrip() + "\n", "dim")
    is_cut = n_rows < n_queries or n_columns < n_keys
    for row, values in enumerate(mask[:n_rows, :n_columns].tolist(), view.first_query):
        text.append(f"{row:>{margin - 2}}  ", "dim")
        for seen in values:
            text.append(f"{view.cell(seen):>{size}}  ", "bold blue" if seen else "bright_black")
        text.append("...\n" if n_columns < n_keys else "\n")
    if n_rows < n_queries:
        text.append(f"{'...':>{margin - 2}}\n")
    text.append("\n")
    return is_cut
