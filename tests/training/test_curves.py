import csv
import json
import math

import pytest
from matplotlib.lines import Line2D

from clearhead.drawing import COLORS
from clearhead.training.curves import (
    MAX_POINTS,
    Curves,
    downsample,
    draw_curves,
    line_style,
    read_curves,
    running_mean,
    to_csv,
    windows_of,
)


def make_run(n_epochs: int, name: str = "mine", steps_per_epoch: int = 4, **last) -> Curves:
    records = []
    for step in range(1, n_epochs * steps_per_epoch + 1):
        at = {"step": step, "epoch": step / steps_per_epoch}
        records.append({"kind": "train", **at, "loss": 1 / step, "accuracy": 1 - 1 / step})
        if step % steps_per_epoch == 0:
            records.append({"kind": "validation", **at, "loss": 2 / step, "accuracy": 1 - 1.5 / step})
    return Curves(name, [*records, *([{"kind": "test", **at, **last}] if last else [])])


def lines(panel) -> dict[tuple[str, bool], Line2D]:
    """The lines of a panel by color and by whether they are dashed."""
    return {(line.get_color(), line.is_dashed()): line for line in panel.lines}


def test_each_window_is_a_row_with_its_own_x_limit():
    figure = draw_curves([make_run(30)], epochs=(10, 20, 30))
    assert len(figure.axes) == 6
    for panel, window in zip(figure.axes, (10, 10, 20, 20, 30, 30), strict=True):
        assert panel.get_xlim() == (0, window)
        assert panel.get_xlabel() == "epoch"
        assert f"epochs 0 to {window}" in panel.get_title()
    assert [panel.get_ylabel() for panel in figure.axes] == ["loss", "accuracy"] * 3


def test_values_are_drawn_at_their_own_epoch():
    """Regression test: the accuracies of the last epochs were once drawn in reverse order."""
    run = make_run(20)
    loss, accuracy = draw_curves([run], epochs=(10,)).axes
    for panel, quantity in ((loss, "loss"), (accuracy, "accuracy")):
        for kind, dashed in (("train", True), ("validation", False)):
            line = lines(panel)[COLORS[0], dashed]
            there = [(r["epoch"], r[quantity]) for r in run.records if r["kind"] == kind and r["epoch"] <= 10]
            assert list(zip(*line.get_data(), strict=True)) == there
            assert len(there) in (10, 40)


def test_y_scale_fits_the_window():
    """Each window has its own scale, so that no window is flattened by the values of another."""
    run = Curves("mine", [{"kind": "train", "epoch": e, "loss": 1.0 if e < 5 else 100.0} for e in range(1, 11)])
    first, _, whole, _ = draw_curves([run], epochs=(4, 10)).axes
    assert first.get_ylim()[1] < 2
    assert whole.get_ylim()[1] > 100


def test_runs_of_different_length_share_a_panel_in_different_colors():
    figure = draw_curves([make_run(10, "short"), make_run(50, "long")])
    (loss, _) = figure.axes
    assert loss.get_xlim() == (0, 50)
    ends = {key: line.get_xdata()[-1] for key, line in lines(loss).items()}
    assert ends == {(COLORS[i], dashed): end for i, end in ((0, 10), (1, 50)) for dashed in (True, False)}
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["short", "long", "training", "validation"]


def test_label_names_the_test_accuracy_and_tta():
    assert make_run(1, accuracy=0.98765, loss=1.0).label == "mine (test 98.77%)"
    assert "with mirror images" in make_run(1, accuracy=0.98765, tta="flip").label
    assert "6 views" in make_run(1, accuracy=0.98765, tta="shift").label
    assert make_run(1, loss=1.0).label == "mine"


def test_single_training_point_has_a_marker_distinct_from_validation():
    at = {"epoch": 0.5, "loss": 2.0, "accuracy": 0.2}
    one = Curves("one", [{"kind": kind, **at} for kind in ("train", "validation")])
    figure = draw_curves([one])
    for panel in figure.axes:
        train, validation = (lines(panel)[COLORS[0], dashed] for dashed in (True, False))
        assert train.get_marker() == validation.get_marker() == "o"
        assert train.get_markerfacecolor() == "none" != validation.get_markerfacecolor()
    _, train, validation = figure.legends[0].get_lines()
    assert (train.get_marker(), train.get_markerfacecolor(), validation.get_marker()) == ("o", "none", "o")


def test_training_line_has_no_markers():
    figure = draw_curves([make_run(2)])
    assert lines(figure.axes[0])[COLORS[0], True].get_marker() == "None"
    assert [line.get_marker() for line in figure.legends[0].get_lines()] == ["o", "None", "o"]


