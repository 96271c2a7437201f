from dataclasses import replace

import pytest
import torch
from torch import nn

from clearhead.insight.doctor.call_plan import call
from clearhead.insight.doctor.causality import check_causality, with_causal_mask


def found_in(module):
    called = call(module, None, None)
    return check_causality(replace(called, subject=with_causal_mask(called)))


@pytest.mark.parametrize("attention", ["Attention", "Unseen", "Infinite", "ScaledQueries"])
def test_a_causal_model_is_fine(ward, attention):
    assert found_in(ward.GPT(getattr(ward, attention))).verdict == "fine"


PLANTED = [
    ("Dropped", "dropped"),
    ("OneTooFar", "one token too far"),
    ("NotItself", "sees its own token"),
    ("Inverted", "inverted"),
]


@pytest.mark.parametrize("attention", ["Attention", "Unseen"])
@pytest.mark.parametrize(("model", "what"), PLANTED)
def test_each_planted_fault_is_told_from_the_others(ward, model, what, attention):
    """Also where the weights can't be seen; then by who moves whom."""
    found = found_in(getattr(ward, model)(getattr(ward, attention), depth=1))
    assert found.verdict == "fault"
    assert what in found.text
    assert found.text.startswith("output ")


@pytest.mark.parametrize("attention", ["Attention", "Safe"])
@pytest.mark.parametrize(("model", "what"), PLANTED)
def test_each_planted_fault_is_told_where_the_length_comes_first(ward, model, what, attention):
    """With zeros where a query sees nothing, an inverted mask lets the first token move no other."""
    found = found_in(ward.LengthFirst(getattr(ward, model)(getattr(ward, attention))))
    assert found.verdict == "fault"
    assert what in found.text


@pytest.mark.parametrize("attention", ["Attention", "Unseen"])
@pytest.mark.parametrize(("model", "what"), PLANTED[1:])
def test_a_good_mask_of_the_callers_does_not_cover_up_a_wrong_one_of_its_own(ward, model, what, attention):
    class Wrong(ward.ByDefault):
        hides = getattr(ward, model).hides

    found = found_in(Wrong(getattr(ward, attention), depth=1))
    assert found.verdict == "fault"
    assert what in found.text


def test_a_mask_of_its_own_or_of_the_callers_is_fine(ward):
    class Window(ward.ByDefault):
        """Sees both ways unless it is told otherwise; not all, but as far to one side as to the other."""

        def forward(self, idx, mask=None):
            n = idx.shape[1]
            far = (torch.arange(n)[:, None] - torch.arange(n)).abs() > 2
            return super().forward(idx, far if mask is None else far | mask)

    class Open(ward.ByDefault):
        hides = ward.Dropped.hides

    assert found_in(ward.ByDefault()).text == "no output moves when a later token is changed"
    for kind in (Open, Window):
        for attention in (ward.Attention, ward.Unseen):
            assert found_in(kind(attention, depth=1)).text.endswith("with mask, (Q,K), True = hidden")


def test_off_by_one_in_many_layers_is_no_dropped_mask(ward):
    assert "one token too far" in found_in(ward.OneTooFar(depth=7)).text


def test_a_mask_after_the_softmax_is_told(ward):
    assert "after the softmax (rows sum to 0." in found_in(ward.GPT(ward.LateMask)).text
    assert "after the softmax" in found_in(ward.Generic(ward.LateMask)).text


def test_tokens_that_mix_outside_of_the_mask_are_told(ward):
    assert "a view() where a transpose() was meant?" in found_in(ward.GPT(ward.WrongView)).text
    assert "a softmax goes over the wrong axis" in found_in(ward.GPT(ward.WrongAxis)).text


def test_the_layer_without_a_mask_is_named(ward):
    assert "dropped in blocks.1.attention; other layers have it" in found_in(ward.DroppedInOne()).text


def test_a_query_that_sees_nothing_is_off_by_one_too(ward):
    """With -inf the first row is NaN, and in the next layer all are."""
    assert "use tril(), not tril(-1)" in found_in(ward.NotItself(ward.Infinite)).text


def test_an_answer_that_is_not_finite_says_nothing_but_what_its_weights_show(ward):
    assert "inverted" in found_in(ward.Inverted(ward.Infinite)).text

    class Broken(ward.GPT):
        def forward(self, idx):
            return super().forward(idx) * torch.nan

    assert found_in(Broken()).verdict == "not checked"
    assert found_in(Broken()).text == "the answer is not finite"


def test_a_number_that_is_too_small_hides_nothing(ward):
    class Small(ward.Attention):
        def weights(self, scores, hidden):
            return scores.masked_fill(hidden, -10.0).softmax(-1)

    assert "hides with too small a number" in found_in(ward.GPT(Small)).text


