"""Learning curves: loss and accuracy against epochs, of one or more runs, as a picture or as a table.

A row of two panels for each window of epochs holds all runs; on request, a row for each run follows. The training
curve of data that is batched by length (`data.window`) zigzags, because long examples have other losses than short
ones: it is drawn as a running mean, with the records themselves behind it, and the legend says so.
"""

import csv
import io
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from clearhead.drawing import COLORS, GRAY, LIGHT_GRAY, displayable, new_figure
from clearhead.files import MAX_JSON_BYTES, from_json, read_regular
from clearhead.messages import printable, round_count
from clearhead.training.metrics_log import Record, read
from clearhead.training.run_directory import CONFIG, METRICS, find_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Points = list[tuple[float, float]]
"""(epoch, value), in order"""
Quantity = Literal["loss", "accuracy"]
Kind = Literal["train", "validation"]
KINDS: dict[Kind, str] = {"train": "training", "validation": "validation"}
BUCKETED = ("pronounce", "words")
"""data sets whose batches hold examples of similar length"""
LEAST_WIDTH = 0.1
"""epochs that are averaged at least: in a short run, a tenth of it may hold a single record"""
MOST_POINTS = 200
"""a line of more than these in one panel is noise that hides the others"""
MOST_MARKS = 60
MARKERS = "os^Dv<>PX"
VALIDATION_LINES = ("-", (0, (7, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
TRAINING_LINES = ((0, (4, 2)), (0, (1, 1)), (0, (1, 3)))
"""of the first eight runs, which have a colour each, of the next eight, and of all others"""
COLUMNS = ("run", "kind", "step", "epoch", "loss", "accuracy")
"""of the table; whatever else was recorded follows"""


@dataclass(frozen=True)
class Curves:
    """The records of one run."""

    name: str
    records: list[Record]
    is_bucketed: bool = False
    """whether a batch holds examples of similar length, so that the training loss depends on the batch"""

    def points(self, kind: Kind, quantity: Quantity) -> Points:
        return [
            (record["epoch"], record[quantity])
            for record in self.records
            if record.get("kind") == kind and quantity in record and "epoch" in record
        ]

    @property
    def length(self) -> float:
        """in epochs"""
        return max(record.get("epoch", 0.0) for record in self.records)

    @property
    def label(self) -> str:
        tests = [record for record in self.records if record.get("kind") == "test" and "accuracy" in record]
        if not tests:
            return displayable(self.name)
        how = {"flip": ", with mirror images", "shift": ", mean over 6 views"}.get(tests[-1].get("tta", ""), "")
        return f"{displayable(self.name)} (test {tests[-1]['accuracy']:.2%}{how})"


@dataclass(frozen=True)
class Style:
    """Options of the figure."""

    log: bool = False
    """a logarithmic axis for the loss"""
    smooth: float = 0.0
    """width of the running mean in epochs; 0 for none"""
    bucketed: float = 0.0
    """the same, for the training curves of bucketed data where `smooth` is 0"""

    def width(self, run: Curves, kind: Kind) -> float:
        return self.smooth or (self.bucketed if run.is_bucketed and kind == "train" else 0.0)


def read_curves(run: str | Path) -> Curves:
    """The records of a run, also of one that is being trained; of a folder that holds only metrics.jsonl; or of such
    a file."""
    path = find_records(run)
    records = read(path)
    if not any(record.get("epoch", 0) > 0 for record in records):
        raise ValueError(f"curves need records of at least one step, got none in {run}; train it a little longer")
    name = path.resolve().parent.name if path.name == METRICS else path.stem
    return Curves(name, records, is_bucketed(path.with_name(CONFIG)))


def is_bucketed(config: Path) -> bool:
    """Whether batches are sorted by length, according to config.json; False without one."""
    try:
        data = from_json(read_regular(config, MAX_JSON_BYTES))["data"]
        return data["name"] in BUCKETED and data["window"] > 0
    except (OSError, ValueError, LookupError, TypeError):
        return False


def windows_of(runs: Sequence[Curves], epochs: Sequence[float] = ()) -> list[float]:
    """The windows to draw: those that were asked for, in order, cut after the last epoch of the longest run, whether
    finished or not; without any, one up to its last record."""
    end = max(run.length for run in runs)
    return list(dict.fromkeys(min(window, math.ceil(end)) for window in epochs)) or [end]


def draw_curves(
    runs: Sequence[Curves],
    epochs: Sequence[float] = (),
    *,
    log: bool = False,
    smooth: float = 0.0,
    panels: bool = False,
) -> "Figure":
    """A row for each window of epochs, with all runs; with `panels`, then a row for each run, from epoch 0 to its own
    end. Losses have a logarithmic axis with `log`; `smooth` is the width of a running mean, in epochs."""
    windows, alone = windows_of(runs, epochs), list(runs) if panels else []
    longest = max((run.length for run in runs if run.is_bucketed), default=0.0)
    style = Style(log=log, smooth=smooth, bucketed=min(1.0, max(LEAST_WIDTH, float(f"{longest / 10:.1g}"))))
    n_rows = len(windows) + len(alone)
    legend_rows = math.ceil((len(runs) + len(KINDS)) / 3)
    figure = new_figure(11, 3.2 * n_rows + 0.25 * legend_rows + 0.3)
    rows = figure.subplots(n_rows, 2, squeeze=False)
    for (left, right), window in zip(rows, windows, strict=False):
        draw_panel(left, dict(enumerate(runs)), "loss", window, style)
        draw_panel(right, dict(enumerate(runs)), "accuracy", window, style)
    own = rows[len(windows) :]
    for number, (left, right) in enumerate(own):
        run = alone[number]
        draw_panel(left, {number: run}, "loss", run.length, style, f"{displayable(run.name)}: ")
        draw_panel(right, {number: run}, "accuracy", run.length, style, f"{displayable(run.name)}: ")
    for column in (0, 1):
        share_scale([row[column] for row in own])
    lines, names = key(runs, style, has_single=any(map(has_single_point, rows.flat)))
    n_columns = min(len(names), 3)
    legend = figure.legend(lines, names, loc="outside lower center", ncols=n_columns, frameon=False, handlelength=3)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def draw_panel(
    panel: "Axes", runs: dict[int, Curves], quantity: Quantity, window: float, style: Style, title: str = ""
) -> None:
    """Draw one quantity. The keys of `runs` determine colors and markers."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    for number, run in runs.items():
        for kind in KINDS:
            draw_line(panel, number, kind, run.points(kind, quantity), window, style.width(run, kind))
    panel.set_xlim(0, window)
    panel.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=window >= 2))
    panel.set_title(f"{title}{quantity}, epochs 0 to {round_count(window)}", fontsize=12, parse_math=False)
    panel.set_xlabel("epoch", fontsize=11)
    panel.set_ylabel(quantity, fontsize=11)
    panel.grid(color=LIGHT_GRAY, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    if not panel.lines:
        panel.set_yticks([])
        panel.text(0.5, 0.5, f"no {quantity} in this window", transform=panel.transAxes, ha="center", color=GRAY)
    elif quantity == "accuracy":
        low, high = panel.get_ylim()
        panel.set_ylim(max(low, -0.01), min(high, 1.01))
        panel.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    elif style.log:
        set_log_scale(panel)


def set_log_scale(panel: "Axes") -> None:
    """With a label at 1, 2 and 5 of each power of ten: losses seldom span several of these."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    panel.set_yscale("log", nonpositive="mask")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.set_ylabel("loss (log scale)", fontsize=11)


def share_scale(panels: "Sequence[Axes]") -> None:
    """Panels of one quantity side by side are compared: they get the same scale."""
    limits = [panel.get_ylim() for panel in panels if panel.lines]
    for panel in panels:
        if panel.lines:
            panel.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))


def draw_line(panel: "Axes", number: int, kind: Kind, points: Points, window: float, width: float) -> None:
    """The points up to the end of the window; with a running mean, the points themselves faintly behind it."""
    means = running_mean(points, width)
    shown, raw = ([point for point in line if point[0] <= window] for line in (means, points))
    if not shown:
        return
    if means != points:
        panel.plot(*zip(*thinned(raw, MOST_POINTS * 3), strict=True), **faint(number))
    if kind == "train":
        shown = thinned(shown)
    panel.plot(*zip(*shown, strict=True), **look(number, kind, len(shown)))


def look(number: int, kind: Kind, n_points: int = 1) -> dict[str, Any]:
    """Eight colours; after eight runs, other strokes. Validation has marks, another one for each run; training is
    dashed, and has a hollow mark only where a single point makes no line."""
    colour, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
    stroke = min(number // len(COLORS), len(VALIDATION_LINES) - 1)
    if kind == "train":
        hollow = {"marker": marker, "markerfacecolor": "none", "clip_on": False} if n_points == 1 else {}
        return {"color": colour, "linestyle": TRAINING_LINES[stroke], "linewidth": 1.2, "alpha": 0.8, **hollow}
    marks = {"marker": marker, "markersize": 4, "markevery": math.ceil(n_points / MOST_MARKS), "clip_on": False}
    return {"color": colour, "linestyle": VALIDATION_LINES[stroke], "linewidth": 1.8, **marks}


def faint(number: int) -> dict[str, Any]:
    return {"color": COLORS[number % len(COLORS)], "linewidth": 0.7, "alpha": 0.3, "zorder": 1.5}


def running_mean(points: Points, width: float) -> Points:
    """Each value becomes the mean of all values at most width/2 epochs away. At the beginning, where curves are steep,
    the interval is shorter on both sides; at the end on one side."""
    if width <= 0:
        return points
    epochs = [epoch for epoch, _ in points]
    sums = list(accumulate((value for _, value in points), initial=0.0))
    means = []
    for epoch, value in points:
        reach = min(width / 2, epoch - epochs[0]) * (1 + 1e-9)  # a neighbour at the very edge counts on both sides
        first, last = bisect_left(epochs, epoch - reach), bisect_right(epochs, epoch + reach)
        means.append((epoch, value if last - first == 1 else (sums[last] - sums[first]) / (last - first)))
    return means


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """At most `most` points, each the mean of neighboring ones."""
    size = -(-len(points) // most) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(fmean(epoch for epoch, _ in group), fmean(value for _, value in group)) for group in groups]


def has_single_point(panel: "Axes") -> bool:
    import numpy as np

    return any(line.is_dashed() and np.size(line.get_xdata()) == 1 for line in panel.lines)


def key(runs: Sequence[Curves], style: Style, *, has_single: bool) -> "tuple[list[Line2D], list[str]]":
    """One entry for each run, in its colour, and one for each kind of line, with what was done to it."""
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], **look(number, "validation")) for number in range(len(runs))]
    names = [run.label for run in runs]
    for kind, name in KINDS.items():
        lines.append(Line2D([], [], **{**look(0, kind, 1 if has_single else MOST_POINTS), "color": GRAY}))
        names.append(name + averaging(runs, kind, style))
    return lines, names


def averaging(runs: Sequence[Curves], kind: Kind, style: Style) -> str:
    changed = [
        run
        for run in runs
        for quantity in ("loss", "accuracy")
        if running_mean(run.points(kind, quantity), style.width(run, kind)) != run.points(kind, quantity)
    ]
    if not changed:
        return ""
    width = style.width(changed[0], kind)
    unit = "epoch" if width == 1 else "epochs"
    why = "" if style.smooth else "; batches are sorted by length"
    return f" (mean over {round_count(width)} {unit}{why})"


def to_csv(runs: Sequence[Curves], end: float = math.inf) -> str:
    """All records up to an epoch as CSV, one row per record, in the order of the runs."""
    rows = [
        {"run": printable(run.name)} | record for run in runs for record in run.records if record.get("epoch", 0) <= end
    ]
    names = list(dict.fromkeys([*COLUMNS, *(name for row in rows for name in row)]))
    text = io.StringIO()
    table = csv.DictWriter(text, names, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()
