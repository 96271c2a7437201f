from dataclasses import replace

import pytest
import torch

from clearhead import Seq2Seq
from clearhead.models.config import Seq2SeqConfig
from clearhead.nn.cache import DecoderCache

CONFIG = Seq2SeqConfig(
    width=8, depth=2, num_heads=2, src_vocab_size=5, tgt_vocab_size=7, decoder_depth=3, context_length=10
)
POSITIONS = ["sinusoidal", "learned", "rotary", "alibi", "none"]
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


@pytest.mark.parametrize("pos_embed", POSITIONS)
def test_a_target_prefix_is_blind_to_its_suffix(source, target, pos_embed):
    model = build(pos_embed=pos_embed)
    other = torch.cat([target[:, :2], (target[:, 2:] + 1) % 7], dim=1)
    before, after = model(source, target), model(source, other)
    assert before.shape == (3, 4, 7)
    torch.testing.assert_close(before[:, :2], after[:, :2], rtol=0, atol=1e-12)
    assert (before[:, 2:] - after[:, 2:]).abs().max() > 1e-3


@pytest.mark.parametrize("pos_embed", POSITIONS)
def test_source_padding_never_changes_the_answer(source, target, pos_embed):
    model = build(pos_embed=pos_embed)
    real = torch.arange(6) < LENGTHS[:, None]
    other = torch.where(real, source, (source + 1) % 5)
    before = model(source, target, source_lengths=LENGTHS)
    torch.testing.assert_close(before, model(other, target, source_lengths=LENGTHS), rtol=0, atol=1e-12)
    torch.testing.assert_close(before[:1], model(source[:1, :2], target[:1]))
    assert (model(source, target) - model(other, target)).abs().max() > 1e-3


@pytest.mark.parametrize("pos_embed", POSITIONS)
def test_cached_decoding_equals_the_whole(source, target, pos_embed):
    model, cache = build(pos_embed=pos_embed), DecoderCache(3)
    with torch.no_grad():
        memory = model.encode(source, source_lengths=LENGTHS)
        steps = [model.decode(t, memory, source_lengths=LENGTHS, cache=cache) for t in target.split(1, dim=1)]
        torch.testing.assert_close(torch.cat(steps, dim=1), model(source, target, source_lengths=LENGTHS))


def test_embeddings_may_stand_for_the_source(source, target):
    model = build()
    torch.testing.assert_close(model(None, target, inputs_embeds=model.source_tokens(source)), model(source, target))


def test_one_table_may_serve_three_places(source, target):
    for fields, n_tables in (({"src_vocab_size": 7, "tie_weights": True}, 1), ({"tie_weights": True}, 2), ({}, 3)):
        model = build(**fields)
        assert len([name for name in model.state_dict() if "embed" in name or "head" in name]) == n_tables
        assert model(source, target).shape == (3, 4, 7)


def test_it_compiles_whole_with_padding(source, target):
    model = build()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(source, target, source_lengths=LENGTHS), model(source, target, source_lengths=LENGTHS)
    )


def test_every_parameter_learns(source, target):
    model = build(pos_embed="learned")
    model(source, target).square().sum().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]


def test_bad_ids_are_refused(source, target):
    with pytest.raises(ValueError, match="ids must be from 0 to 4, got 6"):
        build()(torch.full((1, 2), 6), target[:1])
    with pytest.raises(ValueError, match="ids must be from 0 to 6, got 7"):
        build()(source, torch.full((3, 1), 7))
