import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.data.prng import GOLDEN, fold_in, mix_one, permutation, random_below, random_bits, signed

int64 = st.integers(-(2**63), 2**63 - 1)


def test_it_is_splitmix64():
    """The first outputs for seed 1234567, as the makers of the algorithm publish them."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [mix_one(1234567 + GOLDEN * (i + 1)) for i in range(3)] == published


@given(key=st.integers(0, 2**64 - 1), places=st.lists(int64, min_size=1, max_size=20))
def test_a_tensor_is_hashed_as_its_numbers_are(key, places):
    expected = [signed(mix_one(key + place * GOLDEN)) for place in places]
    assert random_bits(key, torch.tensor(places)).tolist() == expected


@given(key=st.integers(0, 2**64 - 1), n=st.integers(1, 1000), indices=st.lists(st.integers(0, 99), max_size=20))
def test_any_part_of_a_stream_can_be_had_alone(key, n, indices):
    places = torch.tensor(indices, dtype=torch.int64)
    assert torch.equal(random_below(n, key, torch.arange(100))[places], random_below(n, key, places))


def test_numbers_are_evenly_spread():
    drawn = random_below(10, fold_in(0, "spread"), torch.arange(100_000))
    counts = torch.bincount(drawn, minlength=10)
    assert counts.sum() == 100_000
    assert (counts - 10_000).abs().max() < 500  # 5 standard deviations
    assert abs(torch.corrcoef(torch.stack([drawn[1:], drawn[:-1]]).double())[0, 1]) < 0.02


def test_streams_of_different_keys_are_different():
    parts = [(0,), (1,), (-1,), (0, 0), ("a",), ("b",), ("a", "b"), ("b", "a"), ("ab",), (0, "a"), ("a", 0)]
    assert len({fold_in(*part) for part in parts}) == len(parts)
    agree = random_below(10, fold_in(0, "train"), torch.arange(10_000)) == random_below(
        10, fold_in(0, "test"), torch.arange(10_000)
    )
    assert abs(agree.float().mean() - 0.1) < 0.015


@given(key=st.integers(0, 2**64 - 1), n=st.integers(0, 200))
def test_an_order_has_everything_once(key, n):
    assert permutation(key, n).sort().values.tolist() == list(range(n))


def test_the_order_depends_on_the_key():
    assert not torch.equal(permutation(1, 100), permutation(2, 100))
