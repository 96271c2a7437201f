import inspect
import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import FrozenInstanceError, asdict, replace

import pytest

from clearhead import LanguageModel, Seq2Seq, SequencePredictor, VisionTransformer
from clearhead.models.config import (
    LanguageConfig,
    PredictorConfig,
    Seq2SeqConfig,
    StackConfig,
    VisionConfig,
    build_model,
)
from clearhead.models.presets import PRESETS, list_presets

VISION = VisionConfig(width=8, depth=1, num_heads=2, image_size=8, patch_size=4, num_classes=2)


def test_importing_configs_and_presets_does_not_import_torch():
    code = "import sys, clearhead.models.config, clearhead.models.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_configs_are_frozen_and_derived_with_replace():
    with pytest.raises(FrozenInstanceError):
        VISION.width = 16
    assert replace(VISION, width=16).width == 16
    assert VISION.width == 8


def test_replace_validates_again():
    with pytest.raises(ValueError, match="multiple of num_heads"):
        replace(VISION, num_heads=3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"width": 130, "num_heads": 4},
            r"width must be a multiple of num_heads, got width=130, num_heads=4; try width=128",
        ),
        ({"depth": 0}, r"depth must be a positive integer, got 0"),
        ({"width": 8.0}, r"width must be a positive integer, got 8\.0"),
        ({"mlp_dim": 0}, r"mlp_dim must be a positive integer"),
        ({"norm": "middle"}, r"norm must be one of pre, post, none, got 'middle'"),
        ({"activation": "swish"}, r"activation must be one of gelu, relu, swiglu, got 'swish'"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1\.0"),
        ({"attention_dropout": -0.1}, r"attention_dropout must be in \[0, 1\)"),
        ({"dropout": "0.1"}, r"dropout must be in \[0, 1\), got '0\.1'"),
        ({"drop_path": 2}, r"drop_path must be in \[0, 1\)"),
        ({"beta": float("nan")}, r"beta must be a number"),
        ({"norm_eps": 0}, r"norm_eps must be a positive finite number, got 0"),
        ({"norm_eps": float("inf")}, r"norm_eps must be a positive finite number, got inf"),
        ({"norm_eps": float("nan")}, r"norm_eps must be a positive finite number, got nan"),
        ({"norm_eps": "1e-12"}, r"norm_eps must be a positive finite number, got '1e-12'"),
    ],
)
def test_invalid_stack_config_values_raise(fields, message):
    with pytest.raises(ValueError, match=message):
        StackConfig(**{"width": 8, "depth": 1, "num_heads": 2, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_size": 9}, r"image_size must be a multiple of patch_size, got 9 x 9 and 4"),
        ({"image_size": (8, 6)}, r"got 8 x 6 and 4"),
        ({"patch_embed": "words"}, r"patch_embed must be one of patch, conv, conv-stem"),
        ({"patch_embed": "conv", "patch_size": 1}, r"patch_size must be .*2, 4, 8"),
        ({"patch_embed": "conv-stem", "patch_size": 1}, r"patch_size must be .*2, 4, 8"),
        ({"pooling": "each"}, r"pooling must be one of cls, mean, attention"),
        ({"pos_embed": "alibi"}, r"pos_embed must be one of learned, sinusoidal, rotary, none"),
        ({"pos_embed": "rotary", "num_heads": 4}, r"multiple of 4 .*got 2"),
        ({"pos_embed": "sinusoidal", "width": 6}, r"multiple of 4 .*got 6"),
        ({"num_classes": 0}, r"num_classes must be"),
        ({"head_mlp_dim": -3}, r"head_mlp_dim must be a non-negative integer, got -3"),
        ({"image_size": "16"}, r"image_size must be a number or \(height, width\), got '16'"),
        ({"embed_norm": "false"}, r"embed_norm must be True or False, got 'false'"),
    ],
)
def test_invalid_vision_config_values_raise(fields, message):
    with pytest.raises(ValueError, match=message):
        replace(VISION, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_dropout": 1.0}, r"input_dropout must be in \[0, 1\), got 1\.0"),
        ({"head_norm": 1}, r"head_norm must be True or False, got 1"),
        ({"head_norm": True}, r"got head_norm=True with head_mlp_dim=0; try head_mlp_dim=8"),
    ],
)
def test_invalid_predictor_config_values_raise(fields, message):
    with pytest.raises(ValueError, match=message):
        PredictorConfig(**{"width": 8, "depth": 1, "num_heads": 2, "in_features": 2, "out_features": 2, **fields})


