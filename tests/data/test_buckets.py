import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.data.batches import bucket_by_length, padding_fraction
from clearhead.data.prng import permutation


@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 4), st.integers(1, 2), st.integers(0, 99))
def test_each_example_once_and_the_same_each_time(n, batch_size, window, sides, key):
    batch_size = min(batch_size, n)
    lengths = permutation(key, n * sides).view(n, sides) % 11 + 1
    members = permutation(key + 1, n)
    once = bucket_by_length(members, lengths, batch_size, window, key)
    assert torch.equal(once, bucket_by_length(members, lengths, batch_size, window, key))
    assert once.sort().values.tolist() == list(range(n))
    n_full = n // batch_size * batch_size
    assert torch.equal(once[n_full:], members[n_full:])


def test_batches_of_a_window_are_sorted_and_then_shuffled():
    lengths = torch.arange(100).flip(0)[:, None]
    found = bucket_by_length(permutation(0, 100), lengths, 10, window=10, key=3).view(10, 10)
    assert torch.equal(lengths[found].flatten(1).diff(dim=1), torch.ones(10, 9, dtype=torch.int64))
    assert found[:, 0].tolist() != sorted(found[:, 0].tolist(), reverse=True)


def test_a_window_of_more_batches_than_there_are_is_all_of_them():
    lengths = permutation(1, 20)[:, None]
    found = (bucket_by_length(permutation(0, 20), lengths, 4, window, key=3).tolist() for window in (5, 10**30))
    assert next(found) == next(found)


def test_equal_first_sides_are_sorted_by_the_second():
    lengths = torch.tensor([[2, 9], [1, 5], [2, 1], [1, 7]])
    assert bucket_by_length(torch.arange(4), lengths, 4, window=1, key=0).tolist() == [1, 3, 2, 0]


def test_padding_by_hand():
    lengths = torch.tensor([[1, 4], [3, 4], [2, 2], [2, 1]])
    assert padding_fraction(torch.arange(4), lengths, 2) == 1 - 19 / (6 + 8 + 4 + 4)
    assert padding_fraction(torch.arange(4), torch.full((4, 1), 7), 4) == 0


def test_sorting_pads_less():
    lengths = permutation(5, 4000).view(2000, 2) % 20 + 1
    members = permutation(6, 2000)
    sorted_share = padding_fraction(bucket_by_length(members, lengths, 16, 50, key=0), lengths, 16)
    assert sorted_share < 0.6 * padding_fraction(members, lengths, 16)
