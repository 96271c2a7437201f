"""A mask for people and programs: as a grid of numbers, as additive values, as JSON, and what deserves a warning.

Tokens are counted from 1, as in a sentence. Dims: B batch, H heads, Q queries, K keys.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from textwrap import wrap
from typing import Any

from rich.text import Text
from torch import Tensor

from clearhead.nn.checks import check_bool

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
        check_bool(self.mask)
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
