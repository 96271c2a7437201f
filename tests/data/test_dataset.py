from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.data.dataset import Dataset, Images, Normalize, SequencePairs, Subset, train_val_split
from clearhead.data.vocab import IGNORE_INDEX, PAD

IMAGES = Images(torch.arange(20 * 12, dtype=torch.uint8).view(20, 3, 2, 2), torch.arange(20))


def test_normalized_pixels_have_zero_mean_and_unit_std():
    images = torch.randint(0, 256, (50, 2, 8, 8), dtype=torch.uint8)
    scaled = images.double() / 255
    mean, std = scaled.mean((0, 2, 3)), scaled.std((0, 2, 3), correction=0)
    normal = Normalize(tuple(mean.tolist()), tuple(std.tolist()))(images)
    assert normal.dtype == torch.float32
    torch.testing.assert_close(normal.mean((0, 2, 3)), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(normal.std((0, 2, 3), correction=0), torch.ones(2), atol=1e-5, rtol=0)


@pytest.mark.parametrize("images", [torch.zeros(1, 3, 2, 2), torch.zeros(1, 1, 2, 2, dtype=torch.uint8)])
def test_normalize_rejects_wrong_dtype_or_channels(images):
    with pytest.raises(ValueError, match=r"images must be uint8 \(B,3,H,W\), got"):
        Normalize((0.5,) * 3, (0.5,) * 3)(images)


def test_tensors_of_a_split_are_its_normalized_examples_in_order():
    normalize = Normalize((0.5,) * 3, (0.25,) * 3)
    none = Subset(IMAGES, torch.tensor([], dtype=torch.int64))
    data = Dataset(Subset(IMAGES, torch.tensor([4, 2, 9])), none, IMAGES, (), normalize)
    images, labels = data.tensors("train")
    assert labels.tolist() == [4, 2, 9]
    assert torch.equal(images, normalize(IMAGES.images[[4, 2, 9]]))
    assert [len(part) for part in data.tensors("validation")] == [0, 0]
    assert torch.equal(replace(data, normalize=None).tensors("test")[0], IMAGES.images)
    with pytest.raises(ValueError, match=r"'validation'.*got 'val'"):
        data.tensors("val")


def test_subset_maps_indices_to_the_underlying_dataset():
    subset = Subset(IMAGES, torch.tensor([4, 2, 9]))
    images, labels = subset.get_batch(torch.tensor([2, 0]))
    assert labels.tolist() == [9, 4]
    assert torch.equal(images, IMAGES.images[[9, 4]])


@pytest.mark.parametrize(("validation", "limit"), [(5, 0), (5, 7), (0, 0), (0, 20)])
def test_train_and_validation_splits_are_disjoint(validation, limit):
    train, held = train_val_split(IMAGES, validation, limit, seed=3)
    assert len(held) == validation
    assert len(train) == (limit or 20 - validation)
    seen = torch.cat([subset.get_batch(torch.arange(len(subset)))[1] for subset in (train, held)])
    assert len(seen.unique()) == len(seen)


def test_validation_split_depends_on_the_seed_but_not_on_the_limit():
    def held(limit, seed):
        return train_val_split(IMAGES, 5, limit, seed)[1].indices.tolist()

    assert held(0, 1) == held(3, 1)
    assert held(0, 1) != held(0, 2)


def test_splits_larger_than_the_dataset_are_rejected():
    with pytest.raises(ValueError, match="validation=15 and limit=6 need more than the 20 training examples"):
        train_val_split(IMAGES, 15, 6, 0)
    with pytest.raises(ValueError, match="validation=20 and limit=0 need more"):
        train_val_split(IMAGES, 20, 0, 0)


def test_undo_inverts_normalize_for_every_pixel_value():
    normalize = Normalize((0.49, 0.48, 0.45), (0.20, 0.19, 0.21))
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, -1, -1)
    assert torch.equal(normalize.undo(normalize(pixels)), pixels)
    assert normalize.undo(torch.tensor([-99.0, 99.0]).view(1, 1, 1, 2).expand(1, 3, 1, 2)).unique().tolist() == [0, 255]


IDS = st.lists(st.integers(1, 50), min_size=1, max_size=6)


@given(st.lists(st.tuples(IDS, IDS), min_size=1, max_size=8), st.data())
def test_get_batch_pads_to_the_longest_sequence(pairs, data):
    sources, targets = zip(*pairs, strict=True)
    examples = SequencePairs.of(sources, targets)
    assert len(examples) == len(pairs)
    indices = data.draw(st.lists(st.integers(0, len(pairs) - 1), min_size=1))
    source, target = examples.get_batch(torch.tensor(indices))
    for row, i in enumerate(indices):
        assert [x for x in source[row].tolist() if x != PAD] == sources[i]
        assert [x for x in target[row].tolist() if x != IGNORE_INDEX] == targets[i]
    assert source.shape[1] == max(len(sources[i]) for i in indices)
    assert target.shape[1] == max(len(targets[i]) for i in indices)
    assert source.dtype == target.dtype == torch.int64


def test_an_empty_batch_has_length_one():
    source, target = SequencePairs.of([[3, 4]], [[5, 2]]).get_batch(torch.arange(0))
    assert source.shape == target.shape == (0, 1)


def test_an_empty_dataset_has_length_zero():
    assert len(SequencePairs.of([], [])) == 0
