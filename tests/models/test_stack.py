import json

import pytest
import torch

from clearhead.models import stack
from clearhead.models.config import LanguageConfig, PredictorConfig, Seq2SeqConfig, VisionConfig, build_model
from clearhead.nn.attention import LayerScale, MultiHeadAttention, RMSNorm
from clearhead.nn.blocks import DecoderBlock, EncoderBlock, SwiGLU

CONFIG = PredictorConfig(
    width=4,
    depth=4,
    num_heads=1,
    in_features=2,
    out_features=2,
    dropout=0.1,
    attention_dropout=0.2,
    mlp_dropout=0.3,
    drop_path=0.4,
)


def test_drop_path_rates_increase_linearly():
    rates = [block.drop1.drop_path for block in stack.build_encoder_blocks(CONFIG)]
    torch.testing.assert_close(rates, [0.1, 0.2, 0.3, 0.4])


def test_dropout_rates_reach_their_modules():
    block = stack.build_decoder_blocks(CONFIG, 1)[0]
    assert block.self_attn.dropout == block.cross_attn.dropout == 0.2
    assert block.mlp.dropout.p == 0.3
    assert block.drop1.dropout.p == block.drop2.dropout.p == 0.1


def test_beta_and_output_projection_reach_the_attention():
    from dataclasses import replace

    attention = stack.build_attention(replace(CONFIG, beta=2.0, output_projection=False))
    assert attention.beta == 2.0
    assert isinstance(attention.out_proj, torch.nn.Identity)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_norm_eps_reaches_every_layer_norm(norm):
    sizes = {"width": 4, "depth": 2, "num_heads": 1, "norm": norm, "norm_eps": 1e-3}
    for config, n_norms in (
        (PredictorConfig(**sizes, in_features=2, out_features=2, head_mlp_dim=3, head_norm=True), 2 * 2 + 1),
        (LanguageConfig(**sizes, vocab_size=2), 2 * 2),
        (Seq2SeqConfig(**sizes, src_vocab_size=2, tgt_vocab_size=2), 2 * 2 + 2 * 3),
    ):
        model = build_model(config)
        found = [module.eps for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
        n_final = (1 + isinstance(config, Seq2SeqConfig)) * (norm == "pre")
        assert found == [1e-3] * (n_norms + n_final)


PARTS = {
    "num_kv_heads": 2,
    "qk_norm": True,
    "activation": "swiglu",
    "norm_layer": "rmsnorm",
    "layer_scale": 0.5,
    "bias": False,
}


@pytest.mark.parametrize("field", PARTS)
def test_every_model_is_built_with_the_part_that_its_config_names(field):
    sizes = {"width": 16, "depth": 1, "num_heads": 4, field: PARTS[field]}
    for config in (
        PredictorConfig(**sizes, in_features=2, out_features=2, head_mlp_dim=4),
        VisionConfig(**sizes, image_size=8, patch_size=4, num_classes=2, embed_norm=True),
        LanguageConfig(**sizes, vocab_size=5),
        Seq2SeqConfig(**sizes, src_vocab_size=5, tgt_vocab_size=5),
    ):
        assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config
        model = build_model(config)
        blocks = [part for part in model.modules() if isinstance(part, EncoderBlock | DecoderBlock)]
        attentions = [part for block in blocks for part in block.modules() if isinstance(part, MultiHeadAttention)]
        norms = [part for part in model.modules() if isinstance(part, torch.nn.LayerNorm | RMSNorm)]
        assert {attn.num_kv_heads for attn in attentions} == {2 if field == "num_kv_heads" else 4}
        assert {attn.q_norm is None for attn in attentions} == {field != "qk_norm"}
        assert {isinstance(block.mlp, SwiGLU) for block in blocks} == {field == "activation"}
        assert {isinstance(norm, RMSNorm) for norm in norms} == {field == "norm_layer"}
        assert {isinstance(block.ls1, LayerScale) for block in blocks} == {field == "layer_scale"}
        in_blocks = [name for block in blocks for name, _ in block.named_parameters() if name.endswith("bias")]
        assert bool(in_blocks) == (field != "bias")
