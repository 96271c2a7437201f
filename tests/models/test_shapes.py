"""The shape calculator agrees with a real forward pass."""

import json
from dataclasses import replace
from functools import cache
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import clearhead
from clearhead.models.config import (
    AttentionConfig,
    LanguageConfig,
    PredictorConfig,
    Seq2SeqConfig,
    VisionConfig,
    build_model,
)
from clearhead.models.presets import PRESETS
from clearhead.models.recorder import record
from clearhead.models.shapes import Shapes, as_text, count, shapes
from clearhead.nn.attention import MultiHeadAttention, attend_reference

STACK = {"width": 8, "depth": 2, "num_heads": 2, "mlp_dim": 12}
VISION = VisionConfig(**STACK, image_size=(8, 12), patch_size=4, num_classes=3)
PREDICTOR = PredictorConfig(**STACK, in_features=5, out_features=3, context_length=6)
SEQ2SEQ = Seq2SeqConfig(**STACK, src_vocab_size=7, tgt_vocab_size=9, context_length=6, tie_weights=True)
LANGUAGE = LanguageConfig(**STACK, vocab_size=11, context_length=6)

SMALL = {
    "vision": VISION,
    "vision, stem": replace(VISION, patch_embed="conv-stem"),
    "vision, convolutions": replace(VISION, patch_embed="conv", pos_embed="sinusoidal", pooling="mean"),
    "vision, rotary": replace(VISION, pos_embed="rotary", pooling="attention", embed_norm=True, head_mlp_dim=5),
    "vision, plain": replace(VISION, norm="none", output_projection=False, pos_embed="none"),
    "vision, beta inf": replace(VISION, beta=float("inf")),
    "predictor": PREDICTOR,
    "predictor, learned": replace(PREDICTOR, pos_embed="learned", pooling="cls", norm="post", activation="relu"),
    "predictor, alibi": replace(PREDICTOR, pos_embed="alibi", pooling="attention"),
    "seq2seq": SEQ2SEQ,
    "seq2seq, one table": replace(SEQ2SEQ, src_vocab_size=9, decoder_depth=1, norm="post"),
    "language": LANGUAGE,
    "language, rotary": replace(LANGUAGE, pos_embed="rotary", tie_weights=False),
}
small = pytest.mark.parametrize("config", SMALL.values(), ids=SMALL)


def real_inputs(config, batch=2):
    match config:
        case VisionConfig():
            return {"images": torch.randn(batch, config.in_channels, *config.image_shape)}
        case Seq2SeqConfig():
            return {"source": torch.randint(7, (batch, 4)), "target": torch.randint(7, (batch, 6))}
    return {"ids": torch.randint(5, (batch, 6))}


@cache
def shapes_of_real_inputs(config, batch=2) -> Shapes:
    """Shapes for the inputs of `real_inputs`."""
    return shapes(config, batch=batch, source_length=4 if isinstance(config, Seq2SeqConfig) else None)


def test_shapes_of_twelve_heads_of_width_64():
    seen = shapes(AttentionConfig(width=768, num_heads=12), length=5)
    assert seen["tokens"].rows == (1, 5, 768)
    assert seen["q_per_head"].rows == seen["k_per_head"].rows == seen["v_per_head"].rows == (1, 5, 12, 64)
    assert seen["weights"].rows == (1, 12, 5, 5)
    assert seen["z_per_head"].rows == (1, 5, 12, 64)
    assert seen["z"].rows == (1, 5, 768)


def test_predicted_shapes_equal_those_of_a_forward_pass():
    recorded = {}

    def recording_attend(q, k, v, *rest, **named):
        out, weights = attend_reference(q, k, v, *rest, **named)
        recorded.update(q=q, k=k, v=v, z_per_head=out, weights=weights)
        return out

    layer = MultiHeadAttention(768, 12, attend=recording_attend)
    layer.out_proj.register_forward_pre_hook(lambda module, args: recorded.update(z=args[0]))
    layer(torch.randn(1, 5, 768))
    seen = shapes(AttentionConfig(width=768, num_heads=12), length=5)
    for name in ("q", "k", "v"):
        assert seen[f"{name}_per_head"].rows == recorded[name].transpose(1, 2).shape
    assert seen["z_per_head"].rows == recorded["z_per_head"].transpose(1, 2).shape
    assert seen["weights"].rows == recorded["weights"].shape
    assert seen["z"].rows == recorded["z"].shape


