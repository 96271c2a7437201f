import pytest
import torch
from torch import nn

from clearhead import LanguageModel
from clearhead.insight.doctor.call_plan import prepare
from clearhead.insight.doctor.gradient import check_dtypes, check_gradient, check_norms, check_saving
from clearhead.models.config import LanguageConfig


def gradient_findings(module):
    return check_gradient(prepare(module, None, None))


def test_gradients_reach_all_parameters(zoo):
    (finding,) = gradient_findings(zoo.GPT())
    assert finding.verdict == "fine"
    assert f"all {len(list(zoo.GPT().parameters()))} parameters" in finding.text


def test_parameters_without_gradient_are_named(zoo):
    (finding,) = gradient_findings(zoo.DetachedEmbedding())
    assert finding.verdict == "fault"
    assert "reaches tok_embed.weight:" in finding.text


def test_modules_that_do_not_run_are_a_warning(zoo):
    (finding,) = gradient_findings(zoo.UnusedParameter())
    assert finding.verdict == "warning"
    assert "unused does not run" in finding.text


def test_zero_initialized_parameters_are_fine(zoo):
    assert gradient_findings(zoo.ZeroInit())[0].verdict == "fine"


def test_key_bias_without_gradient_is_a_note(zoo):
    """softmax(s + c) = softmax(s)"""
    (finding,) = gradient_findings(zoo.GPT(zoo.KeyBias, depth=1))
    assert finding.verdict == "note"
    assert "gradient of key bias blocks.0.attention.key.bias is zero" in finding.text
    (finding,) = gradient_findings(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    assert "in_proj_bias (the keys' third)" in finding.text


def test_key_bias_has_a_gradient_with_rotary_positions():
    config = LanguageConfig(vocab_size=11, width=8, depth=1, num_heads=2, context_length=16, pos_embed="rotary")
    assert gradient_findings(LanguageModel.from_config(config))[0].verdict == "fine"


def test_frozen_parameters_and_further_outputs_are_respected(zoo):
    class TwoHeads(zoo.GPT):
        def __init__(self):
            super().__init__()
            self.other = nn.Linear(8, 2)
            self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, idx):
            return super().forward(idx), self.other(self.tok_embed(idx))

    assert gradient_findings(TwoHeads())[0].verdict == "fine"
    assert gradient_findings(nn.Flatten(2))[0].verdict == "not checked"


def test_non_finite_gradient_is_a_fault(zoo):
    class SquareRoot(zoo.GPT):
        def forward(self, idx):
            x = super().forward(idx)
            return x + (x - x).sqrt()

    (finding,) = gradient_findings(SquareRoot())
    assert finding.verdict == "fault"
    assert "is not finite" in finding.text


def test_error_with_gradients_enabled_is_a_fault(zoo):
    class InPlace(zoo.GPT):
        def forward(self, idx):
            x = super().forward(idx).sigmoid()
            x += 1  # overwrites what sigmoid's backward needs
            return x

    (finding,) = gradient_findings(InPlace())
    assert finding.verdict == "fault"
    assert "with gradients enabled, it raises RuntimeError" in finding.text


def test_parameters_of_train_mode_memory_and_nested_outputs_are_reached(zoo):
    class Conditional(zoo.GPT):
        def __init__(self):
            super().__init__()
            self.mask_token, self.cross, self.nested = nn.Parameter(torch.zeros(8)), nn.Linear(8, 11), nn.Linear(8, 2)

        def forward(self, idx, memory=None):
            x = super().forward(idx)
            if self.training:
                x = x + (self.mask_token * torch.ones(8)).sum()
            if memory is not None:
                x = x + self.cross(memory).mean(1, keepdim=True)
            return x, {"more": [self.nested(self.tok_embed(idx))]}

    assert gradient_findings(Conditional())[0].verdict == "fine"


@pytest.mark.parametrize("shape", ["per token", "per example"])
def test_parameters_of_optional_inputs_are_reached(zoo, shape):
    class Conditioned(zoo.GPT):
        def __init__(self):
            super().__init__()
            self.segments, self.style, self.unused = nn.Embedding(2, 11), nn.Linear(5, 11), nn.Linear(3, 3)

        def forward(self, idx, segment_ids=None, style=None):
            x = super().forward(idx)
            if segment_ids is not None:
                x = x + (self.segments(segment_ids) if shape == "per token" else self.segments(segment_ids)[:, None])
            if style is not None:
                x = x + (self.style(style) if shape == "per token" else self.style(style)[:, None])
            return x

    (finding,) = gradient_findings(Conditioned())
    assert finding.verdict == "warning"
    assert finding.text.startswith("unused does not run")