def test_a_convolution_that_is_padded_on_both_sides_is_told():
    class Convolution(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.inner = nn.Embedding(9, 8), nn.Conv1d(8, 8, 3, padding=1)

        def forward(self, ids):
            return self.inner(self.tokens(ids).mT).mT

    assert "a convolution is padded on both sides" in found_in(Convolution()).text


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_mask_that_the_caller_gives_is_found(batch_first):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
    found = found_in(layer)
    assert found.verdict == "fine"
    assert found.text.endswith("with src_mask, (Q,K), True = hidden")


def test_the_polarity_of_a_mask_is_found_and_told(ward):
    assert "mask, (Q,K), True = may attend" in found_in(ward.Generic()).text
    assert "mask, (Q,K), added to the scores" in found_in(ward.Additive()).text


def test_a_switch_is_turned_on():
    class Switched(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 24)

        def forward(self, x, is_causal=False):
            q, k, v = self.linear(x)[:, None].chunk(3, -1)
            return x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)[:, 0]

    assert found_in(Switched()).text.endswith("with is_causal=True")


def test_a_mask_that_is_taken_and_dropped_is_told(ward):
    assert "whatever mask says; pass it on" in found_in(ward.GenericDropped()).text


def test_an_encoder_is_told_how_to_say_so(ward):
    assert "say --no-causal" in found_in(ward.Encoder()).text


def test_what_cannot_be_asked_is_not_judged(ward):
    assert found_in(ward.Pooled()).verdict == "not checked"
    assert found_in(nn.Linear(4, 4)).verdict == "warning"  # no token sees another


@pytest.mark.parametrize(("model", "verdict"), [("GPT", "fine"), ("Dropped", "fault")])
def test_an_output_may_be_one_number(ward, model, verdict):
    class Scores(getattr(ward, model)):
        def forward(self, idx):
            return super().forward(idx).mean(-1)

    assert found_in(Scores()).verdict == verdict


def test_weights_that_start_at_zero_hide_nothing(ward):
    assert found_in(ward.ZeroInitDropped()).verdict == "fault"
    assert found_in(ward.ZeroInit()).verdict == "fine"


def test_only_the_target_of_an_encoder_decoder_has_a_future(ward):
    assert found_in(ward.Annotated()).verdict == "fine"
    assert found_in(nn.Transformer(8, 2, 1, 1, 16, batch_first=True)).verdict == "fine"


@pytest.mark.parametrize("name", ["mask", "causal_mask", "look_ahead_mask", "tgt_mask"])
def test_a_decoder_that_its_caller_makes_causal_may_call_the_mask_as_it_likes(name):
    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

    exec(f"def forward(self, src, tgt, {name}=None): return self.inner(src, tgt, tgt_mask={name})", found := {})
    Translator.forward = found["forward"]
    assert found_in(Translator()).text.endswith(f"with {name}, (Q,K), True = hidden")


def test_what_moves_its_input_on_by_itself_is_a_warning_where_no_attention_is_seen():
    class Convolutions(nn.Module):
        """Output i is made of what comes before token i."""

        def __init__(self):
            super().__init__()
            self.tokens, self.inner = nn.Embedding(9, 8), nn.Conv1d(8, 8, 3)

        def forward(self, ids):
            return self.inner(nn.functional.pad(self.tokens(ids).mT, (3, -1))).mT

    found = found_in(Convolutions())
    assert found.verdict == "warning"
    assert "moved on by one on purpose" in found.text


def test_a_window_that_ends_before_the_own_token_is_off_by_one(ward):
    class Even(ward.Safe):
        """Weighs all that it sees alike: not even by its query does an output move with its own token."""

        def scores(self, q, k):
            return 0 * super().scores(q, k)

    class Window(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.attention = nn.Embedding(9, 8), Even()

        def forward(self, ids):
            sees = torch.ones(2 * ids.shape[1:]).tril(-1).triu(-3)
            return self.attention(self.tokens(ids), sees == 0)

    found = found_in(Window())
    assert found.verdict == "fault"
    assert "use tril(), not tril(-1)" in found.text


def test_both_mistakes_of_a_random_model_are_found_in_float32(ward):
    class Single(ward.GPT):
        def forward(self, idx):
            return super().forward(idx) if self.head.weight.dtype == torch.float32 else 1 / 0

    class SingleDropped(Single):
        hides = ward.Dropped.hides

    assert found_in(Single()).verdict == "fine"
    assert found_in(SingleDropped()).verdict == "fault"


def test_an_input_that_is_moved_on_by_one_is_no_mistake(ward):
    """Output i then sees the tokens before i: a causal mask, and a first token of its own."""

    class Moved(ward.GPT):
        def forward(self, idx):
            return super().forward(nn.functional.pad(idx, (1, -1)))

    assert found_in(Moved()).verdict == "fine"
