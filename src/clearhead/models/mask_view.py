"""Read attention masks from files, and show them as numbers, as JSON or as a figure, with notes on likely mistakes.

Files are rows of numbers in .txt or .csv, or an array in .npy (never unpickled). A file may hold a mask in one of three
forms; `form="auto"` tells the first two apart by their values:

    bool       1 or True = may attend, 0 or False = may not (the convention of Clearhead)
    additive   values added to the scores: 0 = may attend, -10000 or less (also -inf) = may not
    torch      bool as in torch.nn.MultiheadAttention, where True = may NOT attend

Queries and keys are numbered from 1. Dims: B batch, H heads, Q queries, K keys.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from rich.text import Text
from torch import Tensor

from clearhead.data.user_files import MAX_MATRIX_BYTES, MAX_MATRIX_VALUES, check_user_file, read_user_file
from clearhead.drawing import BLACK, BLUE, LIGHT_GRAY, VERMILION, new_figure
from clearhead.nn import masks
from clearhead.nn.masks import check_bool_mask

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Form = Literal["bool", "additive", "torch"]
FORMS = ("auto", *get_args(Form))
SUFFIXES = (".txt", ".csv", ".npy")
MAX_ARRAY_BYTES = 16 * MAX_MATRIX_VALUES + 16_384
"""the size limit of a .npy file: values of up to 16 bytes, and the header"""
BOOL_WORDS = {"true": 1.0, "false": 0.0}
MAX_NUMBERED = 16
"""with more rows or columns, cells are too small for numbers"""
MAX_PANELS = 12


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
    """Rows of values separated by commas, semicolons or spaces; empty lines and comments after # are ignored."""
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


def to_value(cell: str, location: str) -> float:
    if cell.lower() in BOOL_WORDS:
        return BOOL_WORDS[cell.lower()]
    try:
        return float(cell)
    except ValueError:
        raise ValueError(f"a mask holds numbers, True or False, got {cell!r} in {location}") from None


def read_npy(path: Path) -> np.ndarray:
    """The file is memory-mapped first, so that a header that claims more than the file holds allocates nothing."""
    check_user_file(path, MAX_ARRAY_BYTES)
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
    """Convert values to a bool mask. The form of a mask of zeros only is ambiguous and must be given."""
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


MAX_GRIDS = 4
"""the number of examples and heads that are shown in a terminal"""
MAX_ROWS = 40
HIDDEN_BELOW = -10_000.0
"""with a larger additive value, a hidden key can still get a visible weight"""
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
    """the position of the first query: with a KV cache, queries are the last tokens of the sequence"""
    low: float | None = None
    """the value that the additive form adds to the score of a hidden key; None for the bool form"""

    def __post_init__(self) -> None:
        check_bool_mask(self.mask)
        if self.low is not None and not self.low < 0:
            raise ValueError(f"an additive mask hides keys by a negative number, got {self.low:g}; try -10000 or -inf")

    @property
    def size(self) -> str:
        num_queries, num_keys = self.mask.shape[-2:]
        return (
            ("1 token" if num_keys == 1 else f"{num_keys} tokens")
            if num_queries == num_keys
            else f"{num_queries} queries, {num_keys} keys"
        )

    def grids(self) -> Iterator[tuple[str, Tensor]]:
        """The label and the mask (Q,K) of each example and head."""
        lead = self.mask.shape[:-2]
        for number, index in enumerate(product(*map(range, lead))):
            yield self.label(number, index), self.mask[index]

    def label(self, number: int, index: tuple[int, ...]) -> str:
        if self.labels:
            return self.labels[number]
        names = ("example", "head")[: len(index)]
        return ", ".join(f"{name} {i + 1}" for name, i in zip(names, index, strict=True))

    def cell(self, visible: bool) -> str:
        if self.low is None:
            return "1" if visible else "0"
        return "0" if visible else f"{self.low:g}"

    def empty_queries(self) -> list[tuple[str, list[int]]]:
        """The numbers of the queries without any visible key, for each grid that has such queries."""
        empty = [(label, (~mask.any(-1)).nonzero().flatten().tolist()) for label, mask in self.grids()]
        return [(label, [row + self.first_query for row in rows]) for label, rows in empty if rows]

    def notes(self) -> list[str]:
        """Warnings about queries without visible keys and about additive values that do not hide."""
        notes = [
            f"{label}: {sentence}" if label else sentence[0].upper() + sentence[1:]
            for label, rows in self.empty_queries()
            for sentence in [empty_sentence(rows, self.low)]
        ]
        if self.low is not None and self.low > HIDDEN_BELOW:
            notes.append(
                f"{self.low:g} does not hide a key: before normalization its weight is only multiplied by "
                f"e^{self.low:g} = {math.exp(self.low):.2g}. Use {HIDDEN_BELOW:g} or -inf."
            )
        return notes

    def to_dict(self) -> dict[str, Any]:
        """Data for JSON, where -inf is a string."""
        num_visible, num_pairs = int(self.mask.sum()), self.mask.numel()
        data: dict[str, Any] = {
            "mask": self.title,
            "convention": CONVENTION,
            "shape": list(self.mask.shape),
            "visible": num_visible,
            "pairs": num_pairs,
            "values": self.mask.tolist(),
            "empty_rows": (~self.mask.any(-1)).nonzero().tolist(),
        }
        if self.low is not None:
            low = self.low if math.isfinite(self.low) else str(self.low)
            data["additive"] = to_additive(self.mask.tolist(), low)
        return data


