import pytest
import torch
from torch import nn

from clearhead import LanguageModel
from clearhead.insight.doctor.call_plan import prepare
from clearhead.insight.doctor.causality import check_causality, check_order, with_causal_mask
from clearhead.models.config import LanguageConfig


def causality_of(module):
    return check_causality(with_causal_mask(prepare(module, None, None)))


@pytest.mark.parametrize("attention", ["Attention", "CustomSoftmax", "InfiniteMask", "ScaledQueries"])
def test_causal_models_are_fine(zoo, attention):
    assert causality_of(zoo.GPT(getattr(zoo, attention))).verdict == "fine"


FAULTS = [
    ("MaskDropped", "mask is missing"),
    ("SeesNextToken", "sees the next token"),
    ("ExcludesSelf", "no query sees its own token"),
    ("InvertedMask", "inverted"),
]


@pytest.mark.parametrize("attention", ["Attention", "CustomSoftmax"])
@pytest.mark.parametrize(("model", "cause"), FAULTS)
def test_mask_faults_are_distinguished(zoo, model, cause, attention):
    """With visible weights by the weights, otherwise by the dependencies."""
    finding = causality_of(getattr(zoo, model)(getattr(zoo, attention), depth=1))
    assert finding.verdict == "fault"
    assert cause in finding.text
    assert finding.text.startswith("output ")


@pytest.mark.parametrize("attention", ["Attention", "SafeMask"])
@pytest.mark.parametrize(("model", "cause"), FAULTS)
def test_mask_faults_are_distinguished_with_length_first(zoo, model, cause, attention):
    """With zeros for fully masked rows, an inverted mask lets the first token affect no other."""
    finding = causality_of(zoo.LengthFirst(getattr(zoo, model)(getattr(zoo, attention))))
    assert finding.verdict == "fault"
    assert cause in finding.text


@pytest.mark.parametrize("attention", ["Attention", "CustomSoftmax"])
@pytest.mark.parametrize(("model", "cause"), FAULTS[1:])
def test_faulty_default_mask_is_not_concealed_by_the_mask_argument(zoo, model, cause, attention):
    class Faulty(zoo.OptionalMask):
        masked_keys = getattr(zoo, model).masked_keys

    finding = causality_of(Faulty(getattr(zoo, attention), depth=1))
    assert finding.verdict == "fault"
    assert cause in finding.text


def test_default_mask_or_mask_argument_may_make_a_model_causal(zoo):
    class Window(zoo.OptionalMask):
        """Sees two tokens to both sides by default."""

        def forward(self, idx, mask=None):
            n = idx.shape[1]
            far = (torch.arange(n)[:, None] - torch.arange(n)).abs() > 2
            return super().forward(idx, far if mask is None else far | mask)

    class Unmasked(zoo.OptionalMask):
        masked_keys = zoo.MaskDropped.masked_keys

    assert causality_of(zoo.OptionalMask()).text == "no output depends on a later token"
    for model in (Unmasked, Window):
        for attention in (zoo.Attention, zoo.CustomSoftmax):
            assert causality_of(model(attention, depth=1)).text.endswith("with mask, (Q,K), True = masked")


def test_off_by_one_mask_in_many_layers_is_not_taken_for_a_missing_mask(zoo):
    assert "sees the next token" in causality_of(zoo.SeesNextToken(depth=7)).text


def test_mask_after_softmax_is_found(zoo):
    assert "after the softmax (rows sum to 0." in causality_of(zoo.GPT(zoo.MaskAfterSoftmax)).text
    assert "after the softmax" in causality_of(zoo.MaskedBlock(zoo.MaskAfterSoftmax)).text


def test_mixing_outside_masked_attention_is_found(zoo):
    assert "first mix in blocks.0.attention (view)" in causality_of(zoo.GPT(zoo.WrongView)).text
    assert "softmax is over the wrong axis" in causality_of(zoo.GPT(zoo.WrongAxis)).text


def test_layer_without_mask_is_named(zoo):
    assert "missing in blocks.1.attention; other layers" in causality_of(zoo.MaskDroppedInOneLayer()).text


def test_fully_masked_first_row_is_off_by_one(zoo):
    """With -inf the first row is NaN, and every row of the next layer."""
    assert "use tril(), not tril(-1)" in causality_of(zoo.ExcludesSelf(zoo.InfiniteMask)).text


def test_non_finite_output_is_judged_by_the_weights_only(zoo):
    assert "inverted" in causality_of(zoo.InvertedMask(zoo.InfiniteMask)).text

    class Broken(zoo.GPT):
        def forward(self, idx):
            return super().forward(idx) * torch.nan

    assert causality_of(Broken()).verdict == "not checked"
    assert causality_of(Broken()).text == "the output is not finite"


