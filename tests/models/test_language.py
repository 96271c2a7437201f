from dataclasses import replace

import pytest
import torch

from clearhead import LanguageModel
from clearhead.models.config import LanguageConfig
from clearhead.models.generate import Beam, Greedy
from clearhead.nn.cache import DecoderCache

CONFIG = LanguageConfig(width=8, depth=2, num_heads=2, vocab_size=7, context_length=10)
POS_EMBEDS = ["sinusoidal", "learned", "rotary", "alibi", "none"]


def build(**fields):
    torch.manual_seed(0)
    return LanguageModel.from_config(replace(CONFIG, **fields)).double()


@pytest.fixture
def ids():
    return torch.randint(0, 7, (3, 6), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("pos_embed", POS_EMBEDS)
def test_a_prefix_does_not_depend_on_its_suffix(ids, pos_embed):
    model = build(pos_embed=pos_embed)
    other = torch.cat([ids[:, :3], (ids[:, 3:] + 1) % 7], dim=1)
    before, after = model(ids), model(other)
    torch.testing.assert_close(before[:, :3], after[:, :3], rtol=0, atol=1e-12)
    torch.testing.assert_close(model(ids[:, :3]), before[:, :3])
    assert (before[:, 3:] - after[:, 3:]).abs().max() > 1e-3


@pytest.mark.parametrize("pos_embed", POS_EMBEDS)
@pytest.mark.parametrize("chunk_sizes", [[1] * 6, [4, 1, 1], [2, 3, 1]])
def test_cached_chunks_equal_the_full_forward_pass(ids, pos_embed, chunk_sizes):
    model, cache = build(pos_embed=pos_embed), DecoderCache(2)
    with torch.no_grad():
        parts = [model(chunk, cache=cache) for chunk in ids.split(chunk_sizes, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(ids))
    assert cache.length == 6


def test_inputs_embeds_equal_ids(ids):
    model = build()
    torch.testing.assert_close(model(inputs_embeds=model.tokens(ids)), model(ids))


@pytest.mark.parametrize("tie_weights", [True, False])
def test_features_and_lm_head_compose_to_the_model(ids, tie_weights):
    model = build(tie_weights=tie_weights)
    features = model.features(ids)
    assert features.shape == (3, 6, 8)
    logits = features @ model.tok_embed.weight.T if tie_weights else model.lm_head(features)
    assert torch.equal(logits, model(ids))
    states = model.features(inputs_embeds=model.tokens(ids), all_layers=True)
    assert len(states) == 3
    torch.testing.assert_close(states[-1], features)


def test_a_mask_is_combined_with_the_causal_mask(ids):
    model = build()
    mask_first_key = torch.ones(1, 1, 1, 6, dtype=torch.bool)
    mask_first_key[..., 0] = False
    other = ids.clone()
    other[:, 0] = (ids[:, 0] + 1) % 7
    before, after = model(ids, mask=mask_first_key), model(other, mask=mask_first_key)
    torch.testing.assert_close(before[:, 1:], after[:, 1:], rtol=0, atol=1e-12)
    assert (model(ids)[:, 1:] - model(other)[:, 1:]).abs().max() > 1e-3


def test_tied_weights_are_saved_once():
    tied, untied = build(tie_weights=True), build(tie_weights=False)
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == 7 * 8
    stored = [tensor.data_ptr() for tensor in tied.state_dict().values()]
    assert len(stored) == len(set(stored))


def test_tied_weights_get_gradients_from_input_and_output(ids):
    model = build(tie_weights=True)
    model(ids).logsumexp(-1).sum().backward()
    assert (model.tok_embed.weight.grad != 0).all()


@pytest.mark.parametrize(
    ("mask", "message"),
    [(torch.zeros(6, 6), "a mask must be bool"), (torch.ones(3, 3, dtype=torch.bool), "must broadcast to the scores")],
)
def test_invalid_masks_raise(ids, mask, message):
    with pytest.raises(ValueError, match=message):
        build()(ids, mask=mask)


def test_compiled_fullgraph_output_equals_eager(ids):
    model = build()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids), model(ids))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.full((1, 2), 7), "ids must be from 0 to 6, got 7"),
        (torch.zeros(1, 11, dtype=torch.long), "must fit the learned position table of 10 rows, got length 11"),
        (torch.zeros(1, 2), "ids must be integers, got torch.float32; pass embeddings as inputs_embeds="),
    ],
)
def test_invalid_ids_raise(ids, message):
    with pytest.raises(ValueError, match=message):
        build()(ids)


MODERN = {"num_kv_heads": 1, "qk_norm": True, "activation": "swiglu", "norm_layer": "rmsnorm", "layer_scale": 0.5}


@pytest.mark.parametrize("pos_embed", POS_EMBEDS)
def test_modern_parts_keep_causality_and_the_cache_exact(ids, pos_embed):
    model, cache = build(pos_embed=pos_embed, bias=False, **MODERN), DecoderCache(2)
    full = model(ids)
    torch.testing.assert_close(model(ids[:, :3]), full[:, :3], rtol=0, atol=1e-12)
    with torch.no_grad():
        parts = [model(chunk, cache=cache) for chunk in ids.split([3, 2, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), full, rtol=0, atol=1e-12)
    keys, _ = cache.layers[0].self_attn.extend(*(torch.zeros(3, 1, 0, 4, dtype=torch.float64) for _ in range(2)))
    assert keys.shape == (3, 1, 6, 4), "one head of keys for two heads of queries"


def test_modern_parts_generate_the_same_with_and_without_a_cache(ids):
    model = build(pos_embed="rotary", bias=False, **MODERN)
    for strategy in (Greedy(), Beam(3)):
        cached, plain = (
            model.generate(ids, max_new_tokens=4, strategy=strategy, use_cache=use_cache) for use_cache in (True, False)
        )
        assert torch.equal(cached.ids, plain.ids)


@pytest.mark.slow
def test_modern_parts_compile_to_one_graph(ids):
    model = build(pos_embed="rotary", bias=False, **MODERN).float()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids), model(ids))