def test_columns_transpose_tokens_and_weights():
    seen = shapes(AttentionConfig(width=768), length=6)
    assert seen["tokens"].columns == (768, 6)
    for name in ("q_proj", "k_proj", "v_proj"):
        assert seen[f"{name}.weight"].columns == (768, 768)
        assert seen[name].columns == (768, 6)
    assert seen["weights"].columns == (6, 6)
    assert seen["out_proj"].columns == (768, 6)


def test_key_and_value_widths_are_independent():
    seen = shapes(AttentionConfig(width=256, key_width=64, value_width=256), length=5)
    assert seen["k_proj.weight"].rows == (256, 64)
    assert seen["v_proj.weight"].rows == (256, 256)
    assert seen["z"].rows == (1, 5, 256)


def test_cross_attention_weights_in_columns_are_keys_by_queries():
    seen = shapes_of_real_inputs(SEQ2SEQ)
    weights = seen["decoder.blocks.0.cross_attn.weights"]
    assert weights.rows == (2, 2, 6, 4)
    assert weights.columns == (2, 4, 6)


@small
def test_meta_forward_equals_real_forward(config):
    model = build_model(config).eval()
    assert record(model, real_inputs(config)) == list(shapes_of_real_inputs(config).tensors)


@small
def test_layer_shapes_equal_forward_hook_outputs(config):
    model = build_model(config).eval()
    outputs = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.LayerNorm | nn.Conv2d | nn.Embedding):
            module.register_forward_hook(lambda _, args, out, name=name: outputs.update({name: tuple(out.shape)}))
    model(*real_inputs(config).values())
    seen = shapes_of_real_inputs(config)
    assert len(outputs) > 8
    assert {name: seen[name].rows for name in outputs} == outputs


@small
def test_parameter_counts_sum_to_the_model(config):
    seen = shapes_of_real_inputs(config)
    assert seen.parameters == sum(p.numel() for p in build_model(config).parameters())
    assert seen.parameters == sum(tensor.parameters for tensor in seen.tensors)


@small
def test_names_are_unique(config):
    names = [tensor.name for tensor in shapes_of_real_inputs(config).tensors]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_supported(name):
    seen = shapes(name)
    assert seen.parameters == sum(tensor.parameters for tensor in seen.tensors)
    stack = "encoder." if isinstance(seen.config, Seq2SeqConfig) else ""
    assert seen[f"{stack}blocks.{seen.config.depth - 1}.attn.weights"].multiply_adds > 0


def test_vision_transformer_multiply_adds_match_hand_computation():
    config = VISION
    B, P, E, H = 2, 6, config.width, config.mlp_width
    L = P + 1
    embed = P * 3 * 4 * 4 * E
    block = 4 * L * E * E + 2 * L * L * E + 2 * L * E * H
    head = E * config.num_classes
    assert shapes(config, batch=B).multiply_adds == B * (embed + config.depth * block + head)


@pytest.mark.parametrize("name", [name for name in SMALL if "beta" not in name])
def test_multiply_adds_are_half_of_torch_flop_counter(name):
    # attend_reference uses matmuls, which torch counts on every device
    config = SMALL[name]
    model = build_model(config).eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            module.attend = attend_reference
    with FlopCounterMode(display=False) as counter:
        model(*real_inputs(config).values())
    assert 2 * shapes_of_real_inputs(config).multiply_adds == counter.get_total_flops()


def test_infinite_beta_has_the_same_multiply_adds():
    assert shapes(replace(VISION, beta=float("inf"))).multiply_adds == shapes(VISION).multiply_adds


def test_multiply_adds_scale_with_the_batch_and_parameters_do_not():
    one, three = shapes(LANGUAGE), shapes(LANGUAGE, batch=3)
    assert three.multiply_adds == 3 * one.multiply_adds
    assert three.parameters == one.parameters
    assert [t.columns for t in three.tensors] == [t.columns for t in one.tensors]


