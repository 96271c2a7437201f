"""Learning curves: loss and accuracy of one or more runs against epochs, as a figure or as a CSV table.

Each window of epochs has a row of two panels with all runs; optionally, a row for each run follows. If batches are
sorted by length (`data.window`), the training loss oscillates, because long and short examples have different losses.
Such curves are smoothed by a running mean, which the legend mentions; the recorded values are drawn faintly behind it.
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
"""(epoch, value) pairs in the order of epochs"""
Quantity = Literal["loss", "accuracy"]
Kind = Literal["train", "validation"]
KINDS: dict[Kind, str] = {"train": "training", "validation": "validation"}
BUCKETED = ("pronounce", "words")
"""data sets whose batches contain examples of similar length"""
MIN_SMOOTHING = 0.1
"""epochs; in a short run, a tenth of its length may contain a single record"""
MAX_POINTS = 200
"""points per line; with more, the noise of one line hides the others"""
MAX_MARKERS = 60
MARKERS = "os^Dv<>PX"
VALIDATION_LINES = ("-", (0, (7, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
TRAINING_LINES = ((0, (4, 2)), (0, (1, 1)), (0, (1, 3)))
"""line styles of the first eight runs, which differ in color, of the next eight, and of all others"""
COLUMNS = ("run", "kind", "step", "epoch", "loss", "accuracy")
"""the first columns of the CSV table; other recorded metrics follow"""


@dataclass(frozen=True)
class Curves:
    """The records of one run."""

    name: str
    records: list[Record]
    is_bucketed: bool = False
    """whether batches contain examples of similar length, so that the training loss varies with the length"""

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
        tta = {"flip": ", with mirror images", "shift": ", mean over 6 views"}.get(tests[-1].get("tta", ""), "")
        return f"{displayable(self.name)} (test {tests[-1]['accuracy']:.2%}{tta})"


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
    """The records of a run, finished or not; of a folder that contains a metrics.jsonl; or of such a file."""
    path = find_records(run)
    records = read(path)
    if not any(record.get("epoch", 0) > 0 for record in records):
        raise ValueError(f"curves need at least one training record, got none in {run}; train the run longer")
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
    """The last epoch of each window: `epochs`, limited to the length of the longest run, without duplicates. The
    default is one window up to the last record."""
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
    """A row of panels for each window of epochs, with all runs.

    `panels` adds a row for each run, from epoch 0 to its last one. `log` gives the loss a logarithmic axis; `smooth` is
    the width of the running mean in epochs.
    """
    windows, single_runs = windows_of(runs, epochs), list(runs) if panels else []
    longest = max((run.length for run in runs if run.is_bucketed), default=0.0)
    style = Style(log=log, smooth=smooth, bucketed=min(1.0, max(MIN_SMOOTHING, float(f"{longest / 10:.1g}"))))
    n_rows = len(windows) + len(single_runs)
    legend_rows = math.ceil((len(runs) + len(KINDS)) / 3)
    figure = new_figure(11, 3.2 * n_rows + 0.25 * legend_rows + 0.3)
    rows = figure.subplots(n_rows, 2, squeeze=False)
    for (left, right), window in zip(rows, windows, strict=False):
        draw_panel(left, dict(enumerate(runs)), "loss", window, style)
        draw_panel(right, dict(enumerate(runs)), "accuracy", window, style)
    single_rows = rows[len(windows) :]
    for number, (left, right) in enumerate(single_rows):
        run = single_runs[number]
        draw_panel(left, {number: run}, "loss", run.length, style, f"{displayable(run.name)}: ")
        draw_panel(right, {number: run}, "accuracy", run.length, style, f"{displayable(run.name)}: ")
    for column in (0, 1):
        share_y_limits([row[column] for row in single_rows])
    lines, names = legend_entries(runs, style, has_single=any(map(has_single_point, rows.flat)))
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
    """A logarithmic axis with ticks at 1, 2 and 5 times each power of ten, because losses rarely span several."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    panel.set_yscale("log", nonpositive="mask")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.set_ylabel("loss (log scale)", fontsize=11)


def share_y_limits(panels: "Sequence[Axes]") -> None:
    """Give panels of the same quantity the same limits, so that they can be compared."""
    limits = [panel.get_ylim() for panel in panels if panel.lines]
    for panel in panels:
        if panel.lines:
            panel.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))


