import pytest
import torch.nn.functional as F
from torch import nn

from clearhead import examine
from clearhead.insight.doctor.call_plan import call


def paddings(module):
    return {name: feed.padding for name, feed in call(module, None, None).subject.plan.feeds.items()}


def test_a_number_that_is_kept_and_compared_with_is_the_padding_id(ward):
    assert paddings(ward.KeepsPaddingId()) == {"ids": 3}
    assert paddings(ward.ByPaddingId()) == {"ids": 0}  # the table says so


@pytest.mark.parametrize(
    "name", ["pad", "padding", "pad_id", "src_pad_idx", "padding_idx", "pad_token_id", "PAD_INDEX"]
)
def test_it_has_many_names(ward, name):
    class Compared(ward.ByPaddingId):
        """With 0; its table does not say so."""

        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(11, 8)

    model = Compared()
    assert paddings(model) == {"ids": None}
    setattr(model, name, 0)
    assert paddings(model) == {"ids": 0}


def test_each_sequence_may_have_its_own(ward):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.src_pad_idx, self.trg_pad_idx = nn.Embedding(9, 8), 1, 2

        def forward(self, src, trg):
            real = (src != self.src_pad_idx)[..., None]
            return self.tokens(trg) * (trg != self.trg_pad_idx)[..., None] + (self.tokens(src) * real).sum(1, True)

    assert paddings(Both()) == {"src": 1, "trg": 2}


def test_a_number_that_says_how_far_to_pad_is_no_id(ward):
    class Causal(ward.GPT):
        """With a convolution, padded on its left."""

        def __init__(self):
            super().__init__()
            self.pad, self.convolution, self.pool = 2, nn.Conv1d(8, 8, 3), nn.MaxPool1d(1)
            self.tokens.register_forward_hook(lambda _, __, x: self.convolution(F.pad(x.mT, (self.pad, 0))).mT)

    class Counting(ward.GPT):
        """Ids are compared, but not with padding."""

        end = 2

        def forward(self, idx):
            return super().forward(idx) + (idx == self.end).sum(1, keepdim=True)[..., None] * 0

    assert paddings(Causal()) == {"idx": None}
    assert paddings(Counting()) == {"idx": None}


def test_an_id_beyond_the_vocabulary_is_none_of_it(ward):
    assert paddings(ward.KeepsPaddingId(pad_idx=-1)) == {"ids": None}
    assert paddings(ward.KeepsPaddingId(pad_idx=99)) == {"ids": None}


def test_planted_faults_are_found_by_it(ward):
    def faults(module):
        return {finding.check for finding in examine(module, causal=False).faults}

    assert not faults(ward.KeepsPaddingId())
    assert faults(ward.KeepsPaddingId(masked=False)) == {"padding"}
    assert faults(ward.KeepsPaddingId(ward.Infinite)) == {"empty rows"}