@pytest.mark.parametrize("pos_embed", ["rotary", "sinusoidal"])
def test_rotary_and_sinusoidal_embeddings_need_an_even_width(pos_embed):
    stack = {"width": 3, "depth": 1, "num_heads": 1, "pos_embed": pos_embed}
    for make in (
        lambda: PredictorConfig(**stack, in_features=2, out_features=2),
        lambda: LanguageConfig(**stack, vocab_size=2),
        lambda: Seq2SeqConfig(**stack, src_vocab_size=2, tgt_vocab_size=2),
    ):
        with pytest.raises(ValueError, match="got 3"):
            make()


def test_mlp_width_defaults_to_four_times_the_width():
    assert VISION.mlp_width == 4 * VISION.width
    assert replace(VISION, mlp_dim=5).mlp_width == 5


def test_config_round_trips_through_json():
    for config in (VISION, replace(VISION, image_size=(8, 12))):
        assert VisionConfig(**json.loads(json.dumps(asdict(config)))) == config


STACK = {"width": 4, "depth": 1, "num_heads": 1}


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (PredictorConfig(**STACK, in_features=2, out_features=2), SequencePredictor),
        (VisionConfig(**STACK, image_size=4, patch_size=2, num_classes=2), VisionTransformer),
        (Seq2SeqConfig(**STACK, src_vocab_size=2, tgt_vocab_size=2), Seq2Seq),
        (LanguageConfig(**STACK, vocab_size=2), LanguageModel),
    ],
)
def test_each_config_builds_its_model(config, model):
    assert type(build_model(config)) is model


def test_build_model_rejects_other_types():
    with pytest.raises(TypeError, match=r"VisionConfig.* got int"):
        build_model(3)


@pytest.mark.parametrize("model", [SequencePredictor, VisionTransformer, Seq2Seq, LanguageModel])
def test_from_config_names_the_expected_config_class(model):
    with pytest.raises(ValueError, match=r"is built from a \w+Config, got 'vit_tiny'; make one, or take one from"):
        model.from_config("vit_tiny")


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (SequencePredictor, PredictorConfig),
        (VisionTransformer, VisionConfig),
        (Seq2Seq, Seq2SeqConfig),
        (LanguageModel, LanguageConfig),
    ],
)
def test_constructor_keywords_equal_the_config_fields_and_defaults(model, config):
    keywords = {name: p.default for name, p in inspect.signature(model).parameters.items()}
    assert keywords == {name: p.default for name, p in inspect.signature(config).parameters.items()}


def test_keywords_config_and_preset_build_equal_models():
    sizes = {"image_size": 28, "patch_size": 7, "num_classes": 10, "width": 64, "depth": 4, "num_heads": 4}
    assert VisionTransformer(**sizes).config == VisionTransformer.from_config(VisionConfig(**sizes)).config
    assert VisionTransformer.from_preset("vit_tiny").config == PRESETS["vit_tiny"]()
    assert "vit_tiny" in list_presets()
    with pytest.raises(ValueError, match="is built from a VisionConfig"):
        VisionTransformer.from_preset("gpt2_small")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads, got num_heads=2, num_kv_heads=3"),
        ({"num_kv_heads": 0}, "num_kv_heads must be a positive integer, got 0"),
        ({"qk_norm": "rmsnorm"}, "qk_norm must be True or False, got 'rmsnorm'"),
        ({"norm_layer": "rms"}, "norm_layer must be one of layernorm, rmsnorm, got 'rms'"),
        ({"layer_scale": -1}, "layer_scale must be a finite number >= 0, got -1"),
        ({"bias": 0}, "bias must be True or False, got 0"),
    ],
)
def test_parts_that_do_not_exist_are_rejected(fields, message):
    with pytest.raises(ValueError, match=message):
        StackConfig(**{"width": 8, "depth": 1, "num_heads": 2, **fields})


def test_swiglu_has_about_the_parameters_of_an_mlp_by_default():
    config = StackConfig(width=96, depth=1, num_heads=2, activation="swiglu")
    assert 3 * config.width * config.mlp_width == 2 * 96 * (4 * 96)
    assert replace(config, mlp_dim=5).mlp_width == 5


def test_a_gated_head_has_no_place_for_a_norm():
    fields = {"width": 8, "depth": 1, "num_heads": 2, "in_features": 2, "out_features": 2, "head_mlp_dim": 8}
    with pytest.raises(ValueError, match="got head_norm=True with activation='swiglu'"):
        PredictorConfig(**fields, head_norm=True, activation="swiglu")


@pytest.mark.parametrize("preset", ["vit_mnist", "reverse", "gpt_tiny", "transformer_base"])
@pytest.mark.parametrize("value", [None, [], {}, "x", [1], True, 1e400], ids=repr)
def test_any_json_value_of_any_field_is_accepted_or_refused_in_a_sentence(preset, value):
    config = PRESETS[preset]()
    for name in vars(config):
        values = config.to_dict() | {"mlp_dim": None, name: value}
        with suppress(ValueError):  # any other exception would be a bug
            type(config).from_dict(values).to_dict()