def test_unselected_experts_and_skipped_layers_are_warnings(zoo):
    class Experts(nn.Module):
        def __init__(self, n=64):
            super().__init__()
            self.gate, self.experts = nn.Linear(11, n), nn.ModuleList(nn.Linear(11, 11) for _ in range(n))

        def forward(self, x):
            weight, index = self.gate(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                out[index == i] = expert(x[index == i]) * weight[index == i][:, None]
            return x + out

    class Layers(zoo.GPT):
        def __init__(self, *more, num_used):
            super().__init__()
            self.more, self.num_used = nn.ModuleList(more), num_used

        def forward(self, idx):
            x = super().forward(idx)
            for layer in self.more[: self.num_used]:
                x = layer(x)
            return x

    (finding,) = gradient_findings(Layers(Experts(), num_used=1))
    assert finding.verdict == "warning"
    assert "experts that no token selected?" in finding.text
    (finding,) = gradient_findings(Layers(nn.Linear(11, 11), nn.Linear(11, 11), num_used=1))
    assert finding.verdict == "warning"
    assert "more.1 does not run" in finding.text
    unselected, skipped = gradient_findings(Layers(Experts(), Experts(4), num_used=1))
    assert unselected.verdict == skipped.verdict == "warning"
    assert "experts that no token selected?" in unselected.text
    assert "more.1 does not run" in skipped.text


def test_gradients_are_checked_under_no_grad(zoo):
    with torch.no_grad():
        assert gradient_findings(zoo.GPT())[0].verdict == "fine"


def norms_of(module):
    return check_norms(prepare(module, None, None))


def test_separate_norms_are_fine(zoo):
    assert norms_of(zoo.GPT()).verdict == "fine"


def test_shared_norm_is_a_warning(zoo):
    finding = norms_of(zoo.GPT(block=zoo.SharedNorm))
    assert finding.verdict == "warning"
    assert finding.text.startswith("blocks.0.norm1, blocks.1.norm1: 2 runs")


def test_norms_of_shared_blocks_are_fine(zoo):
    class SharedBlocks(zoo.GPT):
        def __init__(self):
            super().__init__()
            self.blocks[1] = self.blocks[0]

    assert norms_of(SharedBlocks()).verdict == "fine"


def dtype_findings(module):
    return check_dtypes(prepare(module, None, None))


def test_module_without_hardcoded_dtypes_is_fine(zoo):
    assert [finding.verdict for finding in dtype_findings(zoo.GPT(zoo.SafeMask))] == ["fine"]


def test_dtype_errors_have_their_location(zoo):
    findings = dtype_findings(zoo.HardcodedFloat32())
    assert {finding.verdict for finding in findings} == {"warning"}
    assert ["float64" in findings[0].text, "bfloat16" in findings[1].text] == [True, True]
    assert all("(attention.py:" in finding.text for finding in findings)


def test_large_negative_fill_value_fails_in_float16(zoo):
    (finding,) = dtype_findings(zoo.GPT())
    assert finding.verdict == "warning"
    assert "fails in float16" in finding.text


def test_silent_upcast_is_a_warning(zoo):
    assert any("bfloat16 becomes float32 inside" in finding.text for finding in dtype_findings(zoo.UpcastOutput()))


def test_silent_overflow_is_a_fault_in_the_native_dtype(zoo):
    class Overflows(zoo.GPT):
        def forward(self, idx):
            x = super().forward(idx)
            return x + torch.full_like(x, 60000) * 2 - 120000

    for module, verdict in ((Overflows(zoo.SafeMask), "warning"), (Overflows(zoo.SafeMask).half(), "fault")):
        (finding,) = [finding for finding in dtype_findings(module) if "not finite in float16" in finding.text]
        assert finding.verdict == verdict


def test_plain_state_dict_is_fine(zoo):
    assert [finding.verdict for finding in check_saving(zoo.GPT())] == ["fine"]


def test_state_dict_of_a_compiled_module_is_a_warning(zoo):
    inner, outer = zoo.GPT(), nn.Module()
    outer._orig_mod = inner  # as torch.compile does
    for module in (outer, nn.Sequential(outer)):
        (finding,) = check_saving(module)
        assert finding.verdict == "warning"
        assert "_orig_mod.tok_embed.weight" in finding.text


def test_plain_tensor_attribute_is_a_warning(zoo):
    (finding,) = check_saving(nn.Sequential(zoo.PlainTensor()))
    assert finding.verdict == "warning"
    assert finding.text.startswith("0.mask is neither a parameter nor a buffer")
