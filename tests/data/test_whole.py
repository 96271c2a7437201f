from collections import Counter

import pytest
import torch

from clearhead.data.datasets import DataConfig, load_dataset

ALL = torch.arange(2000)


def examples(question, length, split="train"):
    config = DataConfig(name="digits", question=question, length=length, validation=2000)
    return getattr(load_dataset(config, seed=5), split).get_batch(ALL)


def commonest(ids):
    counts = Counter(ids)
    return min(counts, key=lambda digit: (-counts[digit], digit))


@pytest.mark.parametrize(
    ("question", "length", "answer"),
    [
        ("most-common", 16, commonest),
        ("most-common", 3, commonest),
        ("sum", 16, sum),
        ("repeat", 8, lambda ids: len(set(ids)) < len(ids)),
        ("repeat", 2, lambda ids: len(set(ids)) < len(ids)),
        ("repeat", 10, lambda ids: len(set(ids)) < len(ids)),
    ],
)
def test_answers_are_right(question, length, answer):
    ids, targets = examples(question, length)
    assert ids.shape == (2000, length)
    assert ids.min() >= 0
    assert ids.max() <= 9
    assert targets.tolist() == [answer(row) for row in ids.tolist()]
    assert targets.dtype == (torch.int64 if question == "most-common" else torch.float32)


@pytest.mark.parametrize("length", [2, 5, 10])
def test_half_of_the_sequences_have_a_repeat_and_only_one(length):
    ids, targets = examples("repeat", length)
    assert 0.45 < targets.mean() < 0.55
    for row, target in zip(ids.tolist(), targets.tolist(), strict=True):
        assert len(set(row)) == length - target


@pytest.mark.parametrize(("question", "length"), [("most-common", 16), ("repeat", 9), ("sum", 16)])
def test_the_parts_have_sequences_of_their_own(question, length):
    first = examples(question, length)[0]
    for split in ("validation", "test"):
        assert not (first == examples(question, length, split)[0]).all(1).any()
