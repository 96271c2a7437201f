"""Hugging Face's LlamaForCausalLM and Qwen3ForCausalLM as oracles of the modern parts: same weights, same outputs.

Llama has pre-norm RMSNorm, SwiGLU, rotary embeddings, grouped-query attention and no biases; Qwen3 adds QK-norm.
"""

import pytest
import torch
from torch import nn

from clearhead import LanguageModel
from clearhead.nn.attention import RMSNorm
from clearhead.nn.cache import DecoderCache

WIDTH, HEADS, KV_HEADS, MLP_DIM, VOCAB, DEPTH = 32, 4, 2, 44, 50, 2
SIZES = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": WIDTH // HEADS,
    "intermediate_size": MLP_DIM,
    "num_hidden_layers": DEPTH,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
BLOCK = {  # the decoder layer's name: ours
    "input_layernorm": "norm1",
    "self_attn.q_proj": "attn.q_proj",
    "self_attn.k_proj": "attn.k_proj",
    "self_attn.v_proj": "attn.v_proj",
    "self_attn.o_proj": "attn.out_proj",
    "post_attention_layernorm": "norm2",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
}
QK_NORM = {"self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm"}


def hugging_face(name):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, rms_norm_eps=1e-6, tie_word_embeddings=False)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # gains that are not 1, and weights large enough to matter
            parameter += 0.2 * torch.randn_like(parameter)
    return model.double().eval()


@torch.no_grad()
def ours(theirs, **changes):
    sizes = {"width": WIDTH, "depth": DEPTH, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "mlp_dim": MLP_DIM}
    parts = {"activation": "swiglu", "norm_layer": "rmsnorm", "norm_eps": 1e-6, "pos_embed": "rotary", "bias": False}
    has_qk_norm = hasattr(theirs.model.layers[0].self_attn, "q_norm")
    options = sizes | parts | {"qk_norm": has_qk_norm} | changes
    model = LanguageModel(vocab_size=VOCAB, tie_weights=False, **options).double().eval()
    names = BLOCK | QK_NORM if options["qk_norm"] else BLOCK
    for block, layer in zip(model.blocks, theirs.model.layers, strict=True):
        for name, our_name in names.items():
            block.get_submodule(our_name).load_state_dict(layer.get_submodule(name).state_dict())
    model.tok_embed.load_state_dict(theirs.model.embed_tokens.state_dict())
    model.norm.load_state_dict(theirs.model.norm.state_dict())
    model.lm_head.load_state_dict(theirs.lm_head.state_dict())
    return model


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
@torch.no_grad()
def test_logits_and_every_hidden_state_are_equal(name):
    theirs = hugging_face(name)
    model, ids = ours(theirs), torch.randint(VOCAB, (2, 11))
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in theirs.parameters())
    expected = theirs(ids, output_hidden_states=True)
    # their rotary angles are computed in float32, as ours are
    torch.testing.assert_close(model(ids), expected.logits, rtol=0, atol=1e-5)
    for state, other in zip(model.features(ids, all_layers=True), expected.hidden_states, strict=True):
        torch.testing.assert_close(state, other, rtol=0, atol=1e-5)
    assert expected.logits.std() > 0.1, "logits of zero would equal anything"


@pytest.mark.parametrize(
    "change", [{"norm_eps": 1e-2}, {"pos_embed": "none"}, {"qk_norm": False}, {"beta": 1.0}], ids=str
)
@torch.no_grad()
def test_another_setting_gives_other_logits(change):
    """Guards the test above."""
    theirs, ids = hugging_face("Qwen3"), torch.randint(VOCAB, (2, 11))
    assert (ours(theirs, **change)(ids) - theirs(ids).logits).abs().max() > 1e-3


@torch.no_grad()
def test_a_single_block_equals_a_llama_decoder_layer_in_outputs_and_gradients():
    theirs = hugging_face("Llama")
    block, layer = ours(theirs).blocks[0], theirs.model.layers[0]
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    positions = torch.arange(7)[None]
    mask = torch.full((7, 7), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    from clearhead.nn import masks
    from clearhead.nn.positions import rotary_angles

    with torch.enable_grad():
        one, other = (x.clone().requires_grad_() for _ in range(2))
        rotary = theirs.model.rotary_emb(other, positions)
        expected = layer(other, attention_mask=mask, position_embeddings=rotary, position_ids=positions)
        expected = expected[0] if isinstance(expected, tuple) else expected
        came = block(one, mask=masks.causal(7), rotary_angles=rotary_angles(positions[0], WIDTH // HEADS))
        torch.testing.assert_close(came, expected, rtol=0, atol=1e-5)
        upstream = torch.randn_like(x)
        came.backward(upstream)
        expected.backward(upstream)
    torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-5)
    for name, our_name in BLOCK.items():
        ours_, theirs_ = (part.get_parameter(f"{path}.weight") for part, path in ((block, our_name), (layer, name)))
        torch.testing.assert_close(ours_.grad, theirs_.grad, rtol=0, atol=1e-4)


@torch.no_grad()
def test_the_cache_has_the_size_of_llamas():
    theirs, ids = hugging_face("Llama"), torch.randint(VOCAB, (2, 9))
    model, cache = ours(theirs), DecoderCache(DEPTH)
    model(ids, cache=cache)
    past = theirs(ids, use_cache=True).past_key_values
    keys, _ = cache.layers[0].self_attn.extend(*(torch.zeros(2, KV_HEADS, 0, WIDTH // HEADS).double(),) * 2)
    their_keys = past.layers[0].keys if hasattr(past, "layers") else past[0][0]
    torch.testing.assert_close(keys, their_keys, rtol=0, atol=1e-5)


@torch.no_grad()
def test_rms_norm_equals_llama():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm, theirs, x = RMSNorm(6, 1e-6), LlamaRMSNorm(6, 1e-6), 3 * torch.randn(2, 5, 6)
    nn.init.normal_(norm.weight)
    theirs.load_state_dict(norm.state_dict())
    torch.testing.assert_close(norm(x), theirs(x))
