from collections import Counter

import pytest
import torch

from clearhead.tasks.sequences import Digits, Reverse

REVERSE = Reverse(validation=500).load(1)
FIRST_500 = torch.arange(500)


def test_reverse_targets_are_the_reversed_inputs():
    ids, targets = REVERSE.train.get_batch(FIRST_500)
    assert ids.shape == (500, 16)
    assert ids.dtype == targets.dtype == torch.int64
    assert ids.unique().tolist() == list(range(10))
    assert torch.equal(ids.flip(1), targets)


def test_reverse_examples_do_not_depend_on_the_batch():
    ids, _ = REVERSE.train.get_batch(FIRST_500)
    assert torch.equal(REVERSE.train.get_batch(torch.tensor([77, 3]))[0], ids[[77, 3]])


def test_reverse_splits_are_disjoint_and_free_of_duplicates():
    parts = [part.get_batch(torch.arange(len(part)))[0] for part in (REVERSE.train, REVERSE.validation, REVERSE.test)]
    assert [len(part) for part in parts] == [50_000, 500, 10_000]
    assert len(torch.cat(parts).unique(dim=0)) == 60_500


def test_the_seed_changes_the_reverse_sequences():
    other = Reverse().load(2)
    assert not (REVERSE.train.get_batch(FIRST_500)[0] == other.train.get_batch(FIRST_500)[0]).all(1).any()


def test_length_limit_and_validation_set_the_reverse_dataset_sizes():
    data = Reverse(length=5, limit=30, validation=3).load(0)
    assert (len(data.train), len(data.validation)) == (30, 3)
    assert data.train.get_batch(torch.arange(30))[0].shape == (30, 5)


FIRST_2000 = torch.arange(2000)


def examples(question, length, split="train"):
    config = Digits(question=question, length=length, validation=2000)
    return getattr(config.load(5), split).get_batch(FIRST_2000)


def most_common(ids):
    counts = Counter(ids)
    return min(counts, key=lambda digit: (-counts[digit], digit))


@pytest.mark.parametrize(
    ("question", "length", "reference"),
    [
        ("most-common", 16, most_common),
        ("most-common", 3, most_common),
        ("sum", 16, sum),
        ("repeat", 8, lambda ids: len(set(ids)) < len(ids)),
        ("repeat", 2, lambda ids: len(set(ids)) < len(ids)),
        ("repeat", 10, lambda ids: len(set(ids)) < len(ids)),
    ],
)
def test_digits_targets_match_a_reference_implementation(question, length, reference):
    ids, targets = examples(question, length)
    assert ids.shape == (2000, length)
    assert ids.min() >= 0
    assert ids.max() <= 9
    assert targets.tolist() == [reference(row) for row in ids.tolist()]
    assert targets.dtype == (torch.int64 if question == "most-common" else torch.float32)


@pytest.mark.parametrize("length", [2, 5, 10])
def test_half_of_the_repeat_examples_contain_exactly_one_repeated_digit(length):
    ids, targets = examples("repeat", length)
    assert 0.45 < targets.mean() < 0.55
    for row, target in zip(ids.tolist(), targets.tolist(), strict=True):
        assert len(set(row)) == length - target


@pytest.mark.parametrize(("question", "length"), [("most-common", 16), ("repeat", 9), ("sum", 16)])
def test_digits_splits_are_disjoint(question, length):
    first = examples(question, length)[0]
    for split in ("validation", "test"):
        assert not (first == examples(question, length, split)[0]).all(1).any()
