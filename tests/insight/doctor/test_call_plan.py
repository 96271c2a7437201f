import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clearhead import examine
from clearhead.insight.doctor.call_plan import candidate_plans, prepare
from clearhead.insight.doctor.inputs import FeatureInput, ImageInput, TokenIds, parameters_of


def plan_of(module, width=None, length=None):
    return prepare(module, width, length).plan


def test_ids_features_and_images_are_distinguished(zoo):
    assert plan_of(zoo.GPT()).inputs == {"idx": TokenIds(zoo.GPT().tok_embed.num_embeddings)}
    assert plan_of(zoo.TorchAttention()).inputs == {"x": FeatureInput(8)}
    assert plan_of(nn.Sequential(nn.Conv2d(3, 2, 4), nn.Flatten())).inputs == {"input": ImageInput(3, 32)}


def test_first_embedding_may_be_that_of_positions():
    class PositionsFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.pos_embed, self.tok_embed = nn.Embedding(64, 4), nn.Embedding(9, 4)

        def forward(self, ids):
            return self.tok_embed(ids) + self.pos_embed(torch.arange(ids.shape[1]))

    assert plan_of(PositionsFirst()).inputs == {"ids": TokenIds(9)}


@pytest.mark.parametrize("batch_first", [True, False])
def test_batch_axis_of_torch_layers_is_found(batch_first):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
    assert plan_of(layer).batch_first == batch_first
    both = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    assert plan_of(both).batch_first


@pytest.mark.parametrize("model", ["GPT", "MaskDropped", "SeesNextToken", "ExcludesSelf", "InvertedMask"])
def test_batch_axis_is_found_under_any_mask(zoo, model):
    batch_first = getattr(zoo, model)(zoo.SafeMask)
    assert plan_of(batch_first).batch_first
    assert not plan_of(zoo.LengthFirst(batch_first)).batch_first


@pytest.mark.parametrize("batch_first", [True, False])
def test_batch_axis_is_found_with_a_requested_length(batch_first):
    layer = nn.TransformerDecoderLayer(8, 2, 16, batch_first=batch_first)
    assert plan_of(layer, length=6).batch_first == batch_first


def test_batch_axis_is_found_with_a_short_context(zoo):
    class Short(zoo.GPT):
        def __init__(self):
            super().__init__()
            self.pos_embed = nn.Embedding(6, 8)

    plan = plan_of(Short())
    assert plan.batch_first
    assert plan.lengths["idx"] <= 6


def test_fixed_length_is_found():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.pos_embed, self.linear = nn.Parameter(torch.zeros(1, 12, 4)), nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x + self.pos_embed)

    assert plan_of(Fixed()).lengths == {"x": 12}
    assert plan_of(nn.Linear(4, 4), length=9).lengths == {"input": 9}


def test_source_may_have_the_length_of_the_target(zoo):
    class Short(zoo.SourceTargetMasks):
        def __init__(self):
            super().__init__()
            self.pos_embed = nn.Embedding(5, 8)

    assert plan_of(Short(), length=5).lengths == {"src": 5, "tgt": 5}
    assert max(plan_of(Short()).lengths.values()) <= 5


def test_labels_are_passed_only_if_they_bring_an_output_per_token(zoo):
    assert plan_of(zoo.NanoGPT()).aliases == ("targets",)
    assert plan_of(zoo.GPT()).aliases == ()


def test_required_masks_are_filled(zoo):
    assert plan_of(zoo.MaskedBlock()).none_args == ("mask",)
    assert set(plan_of(zoo.SourceTargetMasks()).masks) == {"src_mask", "tgt_mask"}


def test_many_required_masks_need_less_than_10_000_plans():
    class ManyMasks(nn.Module):
        def __init__(self):
            super().__init__()
            self.tok_embed = nn.Embedding(9, 4)

        def forward(self, src, tgt, src_mask, tgt_mask, src_padding_mask, tgt_padding_mask, memory_key_padding_mask):
            attention, padding = (src_mask, tgt_mask), (src_padding_mask, tgt_padding_mask, memory_key_padding_mask)
            if {mask.dim() for mask in attention} != {3} or {mask.dim() for mask in padding} != {2}:
                raise RuntimeError("wrong shape")
            return self.tok_embed(tgt) + self.tok_embed(src).mean(1, keepdim=True)

    shapes = {convention.shape for convention in plan_of(ManyMasks()).masks.values()}
    assert shapes == {"(B,Q,K)", "(B,K)"}
    assert len(list(candidate_plans(ManyMasks(), parameters_of(ManyMasks().forward), None, None))) < 10_000


def test_dtype_is_float64_unless_the_module_fails_in_it(zoo):
    assert prepare(zoo.GPT(), None, None).dtype == torch.float64
    module = prepare(zoo.HardcodedFloat32(), None, None)
    assert module.dtype == torch.float32
    assert "dtype" in module.float64_error


