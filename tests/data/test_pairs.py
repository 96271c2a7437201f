import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.data.dataset import SequencePairs
from clearhead.data.vocab import IGNORE_INDEX, PAD

IDS = st.lists(st.integers(1, 50), min_size=1, max_size=6)


@given(st.lists(st.tuples(IDS, IDS), min_size=1, max_size=8), st.data())
def test_what_is_taken_is_what_was_given_padded_to_the_longest(pairs, data):
    sources, targets = zip(*pairs, strict=True)
    examples = SequencePairs.of(sources, targets)
    assert len(examples) == len(pairs)
    chosen = data.draw(st.lists(st.integers(0, len(pairs) - 1), min_size=1))
    source, target = examples.get_batch(torch.tensor(chosen))
    for place, i in enumerate(chosen):
        assert [x for x in source[place].tolist() if x != PAD] == sources[i]
        assert [x for x in target[place].tolist() if x != IGNORE_INDEX] == targets[i]
    assert source.shape[1] == max(len(sources[i]) for i in chosen)
    assert target.shape[1] == max(len(targets[i]) for i in chosen)
    assert source.dtype == target.dtype == torch.int64


def test_an_empty_slice_has_room_for_a_token():
    source, target = SequencePairs.of([[3, 4]], [[5, 2]]).get_batch(torch.arange(0))
    assert source.shape == target.shape == (0, 1)


def test_no_pairs_at_all():
    assert len(SequencePairs.of([], [])) == 0