def to_additive(values: Any, low: float | str) -> Any:
    if isinstance(values, list):
        return [to_additive(value, low) for value in values]
    return 0 if values else low


def empty_sentence(rows: Sequence[int], low: float | None) -> str:
    """What happens to queries without visible keys, in the bool and in the additive form."""
    one = len(rows) == 1
    queries = f"query {rows[0]}" if one else f"queries {joined(rows)}"
    outputs = "its output is zeros" if one else "their outputs are zeros"
    if low is None:
        return f"{queries} may attend to nothing: {outputs}."
    row = "its row" if one else "each row"
    if math.isinf(low):
        effect = f"softmax of {row} is 0/0, NaN"
    else:
        effect = f"{low:g} is added to all of {row}, which does not change its softmax, so no key is hidden"
    return f"{queries} may attend to nothing: {effect}. With the bool mask, {outputs}."


def joined(rows: Sequence[int], limit: int = 6) -> str:
    """A list such as "1, 2 and 5"; consecutive numbers become "3 to 9"."""
    if len(rows) > 2 and rows[-1] - rows[0] == len(rows) - 1:
        return f"{rows[0]} to {rows[-1]}"
    if len(rows) > limit:
        return f"{', '.join(map(str, rows[:limit]))} and {len(rows) - limit} more"
    return f"{', '.join(map(str, rows[:-1]))} and {rows[-1]}"


def mask_text(view: MaskView, width: int = 80) -> Text:
    """Title, grids, convention and notes for a terminal of `width` columns."""
    text = Text(no_wrap=True, overflow="ignore")
    shape = ",".join(map(str, view.mask.shape))
    form = "" if view.low is None else ", additive form"
    text.append(f"{view.title}{form}: {view.size}", "bold").append(f"   shape [{shape}]\n\n", "dim")
    grids = list(view.grids())
    is_truncated = False
    for label, mask in grids[:MAX_GRIDS]:
        is_truncated |= append_grid(text, view, label, mask, width)
    if len(grids) > MAX_GRIDS or is_truncated:
        text.append(f"The output is truncated{too_many(grids)}; --json and --figure show everything.\n\n", "dim")
    text.append("\n".join(wrap(legend(view), width)) + "\n", "dim")
    for note in view.notes():
        text.append("\n".join(wrap(f"Note: {note}", width)) + "\n", "yellow")
    text.rstrip()
    return text


def too_many(grids: Sequence[Any]) -> str:
    return f" ({MAX_GRIDS} of {len(grids)} grids)" if len(grids) > MAX_GRIDS else ""


def legend(view: MaskView) -> str:
    num_visible, num_pairs = int(view.mask.sum()), view.mask.numel()
    count = f"{num_visible:,} of {num_pairs:,} query-key pairs are visible ({num_visible / num_pairs:.0%})."
    if view.low is None:
        return f"1 (True) = may attend, 0 (False) = may not. {count}"
    return f"Added to the scores before softmax: 0 = may attend, {view.low:g} = may not. {count}"


