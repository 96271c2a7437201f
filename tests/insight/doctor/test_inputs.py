import keyword
import math
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from clearhead import masks
from clearhead.insight.doctor.inputs import (
    ATTENTION_SHAPES,
    LENGTHS,
    MASK_SHAPES,
    POLARITIES,
    FeatureInput,
    ImageInput,
    MaskConvention,
    TokenIds,
    candidate_inputs,
    candidate_lengths,
    contradicts_name,
    is_cross_mask,
    main_and_source,
    mask_conventions,
    masks_source,
    parameters_of,
)

TWO_MASKS = {"trg_mask": "attention", "src_mask": "attention"}


def roles(signature):
    """The roles of a forward() that is given as text."""
    scope = {}
    exec(f"def forward({signature}): pass", scope)
    return {parameter.name: parameter.role for parameter in parameters_of(scope["forward"])}


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        ("idx", {"idx": "sequence"}),
        ("idx, targets=None", {"idx": "sequence", "targets": "labels"}),
        ("x, y=None", {"x": "sequence", "y": "labels"}),
        ("x, y", {"x": "sequence", "y": "target"}),
        ("x, mask", {"x": "sequence", "mask": "attention"}),
        ("ids, attention_mask=None", {"ids": "sequence", "attention_mask": "padding"}),
        ("x, src_key_padding_mask=None", {"x": "sequence", "src_key_padding_mask": "padding"}),
        ("x, lengths=None, is_causal=False", {"x": "sequence", "lengths": "lengths", "is_causal": "causal"}),
        ("query, key, value", {"query": "sequence", "key": "key_value", "value": "key_value"}),
        ("tgt, memory, tgt_mask=None", {"tgt": "sequence", "memory": "memory", "tgt_mask": "attention"}),
        ("ids, encoder_hidden_states=None, encoder_attention_mask=None", {"ids": "sequence"}),
        ("trg, enc_src, trg_mask, src_mask", {"trg": "sequence", "enc_src": "memory"} | TWO_MASKS),
        ("x, context, context_mask=None", {"x": "sequence", "context": "memory", "context_mask": "attention"}),
        ("x, context=None, context_mask=None", {"x": "sequence"}),
        ("enc_X, dec_X", {"enc_X": "sequence", "dec_X": "target"}),
        ("src, has_mask=True", {"src": "sequence"}),
        ("ids, targets=None, loss_mask=None", {"ids": "sequence", "targets": "labels"}),
        ("ids, head_mask=None, special_tokens_mask=None", {"ids": "sequence"}),
        ("ids, loss_mask", {"ids": "sequence", "loss_mask": "attention"}),
        ("x, temperature=1.0, *args, **more", {"x": "sequence"}),
    ],
)
def test_parameters_get_roles_by_name(signature, expected):
    assert roles(signature) == expected


def test_outputs_belong_to_the_target_sequence():
    def forward(src, tgt, src_mask=None, tgt_mask=None):
        pass

    assert main_and_source(parameters_of(forward)) == ("tgt", "src")
    assert masks_source("src_mask", "src")
    assert masks_source("memory_key_padding_mask", "src")
    assert not masks_source("tgt_mask", "src")
    assert not masks_source("src_mask", None)
    assert not masks_source("mask", "memory")  # a decoder's own mask


def test_cross_attention_masks_are_recognized():
    assert is_cross_mask("memory_mask", "src")
    assert is_cross_mask("src_mask", "enc_src")  # of a decoder that takes its memory as an argument
    assert not is_cross_mask("src_mask", "src")
    assert not is_cross_mask("encoder_mask", "src")
    assert not is_cross_mask("mask", "memory")
    assert not is_cross_mask("memory_mask", None)


NAMES = st.from_regex(r"[a-z_]{1,9}(_mask|_lens)?", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))


@given(st.lists(NAMES, min_size=1, max_size=5, unique=True), st.integers(0, 5))
def test_every_signature_is_accepted_or_raises_value_error(names, num_required):
    signature = ", ".join(name if i < num_required else f"{name}=None" for i, name in enumerate(names))
    with suppress(ValueError):
        found = roles(signature)
        assert found[names[0]] == "sequence"
        assert set(names[:num_required]) <= set(found)


def test_unknown_required_parameters_are_named_in_the_error():
    with pytest.raises(ValueError, match="required parameter 'edges' of forward"):
        roles("x, edges, nodes=3")
    with pytest.raises(ValueError, match="no named parameters"):
        roles("*args, **more")
    with pytest.raises(ValueError, match="no signature"):
        parameters_of(type)  # Python knows no signature of it


def sample(kind, seed=0):
    return kind.sample(5, 7, torch.Generator().manual_seed(seed))