def draw_line(panel: "Axes", number: int, kind: Kind, points: Points, window: float, width: float) -> None:
    """Draw the points up to the end of the window, smoothed if `width` is above 0, with the raw points behind them."""
    means = running_mean(points, width)
    shown, raw = ([point for point in line if point[0] <= window] for line in (means, points))
    if not shown:
        return
    if means != points:
        panel.plot(*zip(*downsample(raw, MAX_POINTS * 3), strict=True), **raw_line_style(number))
    if kind == "train":
        shown = downsample(shown)
    panel.plot(*zip(*shown, strict=True), **line_style(number, kind, len(shown)))


def line_style(number: int, kind: Kind, n_points: int = 1) -> dict[str, Any]:
    """matplotlib options for the line of a run. Runs differ in color and marker; after eight runs, in the dash pattern.

    Validation curves have markers. Training curves are dashed, with a hollow marker only if they have a single point.
    """
    color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
    pattern = min(number // len(COLORS), len(VALIDATION_LINES) - 1)
    if kind == "train":
        hollow = {"marker": marker, "markerfacecolor": "none", "clip_on": False} if n_points == 1 else {}
        return {"color": color, "linestyle": TRAINING_LINES[pattern], "linewidth": 1.2, "alpha": 0.8, **hollow}
    markers = {"marker": marker, "markersize": 4, "markevery": math.ceil(n_points / MAX_MARKERS), "clip_on": False}
    return {"color": color, "linestyle": VALIDATION_LINES[pattern], "linewidth": 1.8, **markers}


def raw_line_style(number: int) -> dict[str, Any]:
    """matplotlib options for the faint line of recorded values behind a running mean."""
    return {"color": COLORS[number % len(COLORS)], "linewidth": 0.7, "alpha": 0.3, "zorder": 1.5}


def running_mean(points: Points, width: float) -> Points:
    """The mean of all values at most width/2 epochs away from each point.

    At the beginning, where curves are steep, the interval is shortened on both sides; at the end, on the right only.
    """
    if width <= 0:
        return points
    epochs = [epoch for epoch, _ in points]
    sums = list(accumulate((value for _, value in points), initial=0.0))
    means = []
    for epoch, value in points:
        radius = min(width / 2, epoch - epochs[0]) * (1 + 1e-9)  # includes points on both boundaries despite rounding
        first, last = bisect_left(epochs, epoch - radius), bisect_right(epochs, epoch + radius)
        means.append((epoch, value if last - first == 1 else (sums[last] - sums[first]) / (last - first)))
    return means


def downsample(points: Points, max_points: int = MAX_POINTS) -> Points:
    """At most `max_points` points, each the mean of consecutive ones."""
    size = -(-len(points) // max_points) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(fmean(epoch for epoch, _ in group), fmean(value for _, value in group)) for group in groups]


def has_single_point(panel: "Axes") -> bool:
    import numpy as np

    return any(line.is_dashed() and np.size(line.get_xdata()) == 1 for line in panel.lines)


def legend_entries(runs: Sequence[Curves], style: Style, *, has_single: bool) -> "tuple[list[Line2D], list[str]]":
    """An entry for each run, in its color, and one for each kind of line, with the smoothing that was applied."""
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], **line_style(number, "validation")) for number in range(len(runs))]
    names = [run.label for run in runs]
    for kind, name in KINDS.items():
        lines.append(Line2D([], [], **{**line_style(0, kind, 1 if has_single else MAX_POINTS), "color": GRAY}))
        names.append(name + smoothing_note(runs, kind, style))
    return lines, names


def smoothing_note(runs: Sequence[Curves], kind: Kind, style: Style) -> str:
    """A suffix for the legend: the width of the running mean, and the reason if it was not requested."""
    smoothed = [
        run
        for run in runs
        for quantity in ("loss", "accuracy")
        if running_mean(run.points(kind, quantity), style.width(run, kind)) != run.points(kind, quantity)
    ]
    if not smoothed:
        return ""
    width = style.width(smoothed[0], kind)
    unit = "epoch" if width == 1 else "epochs"
    reason = "" if style.smooth else "; batches are sorted by length"
    return f" (mean over {round_count(width)} {unit}{reason})"


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
