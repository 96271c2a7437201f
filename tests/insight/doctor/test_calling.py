import json

import pytest
import torch
from torch import nn

from clearhead.insight.doctor.call_plan import call, plans, said
from clearhead.insight.doctor.inputs import FeatureInput, ImageInput, TokenIds
from clearhead.insight.doctor.parameters import parameters_of


def plan_of(module, width=None, length=None):
    return call(module, width, length).subject.plan


def test_ids_features_and_images_are_told_apart(ward):
    assert plan_of(ward.GPT()).feeds == {"idx": TokenIds(ward.GPT().tokens.num_embeddings)}
    assert plan_of(ward.OfTorch()).feeds == {"x": FeatureInput(8)}
    assert plan_of(nn.Sequential(nn.Conv2d(3, 2, 4), nn.Flatten())).feeds == {"input": ImageInput(3, 32)}


def test_places_before_tokens_are_no_trouble():
    """The first table need not be that of tokens."""

    class PlacesFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.places, self.tokens = nn.Embedding(64, 4), nn.Embedding(9, 4)

        def forward(self, ids):
            return self.tokens(ids) + self.places(torch.arange(ids.shape[1]))

    assert plan_of(PlacesFirst()).feeds == {"ids": TokenIds(9)}


@pytest.mark.parametrize("batch_first", [True, False])
def test_the_axis_of_the_batch_is_found(batch_first):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
    assert plan_of(layer).batch_first == batch_first
    both = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    assert plan_of(both).batch_first


@pytest.mark.parametrize("model", ["GPT", "Dropped", "OneTooFar", "NotItself", "Inverted"])
def test_the_axis_of_the_batch_is_found_under_any_mask(ward, model):
    right_way = getattr(ward, model)(ward.Safe)
    assert plan_of(right_way).batch_first
    assert not plan_of(ward.LengthFirst(right_way)).batch_first


def test_a_fixed_length_is_found():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.places, self.linear = nn.Parameter(torch.zeros(1, 12, 4)), nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x + self.places)

    assert plan_of(Fixed()).lengths == {"x": 12}
    assert plan_of(nn.Linear(4, 4), length=9).lengths == {"input": 9}


def test_a_short_context_is_no_reason_to_turn_the_batch_round(ward):
    class Short(ward.GPT):
        def __init__(self):
            super().__init__()
            self.places = nn.Embedding(6, 8)

    plan = plan_of(Short())
    assert plan.batch_first
    assert plan.lengths["idx"] <= 6


def test_labels_are_given_where_only_they_bring_all_outputs(ward):
    assert plan_of(ward.NanoGPT()).same == ("targets",)
    assert plan_of(ward.GPT()).same == ()


def test_required_masks_are_filled(ward):
    assert plan_of(ward.Generic()).nothing == ("mask",)
    assert set(plan_of(ward.Annotated()).masks) == {"src_mask", "tgt_mask"}


def test_float64_unless_the_module_forbids_it(ward):
    assert call(ward.GPT(), None, None).subject.dtype == torch.float64
    called = call(ward.HardFloat(), None, None)
    assert called.subject.dtype == torch.float32
    assert "dtype" in called.breaks_in_float64


def test_how_it_was_called_is_told(ward):
    assert call(ward.GPT(), None, None).describe() == "forward(idx=ids (5,7) below 11), eval(), float64"
    told = call(nn.MultiheadAttention(8, 2), None, None).describe()
    assert told == "forward(query=features (7,5,8); key=query; value=query), eval(), float64"


def test_what_was_tried_is_told(ward):
    class Joined(nn.Linear):
        def forward(self, x):
            return super().forward(x).flatten(0, 1)[:3]

    with pytest.raises(ValueError, match="no rule fills, 'edges'"):
        call(ward.Unknown(), None, None)
    with pytest.raises(
        ValueError, match=r"Linear must take one of features \(5,7,3\), got RuntimeError: .*; say --width N"
    ):
        call(nn.Linear(4, 4), 3, None)
    with pytest.raises(ValueError, match=r"Joined must answer for each of 5 examples, got \(3, 4\); return"):
        call(Joined(4, 4), 4, None)


def test_an_error_is_one_line_with_its_place_in_the_users_file():
    with pytest.raises(ZeroDivisionError) as caught:
        1 / 0  # noqa: B018
    assert said(caught.value).startswith("ZeroDivisionError: division by zero (test_calling.py:")
    assert said(RuntimeError("first\nsecond")) == "RuntimeError: first"
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    assert "(test_calling.py:" in said(caught.value)  # and not the place in Python's own


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_length_that_is_asked_for_does_not_turn_the_batch_round(batch_first):
    layer = nn.TransformerDecoderLayer(8, 2, 16, batch_first=batch_first)
    assert plan_of(layer, length=6).batch_first == batch_first


def test_a_source_as_long_as_its_places_will_do(ward):
    class Short(ward.Annotated):
        def __init__(self):
            super().__init__()
            self.places = nn.Embedding(5, 8)

    assert plan_of(Short(), length=5).lengths == {"src": 5, "tgt": 5}
    assert max(plan_of(Short()).lengths.values()) <= 5


def test_a_mistake_in_forward_is_told_as_that(ward):
    class Typo(ward.GPT):
        def forward(self, idx):
            return super().forwrad(idx)

    with pytest.raises(ValueError, match=r"Typo must answer, got AttributeError: .*forwrad.*; mend its forward"):
        call(Typo(), None, None)
    with pytest.raises(ValueError, match=r"must know two ids or more, got an nn.Embedding of 1 and RuntimeError"):
        call(nn.Sequential(nn.Embedding(1, 4), nn.Linear(4, 4)), None, None)


def test_the_length_that_was_tried_is_told():
    with pytest.raises(ValueError, match=r"must take one of features \(5,9,3\), got"):
        call(nn.Linear(4, 4), 3, 9)


def test_many_required_masks_are_tried_in_reasonable_time():
    class Asking(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(9, 4)

        def forward(self, src, tgt, src_mask, tgt_mask, src_padding_mask, tgt_padding_mask, memory_key_padding_mask):
            pairs, tokens = (src_mask, tgt_mask), (src_padding_mask, tgt_padding_mask, memory_key_padding_mask)
            if {mask.dim() for mask in pairs} != {3} or {mask.dim() for mask in tokens} != {2}:
                raise RuntimeError("not these")
            return self.tokens(tgt) + self.tokens(src).mean(1, keepdim=True)

    assert {e.shape for e in plan_of(Asking()).masks.values()} == {"(B,Q,K)", "(B,K)"}
    assert len(list(plans(Asking(), parameters_of(Asking().forward), None, None))) < 10_000


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_scripted_module_is_refused_as_that():
    with pytest.raises(ValueError, match=r"one of torch\.jit; name it before it is scripted"):
        call(torch.jit.script(nn.Linear(4, 4)), None, None)
