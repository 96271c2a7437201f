"""Loss and accuracy against epochs: a row of panels for each window of epochs, all runs in each panel."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from clearhead.drawing import COLOURS, GREY, LIGHT, blank
from clearhead.training.records import Record, of_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Points = list[tuple[float, float]]
"""(epoch, value), in order"""
Quantity = Literal["loss", "accuracy"]
Kind = Literal["train", "validation"]
KINDS: dict[Kind, str] = {"train": "training", "validation": "validation"}
MOST_POINTS = 200
"""a line of more than these in one panel is noise that hides the others"""
MOST_MARKS = 60
MARKERS = "os^Dv<>PX"


@dataclass(frozen=True)
class Curves:
    """What one run has to show."""

    name: str
    records: list[Record]

    def points(self, kind: Kind, quantity: Quantity, window: float) -> Points:
        """What was measured until the end of the window."""
        return [
            (record["epoch"], record[quantity])
            for record in self.records
            if record.get("kind") == kind and quantity in record and record.get("epoch", window + 1) <= window
        ]

    @property
    def length(self) -> float:
        """in epochs"""
        return max(record.get("epoch", 0.0) for record in self.records)

    @property
    def label(self) -> str:
        tests = [record for record in self.records if record.get("kind") == "test" and "accuracy" in record]
        if not tests:
            return self.name
        how = {"mirror": ", with mirror images", "moved": ", mean over 6 views"}.get(tests[-1].get("views", ""), "")
        return f"{self.name} (test {tests[-1]['accuracy']:.2%}{how})"


def read_curves(folder: str | Path) -> Curves:
    """The records of a run, also of one that is still being trained."""
    folder = Path(folder)
    records = of_run(folder)
    if not any(record.get("epoch", 0) > 0 for record in records):
        raise ValueError(f"curves need records of at least one step, got none in {folder}; train it a little longer")
    return Curves(folder.resolve().name, records)


def draw_curves(runs: Sequence[Curves], epochs: Sequence[int] = ()) -> "Figure":
    """A row for each window, from epoch 0 to the given one; one row for the longest run without any."""
    windows: Sequence[float] = epochs or [max(run.length for run in runs)]
    figure = blank(11, 3.2 * len(windows) + 0.15 * len(runs) + 0.6)
    panels = figure.subplots(len(windows), 2, squeeze=False)
    for (left, right), window in zip(panels, windows, strict=True):
        draw_panel(left, runs, "loss", window)
        draw_panel(right, runs, "accuracy", window)
    has_single = any(line.is_dashed() and len(line.get_xydata()) == 1 for panel in panels.flat for line in panel.lines)
    lines, names = key(runs, n_points=1 if has_single else MOST_POINTS)
    figure.legend(lines, names, loc="outside lower center", ncols=min(len(names), 3), frameon=False, fontsize=11)
    return figure


def draw_panel(panel: "Axes", runs: Sequence[Curves], quantity: Quantity, window: float) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    for number, run in enumerate(runs):
        draw_line(panel, number, "train", thinned(run.points("train", quantity, window)))
        draw_line(panel, number, "validation", run.points("validation", quantity, window))
    panel.set_xlim(0, window)
    panel.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=window >= 2))
    panel.set_title(f"{quantity}, epochs 0 to {window:.3g}", fontsize=12)
    panel.set_xlabel("epoch", fontsize=11)
    panel.set_ylabel(quantity, fontsize=11)
    panel.grid(color=LIGHT, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    if not panel.lines:
        panel.set_yticks([])
        panel.text(0.5, 0.5, f"no {quantity} in this window", transform=panel.transAxes, ha="center", color=GREY)
    elif quantity == "accuracy":
        low, high = panel.get_ylim()
        panel.set_ylim(max(low, -0.01), min(high, 1.01))
        panel.yaxis.set_major_formatter(PercentFormatter(xmax=1))


def draw_line(panel: "Axes", number: int, kind: Kind, points: Points) -> None:
    if points:
        epochs, values = zip(*points, strict=True)
        panel.plot(epochs, values, **look(number, kind, len(points)))


def look(number: int, kind: Kind, n_points: int = 1) -> dict[str, Any]:
    """Validation has a mark for each measurement, another one for each run; training is dashed, and has a hollow mark
    only where a single point makes no line."""
    colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
    if kind == "train":
        hollow = {"marker": marker, "markerfacecolor": "none", "clip_on": False} if n_points == 1 else {}
        return {"color": colour, "linestyle": (0, (4, 2)), "linewidth": 1.2, "alpha": 0.8, **hollow}
    marker = marker if n_points <= MOST_MARKS else ""
    return {"color": colour, "linestyle": "-", "linewidth": 1.8, "marker": marker, "markersize": 4, "clip_on": False}


def thinned(points: Points) -> Points:
    """At most MOST_POINTS of them, each the mean of neighbours."""
    size = -(-len(points) // MOST_POINTS) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(fmean(epoch for epoch, _ in group), fmean(value for _, value in group)) for group in groups]


def key(runs: Sequence[Curves], n_points: int) -> "tuple[list[Line2D], list[str]]":
    """One entry for each run, in its colour, and one for each kind of line, as it looks with so many points."""
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], **look(number, "validation")) for number in range(len(runs))]
    for kind in KINDS:
        lines.append(Line2D([], [], **{**look(0, kind, n_points), "color": GREY}))
    return lines, [*(run.label for run in runs), *KINDS.values()]
