from dataclasses import replace

import pytest
import torch

from clearhead import Seq2Seq
from clearhead.models.config import Seq2SeqConfig
from clearhead.nn.cache import DecoderCache

CONFIG = Seq2SeqConfig(
    width=8, depth=2, num_heads=2, src_vocab_size=5, tgt_vocab_size=7, decoder_depth=3, context_length=10
)
POS_EMBEDS = ["sinusoidal", "learned", "rotary", "alibi", "none"]
LENGTHS = torch.tensor([2, 6, 4])


def build(**fields):
    torch.manual_seed(0)
    return Seq2Seq.from_config(replace(CONFIG, **fields)).double()


@pytest.fixture
def source():
    return torch.randint(0, 5, (3, 6), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def target():
    return torch.randint(0, 7, (3, 4), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("pos_embed", POS_EMBEDS)
def test_a_target_prefix_does_not_depend_on_its_suffix(source, target, pos_embed):
    model = build(pos_embed=pos_embed)
    other = torch.cat([target[:, :2], (target[:, 2:] + 1) % 7], dim=1)
    before, after = model(source, target), model(source, other)
    assert before.shape == (3, 4, 7)
    torch.testing.assert_close(before[:, :2], after[:, :2], rtol=0, atol=1e-12)
    assert (before[:, 2:] - after[:, 2:]).abs().max() > 1e-3


@pytest.mark.parametrize("pos_embed", POS_EMBEDS)
def test_source_padding_does_not_change_the_output(source, target, pos_embed):
    model = build(pos_embed=pos_embed)
    valid = torch.arange(6) < LENGTHS[:, None]
    other = torch.where(valid, source, (source + 1) % 5)
    before = model(source, target, source_lengths=LENGTHS)
    torch.testing.assert_close(before, model(other, target, source_lengths=LENGTHS), rtol=0, atol=1e-12)
    torch.testing.assert_close(before[:1], model(source[:1, :2], target[:1]))
    assert (model(source, target) - model(other, target)).abs().max() > 1e-3


@pytest.mark.parametrize("pos_embed", POS_EMBEDS)
def test_cached_decoding_equals_the_full_forward_pass(source, target, pos_embed):
    model, cache = build(pos_embed=pos_embed), DecoderCache(3)
    with torch.no_grad():
        memory = model.encode(source, source_lengths=LENGTHS)
        steps = [model.decode(t, memory, source_lengths=LENGTHS, cache=cache) for t in target.split(1, dim=1)]
        torch.testing.assert_close(torch.cat(steps, dim=1), model(source, target, source_lengths=LENGTHS))


def test_inputs_embeds_equal_source_ids(source, target):
    model = build()
    torch.testing.assert_close(model(None, target, inputs_embeds=model.source_tokens(source)), model(source, target))


def test_tied_embeddings_share_one_table(source, target):
    for fields, n_tables in (({"src_vocab_size": 7, "tie_weights": True}, 1), ({"tie_weights": True}, 2), ({}, 3)):
        model = build(**fields)
        assert len([name for name in model.state_dict() if "embed" in name or "head" in name]) == n_tables
        assert model(source, target).shape == (3, 4, 7)


def test_compiled_fullgraph_output_with_padding_equals_eager(source, target):
    model = build()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(source, target, source_lengths=LENGTHS), model(source, target, source_lengths=LENGTHS)
    )


def test_every_parameter_gets_a_gradient(source, target):
    model = build(pos_embed="learned")
    model(source, target).square().sum().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]


def test_invalid_ids_raise(source, target):
    with pytest.raises(ValueError, match="ids must be from 0 to 4, got 6"):
        build()(torch.full((1, 2), 6), target[:1])
    with pytest.raises(ValueError, match="ids must be from 0 to 6, got 7"):
        build()(source, torch.full((3, 1), 7))