def test_call_is_described(zoo):
    assert prepare(zoo.GPT(), None, None).describe_call() == "forward(idx=ids (5,7) below 11), eval(), float64"
    description = prepare(nn.MultiheadAttention(8, 2), None, None).describe_call()
    assert description == "forward(query=features (7,5,8); key=query; value=query), eval(), float64"


def test_errors_list_the_attempted_inputs(zoo):
    class Joined(nn.Linear):
        def forward(self, x):
            return super().forward(x).flatten(0, 1)[:3]

    with pytest.raises(ValueError, match="'edges'"):
        prepare(zoo.UnknownParameter(), None, None)
    with pytest.raises(ValueError, match=r"Linear accepts none of features \(5,7,3\): RuntimeError: .*--width N"):
        prepare(nn.Linear(4, 4), 3, None)
    with pytest.raises(ValueError, match=r"features \(5,9,3\)"):
        prepare(nn.Linear(4, 4), 3, 9)
    with pytest.raises(ValueError, match=r"Joined must return one output per example, got \(3, 4\) for a batch of 5"):
        prepare(Joined(4, 4), 4, None)


def test_errors_in_forward_are_reported_as_such(zoo):
    class Typo(zoo.GPT):
        def forward(self, idx):
            return super().forwrad(idx)

    with pytest.raises(ValueError, match=r"Typo.forward\(\) fails: AttributeError: .*forwrad"):
        prepare(Typo(), None, None)
    with pytest.raises(ValueError, match=r"at least two token ids, got an nn.Embedding of size 1 \(RuntimeError"):
        prepare(nn.Sequential(nn.Embedding(1, 4), nn.Linear(4, 4)), None, None)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_torchscript_modules_are_rejected():
    with pytest.raises(ValueError, match="TorchScript"):
        prepare(torch.jit.script(nn.Linear(4, 4)), None, None)


def padding_ids(module):
    return {name: kind.padding_id for name, kind in plan_of(module).inputs.items()}


def test_padding_id_is_an_attribute_that_ids_are_compared_with(zoo):
    assert padding_ids(zoo.PaddingIdAttribute()) == {"ids": 3}
    assert padding_ids(zoo.PaddingIdMask()) == {"ids": 0}  # the padding_idx of its embedding


@pytest.mark.parametrize(
    "name", ["pad", "padding", "pad_id", "src_pad_idx", "padding_idx", "pad_token_id", "PAD_INDEX"]
)
def test_padding_id_attribute_may_have_any_usual_name(zoo, name):
    class Compared(zoo.PaddingIdMask):
        """Compares with 0, but its embedding has no padding_idx."""

        def __init__(self):
            super().__init__()
            self.tok_embed = nn.Embedding(11, 8)

    model = Compared()
    assert padding_ids(model) == {"ids": None}
    setattr(model, name, 0)
    assert padding_ids(model) == {"ids": 0}


def test_each_sequence_may_have_its_own_padding_id(zoo):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.tok_embed, self.src_pad_idx, self.trg_pad_idx = nn.Embedding(9, 8), 1, 2

        def forward(self, src, trg):
            source = self.tok_embed(src) * (src != self.src_pad_idx)[..., None]
            return self.tok_embed(trg) * (trg != self.trg_pad_idx)[..., None] + source.sum(1, True)

    assert padding_ids(Both()) == {"src": 1, "trg": 2}


def test_padding_sizes_and_other_compared_ids_are_no_padding_ids(zoo):
    class CausalConvolution(zoo.GPT):
        """A convolution that is padded on the left."""

        def __init__(self):
            super().__init__()
            self.pad, self.convolution, self.pool = 2, nn.Conv1d(8, 8, 3), nn.MaxPool1d(1)
            self.tok_embed.register_forward_hook(lambda _, __, x: self.convolution(F.pad(x.mT, (self.pad, 0))).mT)

    class CountsEndTokens(zoo.GPT):
        """Compares ids with a number that is not called padding."""

        end = 2

        def forward(self, idx):
            return super().forward(idx) + (idx == self.end).sum(1, keepdim=True)[..., None] * 0

    assert padding_ids(CausalConvolution()) == {"idx": None}
    assert padding_ids(CountsEndTokens()) == {"idx": None}


def test_padding_id_outside_the_vocabulary_is_ignored(zoo):
    assert padding_ids(zoo.PaddingIdAttribute(pad_idx=-1)) == {"ids": None}
    assert padding_ids(zoo.PaddingIdAttribute(pad_idx=99)) == {"ids": None}


def test_faults_are_found_with_a_padding_id_attribute(zoo):
    def faults(module):
        return {finding.check for finding in examine(module, causal=False).faults}

    assert not faults(zoo.PaddingIdAttribute())
    assert faults(zoo.PaddingIdAttribute(use_mask=False)) == {"padding"}
    assert faults(zoo.PaddingIdAttribute(zoo.InfiniteMask)) == {"fully masked rows"}
