import pytest
import torch
from torch import nn

from clearhead import LanguageModel
from clearhead.insight.doctor.call_plan import call
from clearhead.insight.doctor.gradient import check_gradient
from clearhead.models.config import LanguageConfig


def found_in(module):
    return check_gradient(call(module, None, None).subject)


def test_a_gradient_reaches_everything(ward):
    (found,) = found_in(ward.GPT())
    assert found.verdict == "fine"
    assert f"all {len(list(ward.GPT().parameters()))} parameters" in found.text


@pytest.mark.parametrize(
    ("model", "name"), [("Unreached", "forgotten.weight, forgotten.bias"), ("Detached", "tokens.weight")]
)
def test_what_no_gradient_reaches_is_named(ward, model, name):
    (found,) = found_in(getattr(ward, model)())
    assert found.verdict == "fault"
    assert f"reaches {name}:" in found.text


def test_weights_that_start_at_zero_are_no_fault(ward):
    assert found_in(ward.ZeroInit())[0].verdict == "fine"


def test_a_key_bias_is_a_note_and_no_warning(ward):
    """softmax(s + c) = softmax(s): a key bias cannot learn, and nothing is wrong with the module."""
    (found,) = found_in(ward.GPT(ward.WithKeyBias, depth=1))
    assert found.verdict == "note"
    assert "key bias blocks.0.attention.key.bias has no gradient" in found.text
    (found,) = found_in(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    assert "in_proj_bias (its keys' part)" in found.text


def test_with_rotary_positions_a_key_bias_learns():
    config = LanguageConfig(vocab_size=11, width=8, depth=1, num_heads=2, context_length=16, pos_embed="rotary")
    assert found_in(LanguageModel(config))[0].verdict == "fine"


def test_frozen_parameters_and_other_outputs_count_as_they_should(ward):
    class TwoHeads(ward.GPT):
        def __init__(self):
            super().__init__()
            self.other = nn.Linear(8, 2)
            self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, idx):
            return super().forward(idx), self.other(self.tokens(idx))

    assert found_in(TwoHeads())[0].verdict == "fine"
    assert found_in(nn.Flatten(2))[0].verdict == "not checked"


def test_a_gradient_that_is_not_finite_is_a_fault(ward):
    class Rooted(ward.GPT):
        def forward(self, idx):
            x = super().forward(idx)
            return x + (x - x).sqrt()

    (found,) = found_in(Rooted())
    assert found.verdict == "fault"
    assert "is not finite" in found.text


def test_what_cannot_be_trained_is_a_fault(ward):
    class InPlace(ward.GPT):
        def forward(self, idx):
            x = super().forward(idx).sigmoid()
            x += 1  # sigmoid's gradient needs what was there
            return x

    (found,) = found_in(InPlace())
    assert found.verdict == "fault"
    assert "it cannot be trained: with gradients on, it breaks with RuntimeError" in found.text


def test_what_only_other_uses_of_the_module_reach_is_no_fault(ward):
    class Masking(ward.GPT):
        """A parameter of the training stage, one of an optional memory, and an output deep inside."""

        def __init__(self):
            super().__init__()
            self.masked, self.read, self.deep = nn.Parameter(torch.zeros(8)), nn.Linear(8, 11), nn.Linear(8, 2)

        def forward(self, idx, memory=None):
            x = super().forward(idx)
            if self.training:
                x = x + (self.masked * torch.ones(8)).sum()
            if memory is not None:
                x = x + self.read(memory).mean(1, keepdim=True)
            return x, {"more": [self.deep(self.tokens(idx))]}

    assert found_in(Masking())[0].verdict == "fine"


@pytest.mark.parametrize("shape", ["of tokens", "of examples"])
def test_what_only_an_optional_input_reaches_is_no_fault(ward, shape):
    class Conditioned(ward.GPT):
        def __init__(self):
            super().__init__()
            self.segments, self.style, self.unused = nn.Embedding(2, 11), nn.Linear(5, 11), nn.Linear(3, 3)

        def forward(self, idx, segment_ids=None, style=None):
            x = super().forward(idx)
            if segment_ids is not None:
                x = x + (self.segments(segment_ids) if shape == "of tokens" else self.segments(segment_ids)[:, None])
            if style is not None:
                x = x + (self.style(style) if shape == "of tokens" else self.style(style)[:, None])
            return x

    (found,) = found_in(Conditioned())
    assert found.verdict == "fault"
    assert "reaches unused.weight, unused.bias:" in found.text


def test_experts_that_no_token_chose_are_a_warning_and_what_is_left_out_is_not(ward):
    class Choice(nn.Module):
        def __init__(self, n=64):
            super().__init__()
            self.gate, self.experts = nn.Linear(11, n), nn.ModuleList(nn.Linear(11, 11) for _ in range(n))

        def forward(self, x):
            weight, index = self.gate(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                out[index == i] = expert(x[index == i]) * weight[index == i][:, None]
            return x + out

    class Layers(ward.GPT):
        def __init__(self, *more, used):
            super().__init__()
            self.more, self.used = nn.ModuleList(more), used

        def forward(self, idx):
            x = super().forward(idx)
            for layer in self.more[: self.used]:
                x = layer(x)
            return x

    (found,) = found_in(Layers(Choice(), used=1))
    assert found.verdict == "warning"
    assert "experts that no token chose?" in found.text
    (found,) = found_in(Layers(nn.Linear(11, 11), nn.Linear(11, 11), used=1))
    assert found.verdict == "fault"
    assert "reaches more.1.weight, more.1.bias:" in found.text
    warning, fault = found_in(Layers(Choice(), Choice(4), used=1))
    assert warning.verdict == "warning"
    assert fault.verdict == "fault"
    assert "reaches more.1.gate.weight, more.1.gate.bias, more.1.experts.0.weight" in fault.text


def test_gradients_are_on_whatever_they_were(ward):
    with torch.no_grad():
        assert found_in(ward.GPT())[0].verdict == "fine"
