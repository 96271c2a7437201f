import json
import re

import pytest
import torch

import clearhead
from clearhead.models.config import VisionConfig, build_model
from clearhead.models.presets import PRESETS, bert_cifar10, list_presets, preset, reverse, vit_mnist_plain
from clearhead.models.vit import VisionTransformer


def count(name):
    with torch.device("meta"):
        return sum(p.numel() for p in build_model(preset(name)).parameters())


def test_bert_cifar_has_the_sizes_of_a_small_bert():
    config = bert_cifar10()
    assert (config.image_size, config.patch_size, config.in_channels, config.num_classes) == (32, 4, 3, 10)
    assert (config.width, config.depth, config.num_heads, config.mlp_width) == (256, 12, 8, 1024)
    assert (config.norm, config.activation, config.pos_embed, config.pooling) == ("post", "gelu", "learned", "cls")
    assert (config.dropout, config.attention_dropout, config.mlp_dropout) == (0.1, 0.1, 0.0)
    assert config.embed_norm
    assert config.norm_eps == 1e-12
    assert config.head_mlp_dim == 256
    with torch.device("meta"):
        model = build_model(config)
        tokens = []
        model.blocks[0].register_forward_pre_hook(lambda _, args: tokens.append(args[0].shape))
        assert model(torch.empty(192, 3, 32, 32)).shape == (192, 10)
    assert tokens == [(192, 65, 256)]


def test_reverse_is_a_single_block_with_one_head():
    config = reverse()
    assert (config.width, config.depth, config.num_heads) == (32, 1, 1)
    assert (config.in_features, config.out_features, config.pos_embed, config.pooling) == (10, 10, "sinusoidal", "none")
    assert build_model(config)(torch.zeros(2, 16, dtype=torch.long)).shape == (2, 16, 10)


def test_vit_mnist_plain_has_no_norm_positions_or_output_projection():
    config = vit_mnist_plain()
    assert (config.width, config.depth, config.num_heads, config.patch_size, config.mlp_dim) == (64, 4, 1, 7, 64)
    assert (config.norm, config.pos_embed, config.pooling, config.output_projection) == ("none", "none", "cls", False)
    names = [name for name, _ in build_model(config).named_parameters()]
    assert not [name for name in names if "norm" in name or "pos_embed" in name or "out_proj" in name]


def test_vit_mnist_plain_logits_are_patch_permutation_invariant():
    """Without positional embedding, permuting the patches does not change the logits."""
    model = build_model(vit_mnist_plain()).double()
    patches = torch.randn(2, 16, 64, dtype=torch.float64)
    shuffled = patches[:, torch.randperm(16)]
    torch.testing.assert_close(model(inputs_embeds=patches), model(inputs_embeds=shuffled))
    with_positions = build_model(preset("vit_mnist")).double()
    change = with_positions(inputs_embeds=patches) - with_positions(inputs_embeds=shuffled)
    assert change.abs().max() > 1e-4


def test_parameter_counts_match_the_published_models():
    """GPT-2 small has 124,439,808 parameters; ViT-B/16 has 86,567,656, of which 768 are the class token's position."""
    assert count("gpt2_small") == 124_439_808
    assert count("vit_base") == 86_567_656 - 768


def test_the_classic_and_the_modern_language_model_differ_in_parts_and_not_in_size():
    classic, modern = preset("classic_lm"), preset("modern_lm")
    assert abs(count("modern_lm") / count("classic_lm") - 1) < 0.02
    for size in ("width", "depth", "num_heads", "vocab_size", "context_length", "tie_weights"):
        assert getattr(classic, size) == getattr(modern, size)
    assert (classic.norm, classic.norm_layer, classic.activation, classic.pos_embed, classic.bias) == (
        *("post", "layernorm", "relu", "sinusoidal", True),
    )
    assert (modern.norm, modern.norm_layer, modern.activation, modern.pos_embed, modern.bias) == (
        *("pre", "rmsnorm", "swiglu", "rotary", False),
    )
    assert (modern.kv_heads, modern.qk_norm) == (2, True)
    with torch.device("meta"):
        model = build_model(modern)
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds(name):
    assert count(name) > 0


def test_an_unknown_preset_error_suggests_the_closest_name():
    with pytest.raises(
        LookupError, match=r"unknown preset 'bert_cifra10'; did you mean bert_cifar10\? Choose from reverse, "
    ):
        preset("bert_cifra10")
    with pytest.raises(LookupError, match="unknown preset 'zzz'; choose from reverse, "):
        preset("zzz")


@pytest.mark.parametrize("name", list_presets())
def test_a_config_round_trips_through_json(name):
    config = preset(name)
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_from_preset_overrides_config_fields():
    model = VisionTransformer.from_preset("vit_tiny", {"num_classes": 5, "depth": 1})
    assert (model.config.num_classes, model.config.depth, len(model.blocks)) == (5, 1, 1)
    with pytest.raises(LookupError, match=r"num_clases.*num_classes"):
        VisionTransformer.from_preset("vit_tiny", {"num_clases": 5})


def test_from_dict_rejects_unknown_fields():
    values = preset("vit_tiny").to_dict() | {"heads": 3}
    with pytest.raises(LookupError, match="heads"):
        VisionConfig.from_dict(values)


@pytest.mark.parametrize(
    ("model", "keyword", "meant"),
    [
        (clearhead.VisionTransformer, "pathc_size", "patch_size"),
        (clearhead.VisionTransformer, "embed_dim", "width"),
        (clearhead.LanguageModel, "n_layer", "depth"),
        (clearhead.SequencePredictor, "num_attention_heads", "num_heads"),
        (clearhead.Seq2Seq, "dim_feedforward", "mlp_dim"),
    ],
)
def test_unknown_keyword_argument_suggests_the_closest_name(model, keyword, meant):
    message = f"{model.__name__} got an unexpected keyword argument '{keyword}'; did you mean {meant}?"
    with pytest.raises(TypeError, match=re.escape(message)):
        model(**{keyword: 4})