def test_recording_leaves_the_model_unchanged():
    model = build_model(VISION).eval()
    inputs = real_inputs(VISION)
    before = model(*inputs.values())
    record(model, inputs)
    assert torch.equal(model(*inputs.values()), before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_tied_weights_are_counted_once():
    seen = shapes(LANGUAGE)
    assert seen["tok_embed.weight"].parameters == LANGUAGE.vocab_size * LANGUAGE.width
    assert seen["lm_head.weight"].parameters == 0
    assert seen["lm_head.weight"].operation == "tied to tok_embed.weight"
    assert "lm_head.weight (tied to tok_embed.weight)" in as_text(seen.table(width=80))
    assert shapes(replace(LANGUAGE, tie_weights=False))["lm_head.weight"].parameters > 0


@small
def test_json_round_trip(config):
    seen = shapes_of_real_inputs(config)
    data = json.loads(json.dumps(seen.to_dict(), allow_nan=False))
    assert [tuple(t["rows"]) for t in data["tensors"]] == [t.rows for t in seen.tensors]
    assert data["parameters"] == seen.parameters
    assert data["config"]["kind"] == type(config).__name__


def test_equal_blocks_are_folded_by_default():
    deep = shapes(replace(VISION, depth=5))
    folded, full = as_text(deep.table()), as_text(deep.table(every_block=True))
    assert "blocks.1-4: same as above" in folded
    assert "blocks.3" not in folded
    assert "blocks.3" in full
    one_block = sum(t.parameters for t in deep.tensors if t.name.startswith("blocks.2."))
    assert any(line.startswith("blocks.1-4") and count(4 * one_block) in line for line in folded.splitlines())


def test_unequal_blocks_are_not_folded():
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(2, 3))), nn.Sequential(nn.Sequential(nn.Linear(3, 2))))
    tensors = record(model, {"x": torch.randn(1, 4, 2)})
    seen = Shapes(config=VISION, batch=1, tensors=tuple(tensors), parameters=0, multiply_adds=0)
    assert "same as above" not in str(seen)


@pytest.mark.parametrize("name", ["transformer_base", "vit_base", "gpt2_small"])
def test_the_table_fits_the_terminal_with_one_line_per_tensor(name):
    seen = shapes(replace(PRESETS[name](), depth=1))
    for width in (80, 120):
        lines = as_text(seen.table(width=width), width).splitlines()
        assert max(map(len, lines)) <= width
        shown = [line for line in lines if "[" in line and "tokens" not in line]
        assert len(shown) == len(seen.tensors)


def test_the_table_shows_one_convention():
    seen = shapes(AttentionConfig(width=12, num_heads=3), length=5)
    rows, columns = as_text(seen.table("rows")), as_text(seen.table("columns"))
    assert "[1,5,12]" in rows
    assert "[12,5]" not in rows
    assert "[12,5]" in columns
    assert "[1,5,12]" not in columns


def test_counts_have_at_most_9_characters():
    assert count(0) == ""
    assert count(9_999_999) == "9,999,999"
    assert all(len(count(10**n)) <= 9 for n in range(25))


def test_clearhead_shapes_is_the_function_even_after_importing_its_module():
    import_module("clearhead.models.shapes")
    assert clearhead.shapes is shapes
    assert clearhead.shapes("reverse").tensors == shapes(PRESETS["reverse"]()).tensors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: shapes("vit_tny"), "did you mean vit_tiny"),
        (lambda: shapes(VISION, batch=0), "batch must be a positive integer, got 0"),
        (lambda: shapes(VISION, length=4), "follows from image_size and patch_size, got length=4"),
        (lambda: shapes(LANGUAGE, source_length=4), "source_length .* encoder-decoders only, got a Language"),
        (lambda: shapes(LANGUAGE, length=0), "length must be a positive integer"),
        (lambda: shapes(LANGUAGE, length=7), "position table of 6 rows, got length 7"),
        (lambda: shapes(AttentionConfig(width=10**12)), "below 2\\^61"),
        (lambda: shapes(AttentionConfig(width=10**30)), "width must be at most 2\\^63 - 1"),
        (
            lambda: shapes(VISION)["head.wieght"],
            "unknown tensor 'head.wieght'; did you mean head.weight\\? Choose from images",
        ),
        (
            lambda: AttentionConfig(width=8, num_heads=2, key_width=4),
            "needs a single head, got num_heads=2; try num_heads=1",
        ),
        (lambda: AttentionConfig(width=8, value_width=0), "value_width must be a positive integer"),
    ],
)
def test_invalid_arguments_raise(make, message):
    with pytest.raises((ValueError, LookupError), match=message):
        make()


def test_an_unknown_config_type_is_a_type_error():
    with pytest.raises(TypeError, match="a config or the name of a preset"):
        shapes(3)