def append_grid(text: Text, view: MaskView, label: str, mask: Tensor, width: int) -> bool:
    """Append a grid with queries as rows and keys as columns. Return whether it was truncated."""
    num_queries, num_keys = mask.shape
    size = max(len(view.cell(False)), len(str(num_keys)))
    margin = max(len("query"), len(str(num_keys))) + 2
    fits = max(1, (width - margin - 5) // (size + 2))
    num_columns = min(num_keys, fits)
    num_rows = min(num_queries, MAX_ROWS if num_columns == num_keys else num_columns)
    if label:
        text.append(f"{label}\n", "bold")
    text.append(" " * margin + "key\n", "dim")
    header = "".join(f"{key:>{size}}  " for key in range(1, num_columns + 1))
    text.append(f"{'query':<{margin}}{header}".rstrip() + "\n", "dim")
    is_truncated = num_rows < num_queries or num_columns < num_keys
    for row, values in enumerate(mask[:num_rows, :num_columns].tolist(), view.first_query):
        text.append(f"{row:>{margin - 2}}  ", "dim")
        for visible in values:
            text.append(f"{view.cell(visible):>{size}}  ", "bold blue" if visible else "bright_black")
        text.append("...\n" if num_columns < num_keys else "\n")
    if num_rows < num_queries:
        text.append(f"{'...':>{margin - 2}}\n")
    text.append("\n")
    return is_truncated


def draw_mask(view: MaskView) -> "Figure":
    """One panel per example and head: blue cells are visible, gray cells hidden, rows without visible keys framed."""
    from matplotlib.patches import Patch

    grids = list(view.grids())
    shown = grids[:MAX_PANELS]
    num_columns = min(len(shown), 4)
    num_rows = math.ceil(len(shown) / num_columns)
    num_queries, num_keys = view.mask.shape[-2:]
    is_numbered = max(num_queries, num_keys) <= MAX_NUMBERED
    cell = 0.32 + 0.08 * len(view.cell(False)) if is_numbered else 5.0 / max(num_queries, num_keys)  # inches
    wide, tall = cell * num_keys + 0.6, cell * num_queries + (0.6 if shown[0][0] == "" else 0.9)
    figure = new_figure(max(6.0, num_columns * wide), num_rows * (tall + 0.2) + 1.0)
    figure.set_layout_engine("constrained", h_pad=0.1)  # inches; otherwise the title touches the panels
    panels = figure.subplots(num_rows, num_columns, squeeze=False)
    for axes, (label, mask) in zip(panels.flat, shown, strict=False):
        draw_grid(axes, view, label, mask, is_numbered)
    for axes in panels.flat[len(shown) :]:
        axes.set_visible(False)
    form = "" if view.low is None else " in additive form"
    size = f"{view.title}{form}, {view.size}"
    more = f" (first {MAX_PANELS} of {len(grids)} masks)" if len(grids) > MAX_PANELS else ""
    figure.suptitle(size + more, fontsize=14)
    legend = [Patch(color=BLUE, label=f"{view.cell(True)}: may attend")]
    legend.append(Patch(color=LIGHT_GRAY, label=f"{sign(view.cell(False))}: hidden"))
    if view.empty_queries():
        legend.append(Patch(facecolor="none", edgecolor=VERMILION, label="may attend to nothing"))
    figure.legend(handles=legend, loc="outside lower center", ncols=3, fontsize=11, frameon=False)
    return figure


def draw_grid(axes: "Axes", view: MaskView, label: str, mask: Tensor, is_numbered: bool) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Rectangle

    num_queries, num_keys = mask.shape
    axes.imshow(mask.int().numpy(), cmap=ListedColormap([LIGHT_GRAY, BLUE]), vmin=0, vmax=1, interpolation="nearest")
    axes.set_title(label, fontsize=12)
    axes.set_xlabel("key", fontsize=12)
    axes.set_ylabel("query", fontsize=12)
    ticks(axes, num_keys, num_queries, view.first_query)
    if is_numbered:
        for row, values in enumerate(mask.tolist()):
            for column, visible in enumerate(values):
                text = sign(view.cell(visible))
                axes.text(column, row, text, ha="center", va="center", fontsize=12, color="white" if visible else BLACK)
    for row in (~mask.any(-1)).nonzero().flatten().tolist():
        frame = Rectangle(
            (-0.5, row - 0.5), num_keys, 1, fill=False, edgecolor=VERMILION, linewidth=2, zorder=3, clip_on=False
        )
        axes.add_patch(frame)


def ticks(axes: "Axes", num_keys: int, num_queries: int, first_query: int) -> None:
    """White lines between cells, and a number for each token, or for some tokens if there are many."""
    for set_ticks, count, first in ((axes.set_xticks, num_keys, 1), (axes.set_yticks, num_queries, first_query)):
        positions = range(0, count, 1 if count <= MAX_NUMBERED else math.ceil(count / 8))
        set_ticks(list(positions), labels=[str(position + first) for position in positions])
        if count <= 64:
            set_ticks([position + 0.5 for position in range(count - 1)], minor=True)
    axes.grid(which="minor", color="white", linewidth=min(2.0, 16 / max(num_keys, num_queries)))
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)


def sign(text: str) -> str:
    """The text with typographic minus and infinity signs."""
    return text.replace("-inf", "−∞").replace("-", "−")
