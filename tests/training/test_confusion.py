import pytest
import torch

from clearhead.inference.evaluate import confusion_matrix, draw_confusion


def test_rows_are_right_answers_and_columns_what_was_answered():
    matrix = confusion_matrix(torch.tensor([0, 0, 2, 1, 2]), torch.tensor([0, 1, 2, 1, 0]), 3)
    assert matrix.tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 1]]


def test_every_example_is_counted_once():
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
        ([0, 1], [0], r"one class for each example, got shapes \(2,\) and \(1,\)"),
        ([[0, 1]], [[0, 1]], r"flatten both"),
        ([0.0, 1.0], [0, 1], r"targets must be whole numbers, got torch.float32"),
    ],
)
def test_what_is_no_class_is_refused(targets, predictions, message):
    with pytest.raises(ValueError, match=message):
        confusion_matrix(torch.tensor(targets), torch.tensor(predictions), 3)


def test_how_answers_were_made_stands_beside_their_number():
    panel, _ = draw_confusion(torch.eye(2), ["cat", "dog"], "mean of 2 views").axes
    assert panel.get_title() == "2 of 2 correct (100.00%), mean of 2 views"


def test_cells_show_counts_and_colours_show_the_share_of_the_row():
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


def test_a_class_that_never_occurs_and_many_classes_are_drawn():
    panel = draw_confusion(torch.zeros(2, 2, dtype=torch.long), ["a", "b"]).axes[0]
    assert panel.get_title() == "0 of 0 correct"
    many = draw_confusion(torch.eye(100, dtype=torch.long), [f"class {i}" for i in range(100)]).axes[0]
    assert not many.texts
    assert len(many.get_yticks()) <= 30


@pytest.mark.parametrize("classes", [["a"], []])
def test_each_class_needs_a_name(classes):
    with pytest.raises(ValueError, match=r"a row and a column for each class, got \(2, 2\)"):
        draw_confusion(torch.eye(2), classes)