def test_accuracy_axis_ends_at_100_percent():
    panel = draw_curves([make_run(50)]).axes[1]
    assert panel.get_ylim()[1] <= 1.01
    assert panel.yaxis.get_major_formatter()(0.5) == "50%"


def test_missing_quantity_is_stated_in_its_panel():
    run = Curves("sums", [{"kind": "train", "epoch": 1.0, "loss": 3.0}])
    _, accuracy = draw_curves([run]).axes
    assert accuracy.texts[0].get_text() == "no accuracy in this window"


def test_many_points_are_thinned_to_means_of_neighbors():
    points = [(float(i), float(i % 2)) for i in range(10 * MAX_POINTS)]
    fewer = downsample(points)
    assert len(fewer) == MAX_POINTS
    assert {value for _, value in fewer} == {0.5}
    assert fewer[0][0] == 4.5
    assert downsample(points[:MAX_POINTS]) == points[:MAX_POINTS]
    assert downsample([]) == []


def test_partial_last_line_of_a_running_run_is_ignored(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    record = {"kind": "train", "step": 1, "epoch": 0.5, "loss": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + '\n{"kind": "tra')
    assert read_curves(tmp_path) == Curves(tmp_path.name, [record])


def test_windows_beyond_the_end_are_clipped_and_drawn_once():
    runs = [make_run(4, "short"), make_run(10, "long")]
    assert windows_of(runs, (5, 10, 20, 50)) == [5, 10]
    assert windows_of(runs) == [10]
    assert windows_of([Curves("under way", [{"epoch": 12.3}])], (10, 13, 14)) == [10, 13]
    assert windows_of([Curves("begun", [{"epoch": 0.13}])], (1, 2)) == [1]
    figure = draw_curves(runs, epochs=(5, 30))
    assert [panel.get_xlim()[1] for panel in figure.axes] == [5, 5, 10, 10]


def test_every_run_has_its_own_color_and_line_style():
    """Regression test: the eighth run once had the color of the first."""
    styles = [line_style(number, "validation") for number in range(24)]
    assert len({found["color"] for found in styles[:8]}) == 8
    assert len({(found["color"], str(found["linestyle"])) for found in styles}) == 24
    trained = [line_style(number, "train", n_points=2) for number in range(24)]
    assert len({(found["color"], str(found["linestyle"])) for found in styles + trained}) == 48


def test_panels_add_a_row_per_run_with_a_shared_scale():
    """In a shared panel, ten epochs would take a fifth of the width of fifty."""
    runs = [make_run(10, "ten"), make_run(50, "fifty")]
    panels = draw_curves(runs, panels=True).axes
    assert [panel.get_xlim()[1] for panel in panels] == [50, 50, 10, 10, 50, 50]
    assert panels[2].get_title() == "ten: loss, epochs 0 to 10"
    assert [len(panel.lines) for panel in panels] == [4, 4, 2, 2, 2, 2]
    assert panels[2].lines[0].get_color() == COLORS[0]
    assert panels[4].lines[0].get_color() == COLORS[1]
    assert panels[2].get_ylim() == panels[4].get_ylim() != panels[3].get_ylim() == panels[5].get_ylim()
    assert len(draw_curves(runs, epochs=(5, 20), panels=True).axes) == 8


def test_log_scale_applies_to_the_loss_only():
    loss, accuracy = draw_curves([make_run(3)], log=True).axes
    assert (loss.get_yscale(), accuracy.get_yscale()) == ("log", "linear")
    assert loss.get_ylabel() == "loss (log scale)"
    assert [panel.get_yscale() for panel in draw_curves([make_run(3)]).axes] == ["linear", "linear"]


def test_running_mean_preserves_lines_and_smooths_a_zigzag():
    flat = [(i / 10, 3.0) for i in range(1, 50)]
    assert all(value == pytest.approx(3.0) for _, value in running_mean(flat, 1))
    straight = [(i / 10, 2.0 * i) for i in range(1, 50)]
    inside = [(new, old) for new, old in zip(running_mean(straight, 1), straight, strict=True) if new[0] <= 4.3]
    assert len(inside) > 40
    assert all(new == pytest.approx(old) for new, old in inside)  # including the first points, which are not biased
    zigzag = [(i / 10, float(i % 2)) for i in range(1, 50)]
    assert all(abs(value - 0.5) < 0.06 for epoch, value in running_mean(zigzag, 2) if epoch > 1.1)
    assert [epoch for epoch, _ in running_mean(zigzag, 2)] == [epoch for epoch, _ in zigzag]
    assert running_mean(zigzag, 0) == zigzag
    assert running_mean([], 1) == []


def test_smoothing_draws_raw_values_faintly_and_is_named_in_the_legend():
    run = make_run(8, steps_per_epoch=10)
    figure = draw_curves([run], smooth=1)
    raw, mean, validation = figure.axes[0].lines
    assert list(zip(*raw.get_data(), strict=True)) == run.points("train", "loss")
    assert list(zip(*mean.get_data(), strict=True)) == running_mean(run.points("train", "loss"), 1)
    assert raw.get_alpha() < 0.5 < mean.get_alpha()
    assert list(validation.get_ydata()) == [value for _, value in run.points("validation", "loss")]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["mine", "training (mean over 1 epoch)", "validation"]


def test_training_curve_of_bucketed_batches_is_smoothed_and_labeled():
    """Batches alternate between long and short words, whose losses differ independently of learning."""
    records = [
        {"kind": "train", "step": s, "epoch": s / 10, "loss": 1.0 + s % 2, "accuracy": 0.5} for s in range(1, 201)
    ]
    mixed, sorted_by_length = Curves("mixed", records), Curves("sorted", records, is_bucketed=True)
    figure = draw_curves([sorted_by_length])
    raw, mean = figure.axes[0].lines
    assert (min(raw.get_ydata()), max(raw.get_ydata())) == (1, 2)
    assert all(abs(loss - 1.5) < 0.1 for epoch, loss in zip(*mean.get_data(), strict=True) if epoch > 1)
    assert figure.legends[0].get_texts()[1].get_text() == "training (mean over 1 epoch; batches are sorted by length)"
    short = [record | {"epoch": record["step"] / 50} for record in records[:15]]
    legend = draw_curves([Curves("short", short, is_bucketed=True)]).legends[0]
    assert legend.get_texts()[1].get_text() == "training (mean over 0.1 epochs; batches are sorted by length)"
    assert len(draw_curves([mixed]).axes[0].lines) == 1
    assert draw_curves([mixed]).legends[0].get_texts()[1].get_text() == "training"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"name": "words", "window": 50}, True),
        ({"name": "words", "window": 0}, False),
        ({"name": "mnist", "window": 50}, False),
        (None, False),
    ],
)
def test_is_bucketed_follows_from_the_data_config(tmp_path, data, expected):
    (tmp_path / "config.json").write_text(json.dumps({"data": data}))
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "epoch": 0.5, "loss": 1.0}\n')
    assert read_curves(tmp_path).is_bucketed is expected