def test_fill_value_that_is_not_low_enough_is_a_fault(zoo):
    class Small(zoo.Attention):
        def weights(self, scores, masked):
            return scores.masked_fill(masked, -10.0).softmax(-1)

    assert "fill value is not low enough" in causality_of(zoo.GPT(Small)).text


def test_convolution_padded_on_both_sides_is_a_fault():
    class Convolution(nn.Module):
        def __init__(self):
            super().__init__()
            self.tok_embed, self.inner = nn.Embedding(9, 8), nn.Conv1d(8, 8, 3, padding=1)

        def forward(self, ids):
            return self.inner(self.tok_embed(ids).mT).mT

    assert "a convolution is padded on both sides" in causality_of(Convolution()).text


@pytest.mark.parametrize("batch_first", [True, False])
def test_mask_argument_of_torch_layers_is_found(batch_first):
    finding = causality_of(nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first))
    assert finding.verdict == "fine"
    assert finding.text.endswith("with src_mask, (Q,K), True = masked")


def test_polarity_of_the_mask_is_found(zoo):
    assert "mask, (Q,K), True = may attend" in causality_of(zoo.MaskedBlock()).text
    assert "mask, (Q,K), added to the scores" in causality_of(zoo.AdditiveMask()).text


def test_causal_flag_is_set():
    class Flagged(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 24)

        def forward(self, x, is_causal=False):
            q, k, v = self.linear(x)[:, None].chunk(3, -1)
            return x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)[:, 0]

    assert causality_of(Flagged()).text.endswith("with is_causal=True")


def test_ignored_mask_argument_is_named(zoo):
    assert "mask is ignored; apply it to the scores" in causality_of(zoo.MaskedBlockDropped()).text


def test_fault_of_an_encoder_names_the_option_for_it(zoo):
    assert "--no-causal (causal=False)" in causality_of(zoo.Encoder()).text


def test_pooled_outputs_and_independent_tokens_are_no_fault(zoo):
    assert causality_of(zoo.MeanPooled()).verdict == "not checked"
    assert causality_of(nn.Linear(4, 4)).verdict == "warning"  # no attention


@pytest.mark.parametrize(("model", "verdict"), [("GPT", "fine"), ("MaskDropped", "fault")])
def test_outputs_may_be_scalars(zoo, model, verdict):
    class Scalar(getattr(zoo, model)):
        def forward(self, idx):
            return super().forward(idx).mean(-1)

    assert causality_of(Scalar()).verdict == verdict


def test_zero_initialized_blocks_conceal_no_fault(zoo):
    assert causality_of(zoo.ZeroInitMaskDropped()).verdict == "fault"
    assert causality_of(zoo.ZeroInit()).verdict == "fine"


def test_only_the_target_of_an_encoder_decoder_must_be_causal(zoo):
    assert causality_of(zoo.SourceTargetMasks()).verdict == "fine"
    assert causality_of(nn.Transformer(8, 2, 1, 1, 16, batch_first=True)).verdict == "fine"


@pytest.mark.parametrize("name", ["mask", "causal_mask", "look_ahead_mask", "tgt_mask"])
def test_causal_mask_of_a_decoder_may_have_any_name(name):
    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

    exec(f"def forward(self, src, tgt, {name}=None): return self.inner(src, tgt, tgt_mask={name})", scope := {})
    Translator.forward = scope["forward"]
    assert causality_of(Translator()).text.endswith(f"with {name}, (Q,K), True = masked")


def test_shifted_input_is_a_warning_without_visible_attention():
    class Convolutions(nn.Module):
        """Output i depends on the tokens before i."""

        def __init__(self):
            super().__init__()
            self.tok_embed, self.inner = nn.Embedding(9, 8), nn.Conv1d(8, 8, 3)

        def forward(self, ids):
            return self.inner(nn.functional.pad(self.tok_embed(ids).mT, (3, -1))).mT

    finding = causality_of(Convolutions())
    assert finding.verdict == "warning"
    assert "shifted on purpose" in finding.text


def test_shifted_input_is_fine_under_a_causal_mask(zoo):
    """Output i then depends on the tokens before i, as with a BOS token."""

    class Shifted(zoo.GPT):
        def forward(self, idx):
            return super().forward(nn.functional.pad(idx, (1, -1)))

    assert causality_of(Shifted()).verdict == "fine"


