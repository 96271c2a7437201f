"""The whole examination: right modules pass, whoever wrote them; each planted fault is the only one that is found."""

import pytest
import torch
from torch import nn

import clearhead
from clearhead import LanguageModel, MultiHeadAttention, Seq2Seq, SequencePredictor, VisionTransformer, examine
from clearhead.models.config import LanguageConfig, PredictorConfig, Seq2SeqConfig, VisionConfig
from clearhead.nn.attention import SingleHeadAttention
from clearhead.nn.blocks import Decoder, DecoderBlock, Encoder, EncoderBlock, EncoderDecoder

SMALL = {"width": 8, "depth": 2, "num_heads": 2, "mlp_dim": 16}


def layer(**options):
    return nn.TransformerEncoderLayer(8, 2, 16, **options)


RIGHT = {
    "LanguageModel": (lambda: LanguageModel(LanguageConfig(vocab_size=11, context_length=16, **SMALL)), True),
    "rotary": (
        lambda: LanguageModel(LanguageConfig(vocab_size=11, context_length=16, pos_embed="rotary", **SMALL)),
        True,
    ),
    "SequencePredictor": (lambda: SequencePredictor(PredictorConfig(in_features=5, out_features=3, **SMALL)), False),
    "with a mask": (lambda: SequencePredictor(PredictorConfig(in_features=5, out_features=3, **SMALL)), True),
    "one answer": (
        lambda: SequencePredictor(PredictorConfig(in_features=5, out_features=3, pooling="cls", **SMALL)),
        False,
    ),
    "Seq2Seq": (lambda: Seq2Seq(Seq2SeqConfig(src_vocab_size=11, tgt_vocab_size=9, **SMALL)), True),
    "VisionTransformer": (
        lambda: VisionTransformer(VisionConfig(image_size=32, patch_size=16, num_classes=5, **SMALL)),
        True,
    ),
    "MultiHeadAttention": (lambda: MultiHeadAttention(8, 2), True),
    "nn.TransformerEncoderLayer": (lambda: layer(batch_first=True), True),
    "nn.TransformerEncoderLayer, length first": (layer, True),
    "nn.TransformerEncoder": (lambda: nn.TransformerEncoder(layer(batch_first=True), 2), True),
    "nn.TransformerEncoder, both ways": (lambda: nn.TransformerEncoder(layer(batch_first=True), 2), False),
    "nn.Transformer": (lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), True),
    "nn.TransformerDecoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 1),
        True,
    ),
    "nn.MultiheadAttention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), True),
    "SingleHeadAttention": (lambda: SingleHeadAttention(8, 4, 8), True),
    "EncoderBlock": (lambda: EncoderBlock.from_torch(layer(batch_first=True)), True),
    "DecoderBlock": (lambda: DecoderBlock.from_torch(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)), True),
    "Encoder": (lambda: Encoder.from_torch(nn.TransformerEncoder(layer(batch_first=True), 2)), True),
    "Decoder": (
        lambda: Decoder.from_torch(nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 2)),
        True,
    ),
    "EncoderDecoder": (
        lambda: EncoderDecoder.from_torch(nn.Transformer(8, 2, 1, 1, 16, batch_first=True)),
        True,
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_modules_of_ours_and_of_torch_nn_have_no_fault(name):
    build, causal = RIGHT[name]
    report = examine(build(), causal=causal)
    assert not report.faults, report
    assert report["gradient"].verdict in ("fine", "note")
    if name != "VisionTransformer":
        assert report["padding"].verdict == "fine"
    if causal and name != "VisionTransformer":
        assert report["causality"].verdict == "fine"


@pytest.mark.parametrize(
    ("model", "causal"),
    [("GPT", True), ("NanoGPT", True), ("ZeroInit", True), ("Encoder", False), ("Generic", True), ("OfTorch", True)],
)
def test_right_modules_by_hand_have_no_fault(ward, model, causal):
    report = examine(getattr(ward, model)(), causal=causal)
    assert not report.faults, report


PLANTED = {
    "dropped mask": (lambda ward: ward.Dropped(), True, {"causality"}),
    "inverted polarity": (lambda ward: ward.Inverted(), True, {"causality"}),
    "inverted polarity of a padding mask": (lambda ward: ward.InvertedPadding(), False, {"padding"}),
    "off by one": (lambda ward: ward.OneTooFar(), True, {"causality"}),
    "off by one, the other way": (lambda ward: ward.NotItself(), True, {"causality"}),
    "mask after softmax": (lambda ward: ward.GPT(ward.LateMask), True, {"causality", "weights"}),
    "padding that leaks": (lambda ward: ward.RowsHidden(), False, {"padding"}),
    "padding dropped": (lambda ward: ward.DroppedPadding(), False, {"padding"}),
    "NaN on a fully masked row": (lambda ward: ward.Encoder(ward.Infinite), False, {"empty rows"}),
    "unreached parameter": (lambda ward: ward.Unreached(), True, {"gradient"}),
    "chance in eval()": (lambda ward: ward.AlwaysDropping(), True, {"answer"}),
    "mixed batch": (lambda ward: ward.MixedBatch(), False, {"examples"}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_nothing_else(ward, name):
    build, causal, checks = PLANTED[name]
    assert {finding.check for finding in examine(build(ward), causal=causal).faults} == checks


UNDECIDABLE = {
    "no positions": (lambda ward: ward.Encoder(positions=False), False, "order"),
    "no positions under a mask": (lambda ward: ward.NoPlaces(), True, "order"),
    "an unusual scale": (lambda ward: ward.GPT(ward.Unscaled), True, "scale"),
    "one norm shared": (lambda ward: ward.GPT(block=ward.SharedNorm), True, "norms"),
    "keys and queries swapped": (lambda ward: ward.GPT(ward.Swapped), True, "keys and queries"),
    "a plain tensor": (lambda ward: ward.PlainTensor(), True, "saving"),
}


@pytest.mark.parametrize("name", UNDECIDABLE)
def test_what_cannot_be_decided_is_a_warning(ward, name):
    build, causal, check = UNDECIDABLE[name]
    report = examine(build(ward), causal=causal)
    assert not report.faults
    assert check in {finding.check for finding in report.warnings}


def test_a_key_bias_is_neither_a_fault_nor_a_warning(ward):
    report = examine(ward.GPT(ward.WithKeyBias))
    assert not report.faults
    assert "gradient" not in {finding.check for finding in report.warnings}
    assert [finding.check for finding in report.notes] == ["gradient"]
    assert report["gradient"].verdict == "note"
    assert report.summary().endswith(", 1 note")


def test_a_compiled_module_is_examined_as_what_it_wraps(ward):
    compiled = nn.Module()
    compiled._orig_mod = ward.GPT()
    report = examine(compiled)
    assert report.module == "GPT"
    assert not report.faults
    assert "_orig_mod." in report["saving"].text


def test_an_answer_that_is_not_finite_comes_first(ward):
    report = examine(ward.NotItself(ward.Infinite))
    assert [finding.check for finding in report.faults] == ["answer", "causality"]
    assert report["gradient"].verdict == "not checked"


def test_the_same_report_twice_and_nothing_is_changed(ward):
    model = ward.GPT().train()
    state, random = {name: x.clone() for name, x in model.state_dict().items()}, torch.get_rng_state()
    assert examine(model) == examine(model)
    assert model.training
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())


def test_it_is_a_public_name():
    assert clearhead.examine is examine
    with pytest.raises(ValueError, match=r"examine needs an nn.Module, got type; pass the module itself"):
        examine(nn.Linear)


def test_a_module_that_keeps_its_weights_is_examined(ward):
    class Keeping(ward.Attention):
        def weights(self, scores, hidden):
            self.last = super().weights(scores, hidden)
            return self.last

    model = ward.GPT(Keeping)
    model(torch.ones(1, 3, dtype=torch.long))
    report = examine(model)
    assert not report.faults
    assert report["dtype"].verdict != "not checked"


def test_a_module_that_breaks_in_the_middle_is_examined_as_far_as_it_goes(ward):
    class Shy(ward.GPT):
        def forward(self, idx):
            if self.head._forward_pre_hooks:  # as the check of norms has them
                raise RuntimeError("watched")
            return super().forward(idx)

    report = examine(Shy())
    assert report["norms"].text.startswith("it breaks here: RuntimeError: watched (test_examine.py:")
    assert not report.faults


def test_an_answer_may_be_shorter_for_other_input(ward):
    class Short(ward.GPT):
        first = None

        def forward(self, idx):
            self.first = self.first or idx[0, 0].item()
            return super().forward(idx)[:, : 7 if idx[0, 0] == self.first else 3]

    assert "it breaks here: RuntimeError: The size of tensor" in examine(Short())["examples"].text


def test_a_module_that_remembers_is_blamed_for_that_alone(ward):
    class Remembering(ward.GPT):
        """Keys and values of earlier calls would do the same."""

        before = 0.0

        def forward(self, idx):
            self.before = self.before + super().forward(idx).mean(1, keepdim=True)
            return self.before

    report = examine(Remembering())
    assert [finding.check for finding in report.faults] == ["answer"]
    assert {report[check].verdict for check in ("causality", "examples", "gradient")} == {"not checked"}
    assert report["saving"].verdict == "fine"
    assert "causality" not in {finding.check for finding in examine(Remembering(), causal=False).findings}


def test_a_module_may_write_into_its_input():
    class Adding(nn.Module):
        def __init__(self):
            super().__init__()
            self.places = nn.Parameter(torch.randn(16, 8))
            self.inner = layer(batch_first=True)

        def forward(self, x):
            x += self.places[: x.shape[1]].detach()
            n = x.shape[1]
            return self.inner(x, torch.ones(n, n, dtype=torch.bool).triu(1))

    found = {finding.check for finding in examine(Adding()).faults}
    assert found == {"gradient"}  # of the places


def test_what_a_file_sets_for_all_of_torch_changes_nothing(ward):
    expected = examine(ward.Encoder(ward.Infinite), causal=False)
    try:
        torch.set_default_dtype(torch.float64)
        torch.autograd.set_detect_anomaly(True)
        found = examine(ward.Encoder(ward.Infinite).float(), causal=False)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.autograd.set_detect_anomaly(False)
    assert [(one.check, one.verdict) for one in found.findings] == [(f.check, f.verdict) for f in expected.findings]
    assert found["empty rows"].verdict == "fault"