def test_curves_are_read_from_a_run_a_bare_folder_or_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = '{"kind": "train", "step": 1, "epoch": 0.5, "loss": 1.0}\n'
    for place in ("runs/mine", "docs/runs/kept"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "metrics.jsonl").write_text(line)
    (tmp_path / "runs/mine/config.json").write_text("{}")
    (tmp_path / "other.jsonl").write_text(line)
    for given, name in (
        ("mine", "mine"),
        ("runs/mine", "mine"),
        ("docs/runs/kept", "kept"),
        ("docs/runs/kept/metrics.jsonl", "kept"),
        ("other.jsonl", "other"),
    ):
        assert read_curves(given) == Curves(name, [json.loads(line)])


def test_csv_has_every_record_up_to_the_window_in_full_precision():
    runs = [make_run(3, "a", accuracy=1 / 3, tta="flip"), make_run(2, "b")]
    rows = list(csv.DictReader(to_csv(runs).splitlines()))
    assert len(rows) == sum(len(run.records) for run in runs)
    assert list(rows[0]) == ["run", "kind", "step", "epoch", "loss", "accuracy", "tta"]
    found = [float(row["loss"]) for row in rows if row["run"] == "b"]
    assert found == [record["loss"] for record in runs[1].records]
    assert [row["accuracy"] for row in rows if row["kind"] == "test"] == [str(1 / 3)]
    assert max(float(row["epoch"]) for row in csv.DictReader(to_csv(runs, 1).splitlines())) == 1


def test_thousands_of_epochs_are_not_in_scientific_notation():
    run = Curves("long", [{"kind": "train", "epoch": e * 556.0, "loss": 1.0} for e in range(1, 11)])
    assert draw_curves([run]).axes[0].get_title() == "loss, epochs 0 to 5,560"
    assert math.isclose(run.length, 5560)


def test_run_without_records_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"curves need at least one training record, got none in .*; train the run longer"
    ):
        read_curves(tmp_path)
