import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.data import Augmentation
from clearhead.data.batches import Batches, bucket_by_length, evaluation_batches, padding_fraction
from clearhead.data.dataset import Dataset, Images, Normalize, SequencePairs, permutation
from clearhead.tasks.sequences import Reverse

N = 23
PIXELS = torch.randint(0, 256, (N, 2, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
IMAGES = Images(PIXELS, torch.arange(N))
DATA = Dataset(IMAGES, IMAGES, IMAGES, classes=(), normalize=Normalize((0.3, 0.4), (0.2, 0.3)))
NO_AUGMENTATION = Augmentation()
ALL_AUGMENTATIONS = Augmentation(crop=2, flip=True, cutout=2, mixup=0.5)


def batches(augmentation=ALL_AUGMENTATIONS, seed=0, batch_size=7):
    return Batches(DATA, batch_size, seed, augmentation=augmentation)


def tensors(batch):
    return [x for x in (batch.inputs, batch.targets, batch.targets_b, batch.lam) if x is not None]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("augmentation", [NO_AUGMENTATION, Augmentation(crop=1, flip=True), ALL_AUGMENTATIONS])
def test_rank_slices_concatenate_to_the_global_batch_bit_for_bit(world_size, augmentation):
    order = batches(augmentation)
    for step in (0, 4, 10):
        full = tensors(order.at(step))
        slices = [order.at(step, rank, world_size) for rank in range(world_size)]
        assert all(part.num_global == 7 for part in slices)
        assert all(len(part.targets) >= 1 for part in slices)
        for expected, parts in zip(full, zip(*map(tensors, slices), strict=True), strict=True):
            assert torch.equal(torch.cat(parts), expected)


def test_an_epoch_has_no_repeated_example_and_epochs_are_shuffled_differently():
    order = batches(NO_AUGMENTATION)
    assert order.steps_per_epoch == 3
    epochs = [torch.cat([order.at(3 * epoch + i).targets for i in range(3)]) for epoch in range(3)]
    for epoch in epochs:
        assert len(epoch.unique()) == len(epoch) == 21
    assert not torch.equal(epochs[0], epochs[1])
    assert len(torch.cat(epochs).unique()) == N


def test_a_full_size_batch_contains_every_example_once():
    order = batches(NO_AUGMENTATION, batch_size=N)
    assert order.at(4).targets.sort().values.tolist() == list(range(N))


@given(steps=st.lists(st.integers(0, 12), min_size=1, max_size=6))
@settings(max_examples=20)
def test_a_batch_does_not_depend_on_earlier_batches(steps):
    order = batches()
    for step in steps:
        for a, b in zip(tensors(order.at(step)), tensors(batches().at(step)), strict=True):
            assert torch.equal(a, b)


def test_augmentation_differs_between_epochs():
    order = batches(Augmentation(crop=2, flip=True), batch_size=N)
    first, second = order.at(0), order.at(1)
    same = [torch.equal(first.inputs[first.targets == i], second.inputs[second.targets == i]) for i in range(N)]
    assert sum(same) < N / 3


def test_augmentation_of_a_batch_slot_differs_between_steps():
    same = Images(PIXELS[:1].expand(N, -1, -1, -1), torch.arange(N))
    data = Dataset(same, same, same, classes=(), normalize=DATA.normalize)
    order = Batches(data, 7, seed=0, augmentation=Augmentation(crop=2, flip=True))
    assert not torch.equal(order.at(0).inputs, order.at(1).inputs)
    assert not torch.equal(order.at(0).inputs, order.at(3).inputs)  # the first step of the next epoch


def test_the_seed_changes_the_order():
    assert not torch.equal(batches(seed=0).at(0).targets, batches(seed=1).at(0).targets)


def test_torch_global_rng_is_neither_read_nor_advanced():
    before = torch.get_rng_state()
    first = batches().at(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(batches().at(0).inputs, first.inputs)


def test_mixup_inputs_match_both_targets_and_lam():
    mixed = batches(Augmentation(mixup=0.5)).at(0)
    normal = DATA.normalize(PIXELS)
    for image, a, b, lam in zip(mixed.inputs, mixed.targets, mixed.targets_b, mixed.lam, strict=True):
        torch.testing.assert_close(image, lam * normal[a] + (1 - lam) * normal[b])
    assert len(mixed.lam.unique()) == 7


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("batch_size", [1, 4, N, 100])
def test_evaluation_covers_each_example_once_across_ranks(world_size, batch_size):
    parts = [
        list(evaluation_batches(IMAGES, DATA.normalize, batch_size, rank, world_size)) for rank in range(world_size)
    ]
    assert len({len(part) for part in parts}) == 1
    seen = torch.cat([batch.targets for step in zip(*parts, strict=True) for batch in step])
    assert seen.tolist() == list(range(N))
    assert sum(batch.num_global for batch in parts[0]) == N
    images = torch.cat([batch.inputs for step in zip(*parts, strict=True) for batch in step])
    assert torch.equal(images, DATA.normalize(PIXELS))


def test_token_ids_are_not_transformed():
    config = Reverse(limit=40)
    batch = Batches(config.load(0), 8, seed=0).at(3)
    assert torch.equal(batch.inputs.flip(1), batch.targets)
    assert batch.targets_b is batch.lam is None


def test_invalid_batch_size_rank_or_augmentation_raises():
    with pytest.raises(ValueError, match="batch_size must be from 1 to the 23 training examples, got 24"):
        batches(batch_size=24)
    with pytest.raises(ValueError, match="batch_size=7 for 8 processes"):
        batches().at(0, rank=0, world_size=8)
    with pytest.raises(ValueError, match=r"rank must be from 0 to 1 \(world_size=2\), got 2"):
        batches().at(0, rank=2, world_size=2)
    config = Reverse()
    with pytest.raises(ValueError, match=r"augmentation needs images, got Augmentation"):
        Batches(config.load(0), 8, seed=0, augmentation=ALL_AUGMENTATIONS)


LONG = SequencePairs.of([[3] * (1 + i * 7 % 13) for i in range(60)], [[4] * (1 + i * 5 % 11) for i in range(60)])
SEQUENCES = Dataset(LONG, LONG, LONG, classes=(), normalize=None)


@given(st.integers(0, 9), st.integers(1, 12), st.integers(0, 5), st.integers(1, 12))
def test_length_bucketed_order_is_the_same_for_any_world_size(seed, batch_size, window, world_size):
    order, other = (Batches(SEQUENCES, batch_size, seed, window=window) for _ in range(2))
    other.epoch_order(7)  # earlier calls must not matter
    for epoch in (0, 3):
        assert torch.equal(order.epoch_order(epoch), other.epoch_order(epoch))
        assert order.epoch_order(epoch).sort().values.tolist() == list(range(60))
    step, world_size = order.steps_per_epoch, min(world_size, batch_size)
    full = order.at(step)
    slices = [other.at(step, rank, world_size) for rank in range(world_size)]
    joined = [row[row != 0].tolist() for part in slices for row in part.inputs]
    assert joined == [row[row != 0].tolist() for row in full.inputs]


def test_padding_reports_fractions_with_and_without_bucketing():
    by_length, any_length = (Batches(SEQUENCES, 6, 0, window=w) for w in (10, 0))
    bucketed, unsorted = by_length.padding()
    assert bucketed < 0.7 * unsorted
    assert any_length.padding() == (unsorted, unsorted)
    assert batches().padding() is None


@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 4), st.integers(1, 2), st.integers(0, 99))
def test_bucketing_is_a_deterministic_permutation(n, batch_size, window, sides, key):
    batch_size = min(batch_size, n)
    lengths = permutation(key, n * sides).view(n, sides) % 11 + 1
    indices = permutation(key + 1, n)
    once = bucket_by_length(indices, lengths, batch_size, window, key)
    assert torch.equal(once, bucket_by_length(indices, lengths, batch_size, window, key))
    assert once.sort().values.tolist() == list(range(n))
    n_full = n // batch_size * batch_size
    assert torch.equal(once[n_full:], indices[n_full:])


def test_batches_in_a_window_are_sorted_by_length_then_shuffled():
    lengths = torch.arange(100).flip(0)[:, None]
    found = bucket_by_length(permutation(0, 100), lengths, 10, window=10, key=3).view(10, 10)
    assert torch.equal(lengths[found].flatten(1).diff(dim=1), torch.ones(10, 9, dtype=torch.int64))
    assert found[:, 0].tolist() != sorted(found[:, 0].tolist(), reverse=True)


def test_a_window_larger_than_the_epoch_covers_the_epoch():
    lengths = permutation(1, 20)[:, None]
    found = (bucket_by_length(permutation(0, 20), lengths, 4, window, key=3).tolist() for window in (5, 10**30))
    assert next(found) == next(found)


def test_ties_in_source_length_are_sorted_by_target_length():
    lengths = torch.tensor([[2, 9], [1, 5], [2, 1], [1, 7]])
    assert bucket_by_length(torch.arange(4), lengths, 4, window=1, key=0).tolist() == [1, 3, 2, 0]


def test_padding_fraction_matches_hand_computation():
    lengths = torch.tensor([[1, 4], [3, 4], [2, 2], [2, 1]])
    assert padding_fraction(torch.arange(4), lengths, 2) == 1 - 19 / (6 + 8 + 4 + 4)
    assert padding_fraction(torch.arange(4), torch.full((4, 1), 7), 4) == 0


def test_bucketing_reduces_padding():
    lengths = permutation(5, 4000).view(2000, 2) % 20 + 1
    indices = permutation(6, 2000)
    bucketed = padding_fraction(bucket_by_length(indices, lengths, 16, 50, key=0), lengths, 16)
    assert bucketed < 0.6 * padding_fraction(indices, lengths, 16)
