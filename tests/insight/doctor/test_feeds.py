import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from clearhead.insight.doctor.inputs import FeatureInput, ImageInput, TokenIds, inputs_for, lengths_of


def drawn(feed, seed=0):
    return feed.draw(5, 7, torch.Generator().manual_seed(seed))


@given(st.integers(2, 3000), st.none() | st.integers(0, 5), st.integers(0, 100))
def test_other_ids_are_other_and_in_the_table(n, padding, seed):
    feed = TokenIds(n, padding if padding is not None and padding < n else None)
    ids = drawn(feed, seed)
    others = feed.others(ids, torch.Generator().manual_seed(seed))
    assert (ids != others).all()
    for x in (ids, others):
        assert x.min() >= 0
        assert x.max() < n
        if n > 4:  # then there are enough ids that surely mean something
            assert not ((x == 0) | (x == feed.padding)).any() if feed.padding is not None else (x != 0).all()


def test_features_and_images_are_drawn_anew():
    for feed, shape in ((FeatureInput(4), (5, 7, 4)), (ImageInput(3, 8), (5, 3, 8, 8))):
        x = drawn(feed)
        assert x.shape == shape
        assert (feed.others(x, torch.Generator().manual_seed(9)) != x).all()
        assert torch.equal(drawn(feed), x)


def test_the_likeliest_feed_comes_first():
    table, linear, convolution = nn.Embedding(11, 4, padding_idx=2), nn.Linear(6, 4), nn.Conv2d(3, 4, 2)
    assert next(inputs_for(nn.Sequential(linear, table), None)) == TokenIds(11, 2)
    assert next(inputs_for(nn.Sequential(table, linear), 9)) == FeatureInput(9)
    assert next(inputs_for(linear, None)) == FeatureInput(6)
    assert next(inputs_for(convolution, None)) == ImageInput(3, 32)
    assert TokenIds(5, 2) in list(
        inputs_for(nn.Sequential(table, nn.Embedding(5, 4)), None)
    )  # places may be fewer than tokens


def test_the_padding_id_is_that_of_tokens():
    segments, tokens, places = nn.Embedding(3, 4, padding_idx=0), nn.Embedding(11, 4), nn.Embedding(9, 4)
    assert next(inputs_for(nn.Sequential(tokens, segments), None)) == TokenIds(11)
    padded = nn.Embedding(11, 4, padding_idx=2)
    assert next(inputs_for(nn.Sequential(places, padded), None)) == TokenIds(9, 2)


def test_a_fixed_length_is_found_in_what_is_added():
    model = nn.Module()
    assert 7 in lengths_of(model, 7)
    model.places = nn.Parameter(torch.zeros(1, 12, 4))
    model.register_buffer("mask", torch.zeros(1, 1, 5, 5))
    assert lengths_of(model, 7)[0] == 7
    assert {12, 5} <= set(lengths_of(model, 7))
