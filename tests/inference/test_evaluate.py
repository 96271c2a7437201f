import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.data.sequences import load_splits
from clearhead.inference.evaluate import confusion_matrix, draw_confusion, loss_and_accuracy
from clearhead.inference.run import Run
from clearhead.tasks import pronunciation
from clearhead.tasks.pronunciation import (
    Pronunciation,
    distance_to_nearest,
    edit_distance,
    error_rates,
    training_overlap,
    words_to_score,
)
from clearhead.training.run_directory import RunDirectory

PHONES = st.lists(st.sampled_from(["AA", "B", "K"]), max_size=7)


def slow_distance(one, other):
    """The definition, for short sequences."""
    if not one or not other:
        return len(one) + len(other)
    same = slow_distance(one[1:], other[1:]) + (one[0] != other[0])
    return min(same, slow_distance(one[1:], other) + 1, slow_distance(one, other[1:]) + 1)


@given(st.text("ab", max_size=5), st.text("ab", max_size=5))
def test_edit_distance_equals_its_recursive_definition(one, other):
    assert edit_distance(one, other) == slow_distance(one, other)


@given(PHONES, PHONES, PHONES)
def test_edit_distance_is_a_metric(one, two, three):
    assert edit_distance(one, two) == edit_distance(two, one)
    assert (edit_distance(one, two) == 0) == (one == two)
    assert edit_distance(one, three) <= edit_distance(one, two) + edit_distance(two, three)


def test_errors_are_counted_against_the_nearest_pronunciation():
    assert distance_to_nearest(("B", "AA"), [("K", "K", "K"), ("B", "AA", "K")]) == (1, 3)
    assert distance_to_nearest(("B", "AA"), [("B",), ("B", "AA")]) == (0, 2)


def test_error_rates_of_a_small_example(trained, monkeypatch):
    words = {"cab": (("K", "AE", "B"), ("K", "D", "B")), "bad": (("B", "AE", "D"),), "a": (("AE",),)}
    said = {"cab": ("K", "D", "B"), "bad": ("B", "D"), "a": ("K", "K")}
    monkeypatch.setattr(
        pronunciation, "pronounce", lambda run, asked, beam: [[Pronunciation(said[w], -1.0)] for w in asked]
    )
    found = error_rates(Run(trained / "pronounce"), words)
    assert (found.words, found.wrong, found.phones, found.errors) == (3, 2, 7, 3)
    assert (found.word_error_rate, found.phoneme_error_rate) == (2 / 3, 3 / 7)


def test_words_come_from_the_run_or_from_a_file(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(trained.parent)
    run = Run(trained / "pronounce")
    assert set(words_to_score(run.task, run, "test")) == {"cab", "bad"}
    assert len(words_to_score(run.task, run, "validation")) == 20
    (tmp_path / "own").write_text("ab\tAE1 B\n")
    assert words_to_score(run.task, run, "test", tmp_path / "own") == {"ab": (("AE", "B"),)}
    with pytest.raises(ValueError, match="no words to evaluate on"):
        error_rates(run, {})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("cab\tK EH1 B", r"own: unknown token 'EH' in K EH B; the vocabulary is AE B D K"),
        ("xab\tK AE B", r"own: unknown token 'x' in 'xab'; the vocabulary is 'abcd'"),
    ],
)
def test_unknown_letters_and_phones_are_refused(trained, tmp_path, line, message):
    """Such as the phones of a dictionary with stress: every word would be wrong."""
    (tmp_path / "own").write_text(f"ab\tAE B\n{line}\n")
    run = Run(trained / "pronounce")
    with pytest.raises(LookupError, match=message):
        words_to_score(run.task, run, "test", tmp_path / "own")


