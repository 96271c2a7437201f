import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.data.dataset import GOLDEN, fold_in, mix_one, permutation, random_below, random_bits, signed

int64 = st.integers(-(2**63), 2**63 - 1)


def test_mix_one_matches_the_published_splitmix64_outputs():
    """The first outputs for seed 1234567, as published by the authors of splitmix64."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [mix_one(1234567 + GOLDEN * (i + 1)) for i in range(3)] == published


@given(key=st.integers(0, 2**64 - 1), counters=st.lists(int64, min_size=1, max_size=20))
def test_random_bits_equals_the_scalar_implementation(key, counters):
    expected = [signed(mix_one(key + counter * GOLDEN)) for counter in counters]
    assert random_bits(key, torch.tensor(counters)).tolist() == expected


@given(key=st.integers(0, 2**64 - 1), n=st.integers(1, 1000), indices=st.lists(st.integers(0, 99), max_size=20))
def test_random_below_does_not_depend_on_the_other_indices(key, n, indices):
    counters = torch.tensor(indices, dtype=torch.int64)
    assert torch.equal(random_below(n, key, torch.arange(100))[counters], random_below(n, key, counters))


def test_random_below_is_uniform_and_uncorrelated():
    drawn = random_below(10, fold_in(0, "spread"), torch.arange(100_000))
    counts = torch.bincount(drawn, minlength=10)
    assert counts.sum() == 100_000
    assert (counts - 10_000).abs().max() < 500  # 5 standard deviations
    assert abs(torch.corrcoef(torch.stack([drawn[1:], drawn[:-1]]).double())[0, 1]) < 0.02


def test_different_keys_give_different_streams():
    parts = [(0,), (1,), (-1,), (0, 0), ("a",), ("b",), ("a", "b"), ("b", "a"), ("ab",), (0, "a"), ("a", 0)]
    assert len({fold_in(*part) for part in parts}) == len(parts)
    agree = random_below(10, fold_in(0, "train"), torch.arange(10_000)) == random_below(
        10, fold_in(0, "test"), torch.arange(10_000)
    )
    assert abs(agree.float().mean() - 0.1) < 0.015


@given(key=st.integers(0, 2**64 - 1), n=st.integers(0, 200))
def test_permutation_contains_every_index_once(key, n):
    assert permutation(key, n).sort().values.tolist() == list(range(n))


def test_permutation_depends_on_the_key():
    assert not torch.equal(permutation(1, 100), permutation(2, 100))
