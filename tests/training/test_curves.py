import json

import pytest
from matplotlib.lines import Line2D

from clearhead.drawing import COLOURS
from clearhead.training.curves import MOST_POINTS, Curves, draw_curves, read_curves, thinned


def run_of(n_epochs: int, name: str = "mine", steps_per_epoch: int = 4, **last) -> Curves:
    records = []
    for step in range(1, n_epochs * steps_per_epoch + 1):
        at = {"step": step, "epoch": step / steps_per_epoch}
        records.append({"kind": "train", **at, "loss": 1 / step, "accuracy": 1 - 1 / step})
        if step % steps_per_epoch == 0:
            records.append({"kind": "validation", **at, "loss": 2 / step, "accuracy": 1 - 1.5 / step})
    return Curves(name, [*records, *([{"kind": "test", **at, **last}] if last else [])])


def lines(panel) -> dict[tuple[str, bool], Line2D]:
    """by colour, and whether it is dashed"""
    return {(line.get_color(), line.is_dashed()): line for line in panel.lines}


def test_every_window_is_a_row_that_ends_where_it_says():
    figure = draw_curves([run_of(30)], epochs=(10, 20, 30))
    assert len(figure.axes) == 6
    for panel, window in zip(figure.axes, (10, 10, 20, 20, 30, 30), strict=True):
        assert panel.get_xlim() == (0, window)
        assert panel.get_xlabel() == "epoch"
        assert f"epochs 0 to {window}" in panel.get_title()
    assert [panel.get_ylabel() for panel in figure.axes] == ["loss", "accuracy"] * 3


def test_values_stand_at_their_own_epoch():
    """The report that this answers drew the accuracies of its last epochs backwards."""
    run = run_of(20)
    loss, accuracy = draw_curves([run], epochs=(10,)).axes
    for panel, quantity in ((loss, "loss"), (accuracy, "accuracy")):
        for kind, dashed in (("train", True), ("validation", False)):
            line = lines(panel)[COLOURS[0], dashed]
            there = [(r["epoch"], r[quantity]) for r in run.records if r["kind"] == kind and r["epoch"] <= 10]
            assert list(zip(*line.get_data(), strict=True)) == there
            assert len(there) in (10, 40)


def test_the_scale_is_that_of_the_window():
    """Losses of the first epochs must not be squeezed by what comes later, nor the other way round."""
    run = Curves("mine", [{"kind": "train", "epoch": e, "loss": 1.0 if e < 5 else 100.0} for e in range(1, 11)])
    first, _, whole, _ = draw_curves([run], epochs=(4, 10)).axes
    assert first.get_ylim()[1] < 2
    assert whole.get_ylim()[1] > 100


def test_runs_of_different_length_share_a_panel_each_in_its_colour():
    figure = draw_curves([run_of(10, "short"), run_of(50, "long")])
    (loss, _) = figure.axes
    assert loss.get_xlim() == (0, 50)
    ends = {key: line.get_xdata()[-1] for key, line in lines(loss).items()}
    assert ends == {(COLOURS[i], dashed): end for i, end in ((0, 10), (1, 50)) for dashed in (True, False)}
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["short", "long", "training", "validation"]


def test_the_test_result_is_named_and_so_is_averaging():
    assert run_of(1, accuracy=0.98765, loss=1.0).label == "mine (test 98.77%)"
    assert "with mirror images" in run_of(1, accuracy=0.98765, views="mirror").label
    assert "6 views" in run_of(1, accuracy=0.98765, views="moved").label
    assert run_of(1, loss=1.0).label == "mine"


def test_a_single_point_of_training_is_seen_and_is_not_that_of_validation():
    at = {"epoch": 0.5, "loss": 2.0, "accuracy": 0.2}
    one = Curves("one", [{"kind": kind, **at} for kind in ("train", "validation")])
    figure = draw_curves([one])
    for panel in figure.axes:
        train, validation = (lines(panel)[COLOURS[0], dashed] for dashed in (True, False))
        assert train.get_marker() == validation.get_marker() == "o"
        assert train.get_markerfacecolor() == "none" != validation.get_markerfacecolor()
    _, train, validation = figure.legends[0].get_lines()
    assert (train.get_marker(), train.get_markerfacecolor(), validation.get_marker()) == ("o", "none", "o")


def test_a_line_of_training_has_no_marks():
    figure = draw_curves([run_of(2)])
    assert lines(figure.axes[0])[COLOURS[0], True].get_marker() == "None"
    assert [line.get_marker() for line in figure.legends[0].get_lines()] == ["o", "None", ""]


def test_accuracy_stays_below_its_end():
    panel = draw_curves([run_of(50)]).axes[1]
    assert panel.get_ylim()[1] <= 1.01
    assert panel.yaxis.get_major_formatter()(0.5) == "50%"


def test_what_was_not_measured_is_said():
    run = Curves("sums", [{"kind": "train", "epoch": 1.0, "loss": 3.0}])
    _, accuracy = draw_curves([run]).axes
    assert accuracy.texts[0].get_text() == "no accuracy in this window"


def test_many_points_become_means_of_neighbours():
    points = [(float(i), float(i % 2)) for i in range(10 * MOST_POINTS)]
    fewer = thinned(points)
    assert len(fewer) == MOST_POINTS
    assert {value for _, value in fewer} == {0.5}
    assert fewer[0][0] == 4.5
    assert thinned(points[:MOST_POINTS]) == points[:MOST_POINTS]
    assert thinned([]) == []


def test_a_run_is_read_while_it_writes(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    record = {"kind": "train", "step": 1, "epoch": 0.5, "loss": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + '\n{"kind": "tra')
    assert read_curves(tmp_path) == Curves(tmp_path.name, [record])


def test_a_run_without_records_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"curves need records of at least one step, got none in .*; train it"):
        read_curves(tmp_path)
