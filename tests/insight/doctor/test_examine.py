"""Complete examinations: correct modules have no fault, and each faulty one has exactly its own."""

import pytest
import torch
from torch import nn

import clearhead
from clearhead import LanguageModel, MultiHeadAttention, Seq2Seq, SequencePredictor, VisionTransformer, examine
from clearhead.insight.doctor.call_plan import prepare
from clearhead.insight.doctor.examine import check_batch, check_output, check_repeatable
from clearhead.models.config import LanguageConfig, PredictorConfig, Seq2SeqConfig, VisionConfig
from clearhead.nn.attention import SingleHeadAttention
from clearhead.nn.blocks import Decoder, DecoderBlock, Encoder, EncoderBlock, EncoderDecoder

SMALL = {"width": 8, "depth": 2, "num_heads": 2, "mlp_dim": 16}


def layer(**options):
    return nn.TransformerEncoderLayer(8, 2, 16, **options)


def decoder_layer():
    return nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)


CORRECT = {
    "LanguageModel": (
        lambda: LanguageModel.from_config(LanguageConfig(vocab_size=11, context_length=16, **SMALL)),
        True,
    ),
    "rotary": (
        lambda: LanguageModel.from_config(
            LanguageConfig(vocab_size=11, context_length=16, pos_embed="rotary", **SMALL)
        ),
        True,
    ),
    "SequencePredictor": (
        lambda: SequencePredictor.from_config(PredictorConfig(in_features=5, out_features=3, **SMALL)),
        False,
    ),
    "with a mask": (
        lambda: SequencePredictor.from_config(PredictorConfig(in_features=5, out_features=3, **SMALL)),
        True,
    ),
    "pooled": (
        lambda: SequencePredictor.from_config(PredictorConfig(in_features=5, out_features=3, pooling="cls", **SMALL)),
        False,
    ),
    "Seq2Seq": (lambda: Seq2Seq.from_config(Seq2SeqConfig(src_vocab_size=11, tgt_vocab_size=9, **SMALL)), True),
    "VisionTransformer": (
        lambda: VisionTransformer.from_config(VisionConfig(image_size=32, patch_size=16, num_classes=5, **SMALL)),
        True,
    ),
    "MultiHeadAttention": (lambda: MultiHeadAttention(8, 2), True),
    "nn.TransformerEncoderLayer": (lambda: layer(batch_first=True), True),
    "nn.TransformerEncoderLayer, length first": (layer, True),
    "nn.TransformerEncoder": (lambda: nn.TransformerEncoder(layer(batch_first=True), 2), True),
    "nn.TransformerEncoder, bidirectional": (lambda: nn.TransformerEncoder(layer(batch_first=True), 2), False),
    "nn.Transformer": (lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), True),
    "nn.TransformerDecoder": (lambda: nn.TransformerDecoder(decoder_layer(), 1), True),
    "nn.MultiheadAttention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), True),
    "SingleHeadAttention": (lambda: SingleHeadAttention(8, 4, 8), True),
    "EncoderBlock": (lambda: EncoderBlock.from_torch(layer(batch_first=True)), True),
    "DecoderBlock": (lambda: DecoderBlock.from_torch(decoder_layer()), True),
    "Encoder": (lambda: Encoder.from_torch(nn.TransformerEncoder(layer(batch_first=True), 2)), True),
    "Decoder": (lambda: Decoder.from_torch(nn.TransformerDecoder(decoder_layer(), 2)), True),
    "EncoderDecoder": (lambda: EncoderDecoder.from_torch(nn.Transformer(8, 2, 1, 1, 16, batch_first=True)), True),
}


@pytest.mark.parametrize("name", CORRECT)
def test_modules_of_clearhead_and_torch_have_no_fault(name):
    build, causal = CORRECT[name]
    report = examine(build(), causal=causal)
    assert not report.faults, report
    assert report["gradient"].verdict in ("fine", "note")
    if name != "VisionTransformer":
        assert report["padding"].verdict == "fine"
    if causal and name != "VisionTransformer":
        assert report["causality"].verdict == "fine"


@pytest.mark.parametrize(
    ("model", "causal"),
    [
        ("GPT", True),
        ("NanoGPT", True),
        ("ZeroInit", True),
        ("Encoder", False),
        ("MaskedBlock", True),
        ("TorchAttention", True),
    ],
)
def test_correct_modules_of_users_have_no_fault(zoo, model, causal):
    report = examine(getattr(zoo, model)(), causal=causal)
    assert not report.faults, report


