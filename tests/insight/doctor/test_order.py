import pytest
import torch
from torch import nn

from clearhead import LanguageModel
from clearhead.insight.doctor.call_plan import call
from clearhead.insight.doctor.order import check_again, check_answer, check_examples, check_order
from clearhead.models.config import LanguageConfig


def subject_of(module):
    return call(module, None, None).subject


@pytest.mark.parametrize(("positions", "verdict"), [(True, "fine"), (False, "warning")])
def test_an_encoder_without_positions_is_equivariant(ward, positions, verdict):
    (found,) = check_order(subject_of(ward.Encoder(positions=positions)), causal=False)
    assert found.verdict == verdict


def verdict_of(module):
    return check_order(subject_of(module), causal=True)[0].verdict


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_causal_model_without_positions_is_a_warning(ward, depth):
    assert verdict_of(ward.NoPlaces(depth=depth)) == "warning"
    assert verdict_of(ward.GPT(depth=depth)) == "fine"


def test_what_is_told_by_the_mask_alone_is_said(ward):
    assert "nothing but its causal mask" in check_order(subject_of(ward.NoPlaces(depth=2)), causal=True)[0].text
    assert verdict_of(ward.NoPlaces(ward.Unseen, depth=2)) == "fine"  # nothing is seen, so nothing is said


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "alibi", "none"])
def test_positions_of_any_kind_are_seen(positions):
    config = LanguageConfig(
        vocab_size=11, context_length=16, width=8, depth=2, num_heads=2, mlp_dim=16, pos_embed=positions
    )
    assert verdict_of(LanguageModel(config)) == ("warning" if positions == "none" else "fine")


@pytest.mark.parametrize("how", ["convolution", "replicated", "recurrence", "last layer", "bias of the last layer"])
def test_places_that_are_told_in_other_ways_are_no_matter_for_a_warning(ward, how):
    class Told(ward.NoPlaces):
        def __init__(self):
            super().__init__(depth=2)
            self.convolution, self.recurrence = nn.Conv1d(8, 8, 3), nn.GRU(8, 8, batch_first=True)
            self.last = nn.Parameter(torch.randn(16, 8))
            if how == "bias of the last layer":
                self.blocks[1].attention.scores = self.biased

        def biased(self, q, k):
            places = torch.arange(q.shape[-2]).to(q)
            return q @ k.mT / 2 - (places[:, None] - places).abs()

        def forward(self, idx):
            x, hidden = self.tokens(idx), self.hides(idx.shape[1])
            if how in ("convolution", "replicated"):
                mode = "constant" if how == "convolution" else "replicate"
                x = self.convolution(nn.functional.pad(x.mT, (2, 0), mode=mode)).mT
            if how == "recurrence":
                x = self.recurrence(x)[0]
            x = self.blocks[0](x, hidden)
            if how == "last layer":
                x = x + self.last[: x.shape[1]]
            return self.head(self.blocks[1](x, hidden))

    assert verdict_of(Told()) == "fine"


def test_an_output_is_asked_about_what_its_window_shows(ward):
    class Window(ward.GPT):
        def hides(self, n):
            near = torch.ones(n, n, dtype=torch.bool).tril() & torch.ones(n, n, dtype=torch.bool).triu(-2)
            return ~near

    assert check_order(subject_of(Window(depth=1)), causal=True)[0].verdict == "fine"


def test_a_softmax_in_float32_hides_no_missing_positions(ward):
    class Single(ward.Attention):
        def weights(self, scores, hidden):
            return scores.float().softmax(-1).to(scores.dtype)

    assert check_order(subject_of(ward.Encoder(Single, positions=False)), causal=False)[0].verdict == "warning"


def test_every_sequence_is_asked(ward):
    findings = check_order(subject_of(nn.Transformer(8, 2, 1, 1, 16, batch_first=True)), causal=False)
    assert ["src" in finding.text for finding in findings] == [True, False]


def test_one_answer_for_all_tokens(ward):
    assert check_order(subject_of(ward.Pooled(positions=False)), causal=False)[0].verdict == "warning"
    assert check_order(subject_of(ward.Pooled()), causal=False)[0].verdict == "fine"


def test_examples_stay_apart(ward):
    assert check_examples(subject_of(ward.GPT())).verdict == "fine"
    assert check_examples(subject_of(ward.MixedBatch())).verdict == "fault"


def test_length_first_is_a_warning_since_it_may_be_forgotten():
    found = check_examples(subject_of(nn.TransformerEncoderLayer(8, 2, 16)))
    assert found.verdict == "warning"
    assert "or is batch_first=True forgotten?" in found.text


def test_an_answer_must_come_again(ward):
    assert check_answer(subject_of(ward.GPT())).verdict == "fine"
    found = check_answer(subject_of(ward.AlwaysDropping()))
    assert (found.verdict, "F.dropout needs training" in found.text) == ("fault", True)


def test_noise_may_be_meant_and_a_dropout_that_is_on_is_not(ward):
    class Noisy(ward.GPT):
        def forward(self, idx):
            x = nn.functional.dropout(super().forward(idx), 0.1, self.training)
            return x + torch.randn_like(x)

    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            q = self.linear(x)[:, None]
            return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1)[:, 0]

    class InTraining(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

        def forward(self, x):
            return self.inner.train()(x, x, x)[0]

    assert check_answer(subject_of(InTraining())).verdict == "fault"
    found = check_answer(subject_of(Noisy()))
    assert (found.verdict, "noise that is drawn on purpose" in found.text) == ("warning", True)
    assert check_answer(subject_of(Attending())).verdict == "fault"


def test_what_changes_from_call_to_call_is_told_from_chance(ward):
    class Counting(ward.GPT):
        n = 0

        def forward(self, idx):
            self.n += 1
            return self.answer(super().forward(idx))

        def answer(self, logits):
            return logits + self.n

    class Growing(Counting):
        def answer(self, logits):
            return logits[..., : self.n]

    class Breaking(Counting):
        def answer(self, logits):
            return logits + torch.zeros(logits.shape[0] if self.n == 1 else 3, 1, 1)

    assert check_again(subject_of(ward.GPT())) is None
    assert check_again(subject_of(ward.AlwaysDropping())) is None  # by torch's own random numbers
    for kind in (Counting, Growing):
        found = check_again(subject_of(kind()))
        assert found.verdict == "fault"
        assert "differ, with the same random numbers: it keeps something" in found.text
    assert "called once more it breaks with RuntimeError: The size of" in check_again(subject_of(Breaking())).text


def test_an_answer_must_be_finite(ward):
    found = check_answer(subject_of(ward.NotItself(ward.Infinite, depth=1)))
    assert found.verdict == "fault"
    assert "1 of 7 outputs are not finite" in found.text

    class Pooled(ward.GPT):
        def forward(self, idx):
            return super().forward(idx).mean(1) * torch.inf

    assert check_answer(subject_of(Pooled())).verdict == "fault"