@given(st.integers(2, 3000), st.none() | st.integers(0, 5), st.integers(0, 100))
def test_resampled_ids_differ_and_are_in_the_vocabulary(vocab_size, padding_id, seed):
    kind = TokenIds(vocab_size, padding_id if padding_id is not None and padding_id < vocab_size else None)
    ids = sample(kind, seed)
    resampled = kind.resample(ids, torch.Generator().manual_seed(seed))
    assert (ids != resampled).all()
    for x in (ids, resampled):
        assert x.min() >= 0
        assert x.max() < vocab_size
        if vocab_size > 4:  # then 0 and the padding id are left out
            assert (x != 0).all()
            assert kind.padding_id is None or (x != kind.padding_id).all()


def test_features_and_images_are_resampled_entirely():
    for kind, shape in ((FeatureInput(4), (5, 7, 4)), (ImageInput(3, 8), (5, 3, 8, 8))):
        x = sample(kind)
        assert x.shape == shape
        assert (kind.resample(x, torch.Generator().manual_seed(9)) != x).all()
        assert torch.equal(sample(kind), x)


def test_most_likely_input_comes_first():
    table, linear, convolution = nn.Embedding(11, 4, padding_idx=2), nn.Linear(6, 4), nn.Conv2d(3, 4, 2)
    assert next(candidate_inputs(nn.Sequential(linear, table), None)) == TokenIds(11, 2)
    assert next(candidate_inputs(nn.Sequential(table, linear), 9)) == FeatureInput(9)
    assert next(candidate_inputs(linear, None)) == FeatureInput(6)
    assert next(candidate_inputs(convolution, None)) == ImageInput(3, 32)
    smaller_table = nn.Sequential(table, nn.Embedding(5, 4))  # the first table may be that of positions
    assert TokenIds(5, 2) in list(candidate_inputs(smaller_table, None))


def test_padding_id_is_that_of_the_token_table():
    segments, tokens, positions = nn.Embedding(3, 4, padding_idx=0), nn.Embedding(11, 4), nn.Embedding(9, 4)
    assert next(candidate_inputs(nn.Sequential(tokens, segments), None)) == TokenIds(11)
    padded = nn.Embedding(11, 4, padding_idx=2)
    assert next(candidate_inputs(nn.Sequential(positions, padded), None)) == TokenIds(9, 2)


def test_lengths_of_position_tables_and_mask_buffers_are_candidates():
    model = nn.Module()
    assert 7 in candidate_lengths(model, 7)
    model.pos_embed = nn.Parameter(torch.zeros(1, 12, 4))
    model.register_buffer("mask", torch.zeros(1, 1, 5, 5))
    assert candidate_lengths(model, 7)[0] == 7
    assert {12, 5} <= set(candidate_lengths(model, 7))


@pytest.mark.parametrize("shape", MASK_SHAPES)
@pytest.mark.parametrize("polarity", POLARITIES)
def test_every_convention_encodes_the_same_mask(shape, polarity):
    """Decoded by clearhead's own rules and expanded to (B,Q,K)."""
    if "B" in shape and "Q" not in shape:
        visible = (torch.arange(4) < torch.tensor([[4], [2], [3]]))[:, None].expand(3, 4, 4)
    else:
        visible = masks.causal(4)[None].expand(3, 4, 4) if "B" not in shape else torch.rand(3, 4, 4) > 0.5
    encoded = MaskConvention(shape, polarity).encode(visible, torch.float64)
    decoded = {
        "attend": lambda: encoded,
        "masked": lambda: ~encoded,
        "ones": lambda: encoded == 1,
        "additive": lambda: masks.from_additive(encoded),
    }[polarity]()
    decoded = decoded.reshape(3, 1, 4) if shape == "(B,K)" else decoded.squeeze(1) if decoded.dim() == 4 else decoded
    assert torch.equal(decoded.expand(3, 4, 4), visible)
    assert not visible.all()


def test_additive_masks_have_the_dtype_of_the_scores():
    visible = torch.ones(2, 3, 3, dtype=torch.bool).tril()
    encoded = MaskConvention("(Q,K)", "additive").encode(visible, torch.float64)
    assert encoded.dtype == torch.float64
    assert encoded[0, 1] == -math.inf


def test_lengths_count_visible_tokens():
    visible = masks.padding([3, 1], 4)[:, 0].expand(2, 4, 4)
    assert LENGTHS.encode(visible, torch.float32).tolist() == [3, 1]


def test_mask_conventions_are_all_combinations():
    assert len(set(mask_conventions(ATTENTION_SHAPES))) == len(ATTENTION_SHAPES) * len(POLARITIES)


def test_some_names_imply_a_polarity():
    assert contradicts_name("attention_mask", "masked")
    assert contradicts_name("src_key_padding_mask", "attend")
    for name, polarity in [
        ("attention_mask", "ones"),
        ("key_padding_mask", "masked"),
        ("mask", "masked"),
        ("mask", "attend"),
    ]:
        assert not contradicts_name(name, polarity)
