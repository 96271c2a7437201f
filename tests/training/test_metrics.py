import torch

from clearhead.training.objectives import compute_metrics, metric_sums


def test_counts_of_unequal_parts_add_up_where_means_would_not():
    right = torch.tensor([True, True, True, False, False])
    parts = metric_sums(torch.tensor(3.0), right[:1]) + metric_sums(torch.tensor(5.0), right[1:])
    assert compute_metrics(parts.tolist()) == {"loss": 8 / 5, "accuracy": 3 / 5}
    assert sum(part.float().mean().item() for part in (right[:1], right[1:])) / 2 != 3 / 5


def test_an_example_with_several_answers_is_whole_when_all_are_right():
    right = torch.tensor([[True, True, True], [True, False, True]])
    assert compute_metrics(metric_sums(torch.tensor(1.0), right).tolist()) == {
        "loss": 0.5,
        "accuracy": 5 / 6,
        "exact_match": 0.5,
    }


def test_no_examples_count_nothing():
    none = metric_sums(torch.tensor(0.0), torch.zeros(0, 3, dtype=torch.bool))
    assert none.tolist() == [0.0] * 5


def test_a_loss_that_is_counted_needs_no_gradient():
    loss = torch.tensor(1.0, requires_grad=True) * 2
    assert not metric_sums(loss, torch.ones(1, dtype=torch.bool)).requires_grad


def test_what_was_not_asked_for_counts_neither_as_right_nor_as_wrong():
    right = torch.tensor([[True, False, True], [True, False, False]])
    asked = torch.tensor([[True, False, False], [True, True, False]])
    assert compute_metrics(metric_sums(torch.tensor(1.0), right, asked).tolist()) == {
        "loss": 0.5,
        "accuracy": 2 / 3,
        "exact_match": 0.5,
    }
    everywhere = torch.ones_like(asked)
    assert torch.equal(metric_sums(torch.tensor(1.0), right, everywhere), metric_sums(torch.tensor(1.0), right))