def test_window_that_excludes_the_current_token_is_off_by_one(zoo):
    class Uniform(zoo.SafeMask):
        """Equal weights, so that an output does not depend on its own token by its query either."""

        def scores(self, q, k):
            return 0 * super().scores(q, k)

    class Window(nn.Module):
        def __init__(self):
            super().__init__()
            self.tok_embed, self.attention = nn.Embedding(9, 8), Uniform()

        def forward(self, ids):
            visible = torch.ones(2 * ids.shape[1:]).tril(-1).triu(-3)
            return self.attention(self.tok_embed(ids), visible == 0)

    finding = causality_of(Window())
    assert finding.verdict == "fault"
    assert "use tril(), not tril(-1)" in finding.text


def test_faults_are_found_in_float32(zoo):
    class Float32Only(zoo.GPT):
        def forward(self, idx):
            return super().forward(idx) if self.head.weight.dtype == torch.float32 else 1 / 0

    class Float32OnlyMaskDropped(Float32Only):
        masked_keys = zoo.MaskDropped.masked_keys

    assert causality_of(Float32Only()).verdict == "fine"
    assert causality_of(Float32OnlyMaskDropped()).verdict == "fault"


def order_of(module, causal=True):
    return check_order(prepare(module, None, None), causal)


@pytest.mark.parametrize(("positions", "verdict"), [(True, "fine"), (False, "warning")])
def test_encoder_without_positions_is_a_warning(zoo, positions, verdict):
    (finding,) = order_of(zoo.Encoder(positions=positions), causal=False)
    assert finding.verdict == verdict


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_causal_model_without_positions_is_a_warning(zoo, depth):
    assert order_of(zoo.NoPositions(depth=depth))[0].verdict == "warning"
    assert order_of(zoo.GPT(depth=depth))[0].verdict == "fine"


def test_order_known_from_the_mask_alone_is_a_warning(zoo):
    assert "nothing but the causal mask" in order_of(zoo.NoPositions(depth=2))[0].text
    assert order_of(zoo.NoPositions(zoo.CustomSoftmax, depth=2))[0].verdict == "warning"


@pytest.mark.parametrize("kind", ["sinusoidal", "learned", "rotary", "alibi", "none"])
def test_positional_encodings_of_any_kind_are_recognized(kind):
    config = LanguageConfig(vocab_size=11, context_length=16, width=8, depth=2, num_heads=2, mlp_dim=16, pos_embed=kind)
    assert order_of(LanguageModel.from_config(config))[0].verdict == ("warning" if kind == "none" else "fine")


@pytest.mark.parametrize("kind", ["convolution", "replicated", "recurrence", "last layer", "bias of the last layer"])
def test_positions_known_in_other_ways_are_recognized(zoo, kind):
    class Positions(zoo.NoPositions):
        def __init__(self):
            super().__init__(depth=2)
            self.convolution, self.recurrence = nn.Conv1d(8, 8, 3), nn.GRU(8, 8, batch_first=True)
            self.last = nn.Parameter(torch.randn(16, 8))
            if kind == "bias of the last layer":
                self.blocks[1].attention.scores = self.biased_scores

        def biased_scores(self, q, k):
            positions = torch.arange(q.shape[-2]).to(q)
            return q @ k.mT / 2 - (positions[:, None] - positions).abs()

        def forward(self, idx):
            x, masked = self.tok_embed(idx), self.masked_keys(idx.shape[1])
            if kind in ("convolution", "replicated"):
                mode = "constant" if kind == "convolution" else "replicate"
                x = self.convolution(nn.functional.pad(x.mT, (2, 0), mode=mode)).mT
            if kind == "recurrence":
                x = self.recurrence(x)[0]
            x = self.blocks[0](x, masked)
            if kind == "last layer":
                x = x + self.last[: x.shape[1]]
            return self.head(self.blocks[1](x, masked))

    assert order_of(Positions())[0].verdict == "fine"


def test_order_is_checked_inside_a_narrow_window(zoo):
    class Window(zoo.GPT):
        def masked_keys(self, length):
            ones = torch.ones(length, length, dtype=torch.bool)
            return ~(ones.tril() & ones.triu(-2))

    assert order_of(Window(depth=1))[0].verdict == "fine"


def test_missing_positions_are_found_with_a_float32_softmax(zoo):
    class Float32Softmax(zoo.Attention):
        def weights(self, scores, masked):
            return scores.float().softmax(-1).to(scores.dtype)

    assert order_of(zoo.Encoder(Float32Softmax, positions=False), causal=False)[0].verdict == "warning"


def test_order_of_every_sequence_is_checked(zoo):
    findings = order_of(nn.Transformer(8, 2, 1, 1, 16, batch_first=True), causal=False)
    assert ["src" in finding.text for finding in findings] == [True, False]


def test_order_is_checked_for_pooled_outputs(zoo):
    assert order_of(zoo.MeanPooled(positions=False), causal=False)[0].verdict == "warning"
    assert order_of(zoo.MeanPooled(), causal=False)[0].verdict == "fine"
