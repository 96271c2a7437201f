import inspect

import pytest

from clearhead import LanguageModel, Seq2Seq, SequencePredictor, VisionTransformer
from clearhead.models.config import LanguageConfig, PredictorConfig, Seq2SeqConfig, VisionConfig, build_model
from clearhead.models.presets import PRESETS, list_presets

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


def test_anything_else_is_refused():
    with pytest.raises(TypeError, match=r"VisionConfig.* got int"):
        build_model(3)


@pytest.mark.parametrize("model", [SequencePredictor, VisionTransformer, Seq2Seq, LanguageModel])
def test_a_model_says_which_config_it_wants(model):
    with pytest.raises(ValueError, match=r"is built from a \w+Config, got 'tiny_vit'; make one, or take one from"):
        model.from_config("tiny_vit")


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (SequencePredictor, PredictorConfig),
        (VisionTransformer, VisionConfig),
        (Seq2Seq, Seq2SeqConfig),
        (LanguageModel, LanguageConfig),
    ],
)
def test_constructors_have_the_fields_and_defaults_of_their_config(model, config):
    keywords = {name: p.default for name, p in inspect.signature(model).parameters.items()}
    assert keywords == {name: p.default for name, p in inspect.signature(config).parameters.items()}


def test_keywords_build_the_same_model_as_a_config():
    sizes = {"image_size": 28, "patch_size": 7, "num_classes": 10, "width": 64, "depth": 4, "num_heads": 4}
    assert VisionTransformer(**sizes).config == VisionTransformer.from_config(VisionConfig(**sizes)).config
    assert VisionTransformer.from_preset("tiny_vit").config == PRESETS["tiny_vit"]()
    assert "tiny_vit" in list_presets()
    with pytest.raises(ValueError, match="is built from a VisionConfig"):
        VisionTransformer.from_preset("gpt2_small")
