import keyword
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.insight.doctor.parameters import is_about_source, is_across, parameters_of, sequences

TWO_MASKS = {"trg_mask": "attention", "src_mask": "attention"}


def roles(signature):
    """Of a forward() written as text."""
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
        ("query, key, value", {"query": "sequence", "key": "same", "value": "same"}),
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
def test_a_name_tells_what_a_parameter_is_for(signature, expected):
    assert roles(signature) == expected


def test_outputs_belong_to_what_the_decoder_writes():
    def forward(src, tgt, src_mask=None, tgt_mask=None):
        pass

    assert sequences(parameters_of(forward)) == ("tgt", "src")
    assert is_about_source("src_mask", "src")
    assert is_about_source("memory_key_padding_mask", "src")
    assert not is_about_source("tgt_mask", "src")
    assert not is_about_source("src_mask", None)
    assert not is_about_source("mask", "memory")  # of a decoder that is given its memory


def test_a_mask_of_the_memory_has_the_queries_of_the_decoder():
    assert is_across("memory_mask", "src")
    assert is_across("src_mask", "enc_src")  # of a decoder that is given its memory
    assert not is_across("src_mask", "src")
    assert not is_across("encoder_mask", "src")
    assert not is_across("mask", "memory")
    assert not is_across("memory_mask", None)


NAMES = st.from_regex(r"[a-z_]{1,9}(_mask|_lens)?", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))


@given(st.lists(NAMES, min_size=1, max_size=5, unique=True), st.integers(0, 5))
def test_any_signature_is_read_or_refused_in_one_line(names, n_required):
    signature = ", ".join(name if i < n_required else f"{name}=None" for i, name in enumerate(names))
    with suppress(ValueError):
        found = roles(signature)
        assert found[names[0]] == "sequence"
        assert set(names[:n_required]) <= set(found)


def test_what_cannot_be_filled_is_named():
    with pytest.raises(ValueError, match="no rule fills, 'edges', which has no default; name a function"):
        roles("x, edges, nodes=3")
    with pytest.raises(ValueError, match="must name its parameters, got none"):
        roles("*args, **more")
    with pytest.raises(ValueError, match="must have parameters that Python knows, got one without a signature"):
        parameters_of(type)  # Python knows no signature of it
