import pytest
import torch

from clearhead.models import stack
from clearhead.models.config import LanguageConfig, PredictorConfig, Seq2SeqConfig, build_model

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