FAULTY = {
    "mask dropped": (lambda zoo: zoo.MaskDropped(), True, {"causality"}),
    "inverted mask": (lambda zoo: zoo.InvertedMask(), True, {"causality"}),
    "inverted padding mask": (lambda zoo: zoo.InvertedPaddingMask(), False, {"padding"}),
    "sees the next token": (lambda zoo: zoo.SeesNextToken(), True, {"causality"}),
    "excludes the own token": (lambda zoo: zoo.ExcludesSelf(), True, {"causality"}),
    "mask after softmax": (lambda zoo: zoo.GPT(zoo.MaskAfterSoftmax), True, {"causality", "attention weights"}),
    "masks queries": (lambda zoo: zoo.MasksQueries(), False, {"padding"}),
    "padding mask dropped": (lambda zoo: zoo.PaddingMaskDropped(), False, {"padding"}),
    "NaN in a fully masked row": (lambda zoo: zoo.Encoder(zoo.InfiniteMask), False, {"fully masked rows"}),
    "detached embedding": (lambda zoo: zoo.DetachedEmbedding(), True, {"gradient"}),
    "dropout in eval mode": (lambda zoo: zoo.AlwaysDropout(), True, {"output"}),
    "mixed batch": (lambda zoo: zoo.MixedBatch(), False, {"batch"}),
}


@pytest.mark.parametrize("name", FAULTY)
def test_only_the_planted_fault_is_found(zoo, name):
    build, causal, checks = FAULTY[name]
    assert {finding.check for finding in examine(build(zoo), causal=causal).faults} == checks


AMBIGUOUS = {
    "module that never runs": (lambda zoo: zoo.UnusedParameter(), True, "gradient"),
    "no positions": (lambda zoo: zoo.Encoder(positions=False), False, "order"),
    "no positions under a mask": (lambda zoo: zoo.NoPositions(), True, "order"),
    "unusual scale": (lambda zoo: zoo.GPT(zoo.Unscaled), True, "scale"),
    "shared norm": (lambda zoo: zoo.GPT(block=zoo.SharedNorm), True, "norms"),
    "swapped keys and queries": (lambda zoo: zoo.GPT(zoo.SwappedQueryKey), True, "keys and queries"),
    "plain tensor": (lambda zoo: zoo.PlainTensor(), True, "saving"),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_possibly_intended_behavior_is_a_warning(zoo, name):
    build, causal, check = AMBIGUOUS[name]
    report = examine(build(zoo), causal=causal)
    assert not report.faults
    assert check in {finding.check for finding in report.warnings}


def test_key_bias_is_a_note(zoo):
    report = examine(zoo.GPT(zoo.KeyBias))
    assert not report.faults
    assert "gradient" not in {finding.check for finding in report.warnings}
    assert [finding.check for finding in report.notes] == ["gradient"]
    assert report["gradient"].verdict == "note"
    assert report.summary().endswith(", 1 note")


def test_compiled_module_is_unwrapped(zoo):
    compiled = nn.Module()
    compiled._orig_mod = zoo.GPT()
    report = examine(compiled)
    assert report.module == "GPT"
    assert not report.faults
    assert "_orig_mod." in report["saving"].text


def test_checks_that_need_finite_outputs_are_skipped_without_them(zoo):
    report = examine(zoo.ExcludesSelf(zoo.InfiniteMask))
    assert [finding.check for finding in report.faults] == ["output", "causality"]
    assert report["gradient"].verdict == "not checked"


def test_examine_is_reproducible_and_leaves_the_module_unchanged(zoo):
    model = zoo.GPT().train()
    state, random = {name: x.clone() for name, x in model.state_dict().items()}, torch.get_rng_state()
    assert examine(model) == examine(model)
    assert model.training
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())


def test_examine_is_public_and_needs_an_instance():
    assert clearhead.examine is examine
    with pytest.raises(ValueError, match=r"needs an nn.Module, got type; pass an instance"):
        examine(nn.Linear)


def test_module_that_stores_its_attention_weights_is_examined(zoo):
    class Storing(zoo.Attention):
        def weights(self, scores, masked):
            self.last = super().weights(scores, masked)
            return self.last

    model = zoo.GPT(Storing)
    model(torch.ones(1, 3, dtype=torch.long))
    report = examine(model)
    assert not report.faults
    assert report["dtype"].verdict != "not checked"


def test_error_in_one_check_does_not_stop_the_others(zoo):
    class FailsWithHooks(zoo.GPT):
        def forward(self, idx):
            if self.head._forward_pre_hooks:  # the check of norms registers one
                raise RuntimeError("hooked")
            return super().forward(idx)

    report = examine(FailsWithHooks())
    assert "RuntimeError: hooked (test_examine.py:" in report["norms"].text
    assert not report.faults


def test_outputs_of_different_lengths_skip_the_check(zoo):
    class Short(zoo.GPT):
        first = None

        def forward(self, idx):
            self.first = self.first or idx[0, 0].item()
            return super().forward(idx)[:, : 7 if idx[0, 0] == self.first else 3]

    finding = examine(Short())["batch"]
    assert finding.verdict == "not checked"
    assert "RuntimeError: The size of tensor" in finding.text