def test_training_overlap_counts_the_words_of_the_training_part(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(trained.parent)
    run = Run(trained / "pronounce")
    train, held = load_splits(run.config.data)["train"], load_splits(run.config.data)["validation"]
    mixed = dict.fromkeys([*list(train)[:3], *held, "zzz"], (("B",),))
    assert training_overlap(run.task, run, mixed) == 3
    monkeypatch.chdir(tmp_path)
    assert training_overlap(run.task, run, mixed) is None


def test_changed_data_files_are_refused(trained, tmp_path, monkeypatch):
    run = Run(trained / "pronounce")
    monkeypatch.chdir(tmp_path)
    for name in ("my.dict", "my.test"):
        (tmp_path / name).write_text((trained.parent / name).read_text() + "abba AE B B AE\n" * (name == "my.dict"))
    message = r"changed since training: my\.dict"
    with pytest.raises(ValueError, match=message):
        words_to_score(run.task, run, "validation")
    with pytest.raises(ValueError, match=message):
        loss_and_accuracy(run, "validation")
    assert training_overlap(run.task, run, {"cab": (("B",),)}) is None


@pytest.mark.parametrize("name", ["mnist", "reverse", "words", "pronounce"])
def test_metrics_equal_those_of_the_test_record(trained, monkeypatch, name):
    monkeypatch.chdir(trained.parent)
    (record,) = [r for r in RunDirectory.open(trained / name).records() if r["kind"] == "test"]
    for key, value in loss_and_accuracy(Run(trained / name), "test").items():
        assert value == pytest.approx(record[key], rel=1e-5)


def test_an_empty_part_is_refused(trained, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("To be, or not to be: that is the question.\n" * 40)
    with pytest.raises(ValueError, match="has no test examples; try --part validation"):
        loss_and_accuracy(Run(trained / "text"), "test")
    assert loss_and_accuracy(Run(trained / "text"), "validation")["loss"] > 0


def test_confusion_matrix_has_targets_as_rows_and_predictions_as_columns():
    matrix = confusion_matrix(torch.tensor([0, 0, 2, 1, 2]), torch.tensor([0, 1, 2, 1, 0]), 3)
    assert matrix.tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 1]]


def test_confusion_matrix_counts_every_example_once():
    targets, predictions = torch.randint(7, (2, 500))
    matrix = confusion_matrix(targets, predictions, 7)
    assert matrix.sum() == 500
    assert matrix.sum(1).equal(targets.bincount(minlength=7))
    assert matrix.sum(0).equal(predictions.bincount(minlength=7))
    assert matrix.trace() == (targets == predictions).sum()
    assert confusion_matrix(targets[:0], predictions[:0], 7).equal(torch.zeros(7, 7, dtype=torch.long))


@pytest.mark.parametrize(
    ("targets", "predictions", "message"),
    [
        ([0, 3], [0, 1], r"targets must be classes from 0 to 2, got 0 to 3"),
        ([0, 1], [-1, 1], r"predictions must be classes from 0 to 2, got -1 to 1"),
        ([0, 1], [0], r"same length, got shapes \(2,\) and \(1,\)"),
        ([[0, 1]], [[0, 1]], r"must be vectors .*, got shapes \(1, 2\) and \(1, 2\)"),
        ([0.0, 1.0], [0, 1], r"targets must be integers, got torch.float32"),
    ],
)
def test_confusion_matrix_refuses_invalid_classes(targets, predictions, message):
    with pytest.raises(ValueError, match=message):
        confusion_matrix(torch.tensor(targets), torch.tensor(predictions), 3)


def test_the_note_is_in_the_title_of_the_confusion_matrix():
    panel, _ = draw_confusion(torch.eye(2), ["cat", "dog"], "mean of 2 views").axes
    assert panel.get_title() == "2 of 2 correct (100.00%), mean of 2 views"


def test_cells_show_counts_and_colors_show_fractions_of_the_row():
    matrix = torch.tensor([[90, 10], [0, 3000]])
    panel, bar = draw_confusion(matrix, ["cat", "dog"]).axes
    cells = {text.get_position(): text.get_text() for text in panel.texts}
    assert cells == {(0, 0): "90", (1, 0): "10", (1, 1): "3,000"}
    (image,) = panel.images
    assert torch.from_numpy(image.get_array().data).equal(torch.tensor([[0.9, 0.1], [0, 1]]))
    assert image.get_clim() == bar.get_ylim() == (0, 1)
    assert [t.get_text() for t in panel.get_yticklabels()] == ["cat", "dog"]
    assert panel.get_ylabel() == "actual"
    assert panel.get_title() == "3,090 of 3,100 correct (99.68%)"


def test_empty_and_large_confusion_matrices_are_drawn():
    panel = draw_confusion(torch.zeros(2, 2, dtype=torch.long), ["a", "b"]).axes[0]
    assert panel.get_title() == "0 of 0 correct"
    many = draw_confusion(torch.eye(100, dtype=torch.long), [f"class {i}" for i in range(100)]).axes[0]
    assert not many.texts
    assert len(many.get_yticks()) <= 30


@pytest.mark.parametrize("classes", [["a"], []])
def test_draw_confusion_needs_a_name_for_each_class(classes):
    with pytest.raises(ValueError, match=r"a row and a column for each class, got shape \(2, 2\)"):
        draw_confusion(torch.eye(2), classes)