def test_stateful_module_has_no_other_fault(zoo):
    class Accumulating(zoo.GPT):
        """Like a key-value cache that is never cleared."""

        total = 0.0

        def forward(self, idx):
            self.total = self.total + super().forward(idx).mean(1, keepdim=True)
            return self.total

    report = examine(Accumulating())
    assert [finding.check for finding in report.faults] == ["output"]
    assert {report[check].verdict for check in ("causality", "batch", "gradient")} == {"not checked"}
    assert report["saving"].verdict == "fine"
    assert "causality" not in {finding.check for finding in examine(Accumulating(), causal=False).findings}


def test_forward_may_modify_its_input_in_place():
    class Adding(nn.Module):
        def __init__(self):
            super().__init__()
            self.pos_embed = nn.Parameter(torch.randn(16, 8))
            self.inner = layer(batch_first=True)

        def forward(self, x):
            x += self.pos_embed[: x.shape[1]].detach()
            n = x.shape[1]
            return self.inner(x, torch.ones(n, n, dtype=torch.bool).triu(1))

    assert {finding.check for finding in examine(Adding()).faults} == {"gradient"}  # pos_embed is detached


def test_global_torch_settings_change_no_verdict(zoo):
    expected = examine(zoo.Encoder(zoo.InfiniteMask), causal=False)
    try:
        torch.set_default_dtype(torch.float64)
        torch.autograd.set_detect_anomaly(True)
        report = examine(zoo.Encoder(zoo.InfiniteMask).float(), causal=False)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.autograd.set_detect_anomaly(False)
    verdicts = [(finding.check, finding.verdict) for finding in report.findings]
    assert verdicts == [(finding.check, finding.verdict) for finding in expected.findings]
    assert report["fully masked rows"].verdict == "fault"


def prepared(module):
    return prepare(module, None, None)


def test_examples_of_a_batch_must_be_independent(zoo):
    assert check_batch(prepared(zoo.GPT())).verdict == "fine"
    assert check_batch(prepared(zoo.MixedBatch())).verdict == "fault"


def test_length_first_is_a_warning():
    finding = check_batch(prepared(nn.TransformerEncoderLayer(8, 2, 16)))
    assert finding.verdict == "warning"
    assert "is batch_first=True missing in self_attn?" in finding.text


def test_outputs_must_be_deterministic_in_eval_mode(zoo):
    assert check_output(prepared(zoo.GPT())).verdict == "fine"
    finding = check_output(prepared(zoo.AlwaysDropout()))
    assert finding.verdict == "fault"
    assert "training=self.training" in finding.text


def test_active_dropout_is_a_fault_and_other_noise_a_warning(zoo):
    class Noisy(zoo.GPT):
        def forward(self, idx):
            x = nn.functional.dropout(super().forward(idx), 0.1, self.training)
            return x + torch.randn_like(x)

    class KernelDropout(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            q = self.linear(x)[:, None]
            return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1)[:, 0]

    class AlwaysTraining(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

        def forward(self, x):
            return self.inner.train()(x, x, x)[0]

    assert check_output(prepared(KernelDropout())).verdict == "fault"
    assert check_output(prepared(AlwaysTraining())).verdict == "fault"
    finding = check_output(prepared(Noisy()))
    assert finding.verdict == "warning"
    assert "is the noise intended" in finding.text


def test_state_between_calls_is_distinguished_from_randomness(zoo):
    class Counting(zoo.GPT):
        n = 0

        def forward(self, idx):
            self.n += 1
            return self.modify(super().forward(idx))

        def modify(self, logits):
            return logits + self.n

    class Growing(Counting):
        def modify(self, logits):
            return logits[..., : self.n]

    class Failing(Counting):
        def modify(self, logits):
            return logits + torch.zeros(logits.shape[0] if self.n == 1 else 3, 1, 1)

    assert check_repeatable(prepared(zoo.GPT())) is None
    assert check_repeatable(prepared(zoo.AlwaysDropout())) is None  # torch's random numbers are seeded
    for kind in (Counting, Growing):
        finding = check_repeatable(prepared(kind()))
        assert finding.verdict == "fault"
        assert "same input and seed differ: it keeps state" in finding.text
    assert "second call raises RuntimeError: The size of" in check_repeatable(prepared(Failing())).text


def test_outputs_must_be_finite(zoo):
    finding = check_output(prepared(zoo.ExcludesSelf(zoo.InfiniteMask, depth=1)))
    assert finding.verdict == "fault"
    assert "1 of 7 outputs are not finite" in finding.text

    class Pooled(zoo.GPT):
        def forward(self, idx):
            return super().forward(idx).mean(1) * torch.inf

    assert check_output(prepared(Pooled())).verdict == "fault"
