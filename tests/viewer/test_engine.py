"""The viewer's forward pass in JavaScript equals PyTorch's, for every form of the vision transformer and every edit.

PyTorch computes in float64 here, with the same float32 weights: its own rounding in float32 depends on the processor.
Letters for shapes: B batch, C channels, H heads, Q queries, K keys, P patches.
"""

import copy
import itertools
import math
import random
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch
from torch import nn

import clearhead
from clearhead import insight
from clearhead.models.config import VisionConfig
from clearhead.models.vit import VisionTransformer
from clearhead.nn.attention import MultiHeadAttention, attend_fused, attend_reference

LOGITS, MAPS, ATTRIBUTIONS = 1e-4, 1e-5, 1e-4
"""largest differences from PyTorch"""
GRAY = 102
"""pixel value of hidden patches"""
FORMS = list(
    itertools.product(
        ("patch", "conv", "conv-stem"),
        ("learned", "sinusoidal", "rotary", "none"),
        ("cls", "mean", "attention"),
        ("pre", "post", "none"),
    )
)
OPTIONS = {
    "norm_layer": ("layernorm", "rmsnorm"),
    "activation": ("gelu", "relu", "swiglu"),
    "bias": (True, False),
    "num_kv_heads": (None, 2, 1),
    "qk_norm": (False, True),
    "layer_scale": (None, 0.5),
    "num_register_tokens": (0, 2),
    "head_mlp_dim": (0, 9),
    "embed_norm": (False, True),
    "output_projection": (True, False),
    "beta": (None, -0.8),
    "mlp_dim": (None, 18),
    "norm_eps": (1e-5, 1e-2),
    "in_channels": (1, 3),
}


def chosen_options(index):
    """A random choice of all options, different for each form."""
    choice = random.Random(index)
    return {name: choice.choice(values) for name, values in OPTIONS.items()}


def small_config(form, **options):
    patch_embed, pos_embed, pooling, norm = form
    return VisionConfig(
        **{"image_size": (8, 12), "patch_size": 4, "num_classes": 5, "width": 16, "depth": 2, "num_heads": 4}
        | {"patch_embed": patch_embed, "pos_embed": pos_embed, "pooling": pooling, "norm": norm}
        | options
    )


def random_model(config, seed=0):
    """A model in which every parameter matters."""
    torch.manual_seed(seed)
    model = VisionTransformer.from_config(config).eval()
    for name, value in model.named_parameters():
        if value.dim() < 2 or "tokens" in name or "table" in name:
            is_scale = name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "gamma"))
            nn.init.normal_(value, mean=1.0 if is_scale else 0.0, std=0.3)
        elif config.norm == "none":
            value.data *= 0.6  # without norms, differences grow with the activations
    return model


def exact(model):
    """The same weights, computing in float64."""
    return copy.deepcopy(model).double()


def random_pixels(config, seed=0, batch=1):
    shape = (batch, config.in_channels, *config.image_shape)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def normalize(pixels):
    """As `describe` in conftest.py says; the background becomes 0."""
    return (pixels.double() / 255 - 0.4) / 0.3


@contextmanager
def edited(model, edits):
    """The edits of the viewer, in PyTorch; `clearhead.edit` changes the heads."""
    beta, hidden = edits.get("beta"), edits.get("maskedPatches", [])

    def attend(q, k, v, mask=None, own_beta=None, **options):
        num_keys = k.shape[-2]
        visible = torch.ones(num_keys, dtype=torch.bool)
        if hidden:
            visible[torch.tensor(hidden) + num_keys - model.config.grid[0] * model.config.grid[1]] = False
        return attend_fused(q, k, v, visible, own_beta if beta is None else beta, **options)

    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        for module in model.modules():
            if isinstance(module, MultiHeadAttention) and (hidden or beta is not None):
                patch.setattr(module, "attend", attend)
        for head in edits.get("heads", []):
            stack.enter_context(clearhead.edit(model, head["layer"], head=head["head"], pattern=head["pattern"]))
        yield


def hide(pixels, config, patches):
    pixels, size, columns = pixels.clone(), config.patch_size, config.grid[1]
    for patch in patches:
        top, left = patch // columns * size, patch % columns * size
        pixels[..., top : top + size, left : left + size] = GRAY
    return pixels


def reference(model, pixels, edits):
    """Logits, and the weights that `look` finds, of one image."""
    pixels, model = hide(pixels, model.config, edits.get("hiddenPatches", [])), exact(model)
    with torch.no_grad(), edited(model, edits | {"heads": []}):
        trace = insight.look(model, normalize(pixels))
    with torch.no_grad(), edited(model, edits):
        return model(normalize(pixels))[0].numpy(), {name: trace[name].weights()[0].numpy() for name in trace}


def check_pass(result, logits, weights, edits=None):
    """`look` does not show edited heads and what follows from them: only earlier layers are compared."""
    assert np.abs(result["logits"] - logits).max() < LOGITS
    assert [layer["name"] for layer in result["layers"]] == list(weights)
    heads = (edits or {}).get("heads", [])
    first = min((list(weights).index(head["layer"]) for head in heads), default=len(weights))
    for layer in result["layers"][:first]:
        found = layer["weights"].reshape(layer["heads"], layer["queries"], layer["keys"])
        assert found.shape == weights[layer["name"]].shape
        assert np.abs(found - weights[layer["name"]]).max() < MAPS


def check_form(engine, config, edits):
    model, pixels = random_model(config), random_pixels(config)
    results = engine.ask_model(model, pixels, [{"kind": "run"}, {"kind": "run", "edits": edits}])
    check_pass(results[0], *reference(model, pixels, {}))
    check_pass(results[1], *reference(model, pixels, edits), edits)
    assert np.abs(results[0]["logits"] - results[1]["logits"]).max() > 10 * LOGITS, "the edits must change something"


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_the_pass_equals_pytorch_for_every_form(engine, form):
    edits = {
        "heads": [{"layer": "blocks.1.attn", "head": 1, "pattern": "uniform"}],
        "hiddenPatches": [0, 4],
        "maskedPatches": [2],
        "beta": 0.9,
    }
    check_form(engine, small_config(form), edits)


@pytest.mark.parametrize("index", range(len(FORMS)), ids=lambda index: "-".join(FORMS[index]))
def test_the_pass_equals_pytorch_for_all_options(engine, index):
    edits = {
        "heads": [
            {"layer": f"blocks.{index % 2}.attn", "head": index % 4, "pattern": ("zero", "uniform")[index // 2 % 2]}
        ],
        "hiddenPatches": [index % 6],
        "maskedPatches": [(index + 1) % 6, 5] if index % 3 else [],
        "beta": (None, -0.5, 0.0, 2.0)[index // 3 % 4],
    }
    check_form(engine, small_config(FORMS[index], **chosen_options(index)), edits)


def test_every_pair_of_options_is_tested():
    choices = [chosen_options(index) for index in range(len(FORMS))]
    for first, second in itertools.combinations(OPTIONS, 2):
        pairs = {(choice[first], choice[second]) for choice in choices}
        assert pairs == set(itertools.product(OPTIONS[first], OPTIONS[second]))


@pytest.mark.parametrize("beta", [math.inf, -math.inf, 1e30, 0.0])
@pytest.mark.parametrize("pooling", ["cls", "attention"])
def test_an_extreme_beta_equals_softargmax(engine, pooling, beta):
    config = small_config(("patch", "learned", pooling, "pre"))
    model, pixels = random_model(config), random_pixels(config)
    (result,) = engine.ask_model(model, pixels, [{"kind": "run", "edits": {"beta": beta}}])
    check_pass(result, *reference(model, pixels, {"beta": beta}))


@pytest.mark.parametrize("pooling", ["cls", "mean", "attention"])
def test_a_query_that_sees_no_key_gets_zeros(engine, pooling):
    config = small_config(("patch", "learned", pooling, "pre"))
    model, pixels = random_model(config), random_pixels(config)
    edits = {"maskedPatches": list(range(6))}
    (result,) = engine.ask_model(model, pixels, [{"kind": "run", "edits": edits}])
    check_pass(result, *reference(model, pixels, edits))
    assert (result["layers"][-1]["weights"] == 0).any()


@pytest.mark.parametrize("pattern", ["zero", "uniform"])
def test_edited_heads_are_shown_as_edited(engine, pattern):
    config = small_config(("patch", "learned", "attention", "pre"))
    model, pixels = random_model(config), random_pixels(config)
    heads = [{"layer": name, "head": 1, "pattern": pattern} for name in ("blocks.0.attn", "pool.attn")]
    (result,) = engine.ask_model(model, pixels, [{"kind": "run", "edits": {"heads": heads, "maskedPatches": [3]}}])
    for layer in (result["layers"][0], result["layers"][-1]):
        weights = layer["weights"].reshape(layer["heads"], layer["queries"], layer["keys"])
        expected = np.full(layer["keys"], 0.2 if pattern == "uniform" else 0.0)
        expected[3] = 0
        assert np.allclose(weights[1], expected)
        assert not np.allclose(weights[0], expected)


@pytest.mark.parametrize("layer", ["blocks.1.attn", "pool.attn"])
def test_the_steps_of_a_head_are_the_arithmetic_of_attention(engine, layer):
    config = small_config(("patch", "rotary", "attention", "pre"), num_kv_heads=2, qk_norm=True)
    model, pixels = random_model(config), random_pixels(config)
    edits = {"maskedPatches": [1], "beta": 0.7}
    jobs = [{"kind": "headSteps", "layer": layer, "head": 3, "edits": edits}, {"kind": "run", "edits": edits}]
    steps, result = engine.ask_model(model, pixels, jobs)
    assert (steps["layer"], steps["head"], steps["beta"]) == (layer, 3, 0.7)
    q, k, v, scores, weights, out, projected = (
        torch.tensor(steps[name]["data"]).reshape(steps[name]["shape"])
        for name in ("q", "k", "v", "scores", "weights", "out", "projected")
    )
    mask = torch.tensor(steps["mask"]).reshape(scores.shape).bool()
    assert not mask[:, 1].any()
    assert mask.sum() == 5 * len(q)
    assert torch.allclose(scores, q @ k.T, atol=1e-5)
    assert torch.allclose(weights, clearhead.softargmax(scores, 0.7, where=mask), atol=1e-6)
    assert torch.allclose(out, weights @ v, atol=1e-6)
    weight = model.get_submodule(layer).out_proj.weight[:, 12:16]
    assert torch.allclose(projected, out @ weight.T, atol=1e-5)
    (shown,) = (found for found in result["layers"] if found["name"] == layer)
    assert np.array_equal(shown["weights"].reshape(4, *weights.shape)[3], weights.numpy())
    model = exact(model)
    with torch.no_grad(), edited(model, edits):
        record = insight.look(model, normalize(pixels))[layer]
    assert torch.allclose(record.v[0, 3].float(), v, atol=1e-5)


# Attribution


def attributions(model, pixels, target, edits):
    """The maps of clearhead.insight, by method: (P,)"""
    config, model = model.config, exact(model)
    pixels = hide(pixels, config, edits.get("hiddenPatches", []))
    with edited(model, edits):
        trace = insight.look(model, normalize(pixels))
        weights = [record.weights() for record in trace.values()]
        pools = config.pooling == "attention"
        matrices = {"mean": insight.mean_attention(weights[-1:] if pools else weights)}
        if not (pools and config.num_register_tokens):
            matrices["rollout"] = insight.rollout(weights)
            matrices["relevance"] = insight.relevance(trace, trace.output[:, target])
        maps = {
            name: insight.output_map(
                matrix.detach(),
                class_token=config.pooling == "cls",
                num_register_tokens=0 if name == "mean" and pools else config.num_register_tokens,
            )
            for name, matrix in matrices.items()
        }
        maps["occlusion"] = insight.occlusion(model, normalize(pixels), config.grid, target).flatten(1)
    return {name: cells[0].numpy() for name, cells in maps.items()}


@pytest.mark.parametrize("index", range(len(FORMS)), ids=lambda index: "-".join(FORMS[index]))
def test_attributions_equal_those_of_insight(engine, index):
    config = small_config(FORMS[index], **chosen_options(index))
    model, pixels, target = random_model(config), random_pixels(config), index % 5
    edits = [{}, {"maskedPatches": [1], "beta": 0.6}, {"hiddenPatches": [2]}][index % 3]
    expected = attributions(model, pixels, target, edits)
    jobs = [{"kind": "attribute", "method": method, "target": target, "edits": edits} for method in expected]
    for method, result in zip(expected, engine.ask_model(model, pixels, jobs), strict=True):
        assert result["method"] == method
        assert np.abs(result["patches"] - expected[method]).max() < ATTRIBUTIONS * max(
            1, np.abs(expected[method]).max()
        )


def test_rollout_and_relevance_leave_out_register_tokens_before_pooling(engine):
    """The pooling query sees patches only: rows of the register tokens are dropped, as the model drops them."""
    config = small_config(("patch", "learned", "attention", "pre"), num_register_tokens=2)
    model, pixels = random_model(config), random_pixels(config)
    trace = insight.look(exact(model), normalize(pixels))
    weights = [record.weights().detach() for record in trace.values()]
    expected = (weights[-1].mean(1) @ insight.rollout(weights[:-1])[:, 2:])[0, 0, 2:].numpy()
    (result,) = engine.ask_model(model, pixels, [{"kind": "attribute", "method": "rollout", "target": 0}])
    assert np.abs(result["patches"] - expected).max() < ATTRIBUTIONS


@pytest.mark.parametrize("value", [0.0, 1 / 6], ids=["zero", "uniform"])
def test_relevance_of_a_pass_with_an_edited_head(engine, value):
    """No gradient reaches the queries and keys of an edited head, and a removed head contributes nothing."""
    config = small_config(("patch", "learned", "attention", "pre"))
    model, pixels, target = random_model(config), random_pixels(config), 2
    edits = {"heads": [{"layer": "blocks.1.attn", "head": 1, "pattern": "uniform" if value else "zero"}]}
    job = {"kind": "attribute", "method": "relevance", "target": target, "edits": edits}
    (result,) = engine.ask_model(model, pixels, [job])
    calls, model = [], exact(model)

    def attend(q, k, v, mask=None, beta=None, **options):
        weights = attend_reference(q, k, v, mask, beta)[1]
        if len(calls) == 1:
            weights = weights.index_fill(1, torch.tensor([1]), 0.0)
            weights[:, 1] += value
        calls.append((weights.detach(), v, weights @ v))
        return calls[-1][2]

    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            module.attend = attend
    score = model(normalize(pixels))[0, target]
    expected = torch.eye(6, dtype=torch.float64)
    for (weights, v, _), gradient in zip(calls, torch.autograd.grad(score, [out for *_, out in calls]), strict=True):
        contribution = (weights * (gradient @ v.mT)).clamp(min=0).mean(1)[0]
        expected = contribution @ expected if len(contribution) == 1 else expected + contribution @ expected
    assert np.abs(result["patches"] - expected[0].detach().numpy()).max() < ATTRIBUTIONS


def test_head_effects_are_changes_of_the_probability(engine):
    config = small_config(("conv", "learned", "attention", "pre"))
    model, pixels = random_model(config), random_pixels(config)
    edits = {"hiddenPatches": [3], "heads": [{"layer": "blocks.0.attn", "head": 0, "pattern": "uniform"}]}
    images = normalize(hide(pixels, config, [3]))
    (result,) = engine.ask_model(model, pixels, [{"kind": "headEffects", "target": 4, "edits": edits}])
    model = exact(model)
    with torch.no_grad(), edited(model, edits):
        before = model(images).softmax(-1)[0, 4]
    expected = []
    for layer, head in itertools.product(("blocks.0.attn", "blocks.1.attn", "pool.attn"), range(4)):
        others = [edit for edit in edits["heads"] if (edit["layer"], edit["head"]) != (layer, head)]
        with torch.no_grad(), edited(model, {"heads": [*others, {"layer": layer, "head": head, "pattern": "zero"}]}):
            expected.append(model(images).softmax(-1)[0, 4] - before)
    assert np.abs(result - torch.stack(expected).numpy()).max() < LOGITS
    assert np.abs(result).max() > 100 * LOGITS


@pytest.mark.parametrize("pooling", ["cls", "mean", "attention"])
def test_head_statistics_equal_those_of_insight(engine, pooling):
    config = small_config(("patch", "learned", pooling, "pre"))
    model, pixels = random_model(config), random_pixels(config)
    (results,) = engine.ask_model(model, pixels, [{"kind": "statistics"}])
    with torch.no_grad():
        trace = insight.look(exact(model), normalize(pixels))
    for record, numbers in zip(trace.values(), results, strict=True):
        weights = record.weights()
        assert np.allclose(numbers["entropy"], insight.entropy(weights), atol=1e-5)
        assert np.allclose(numbers["diagonality"], insight.diagonality(weights), atol=1e-5)
        if record.num_queries == record.num_keys:
            expected = insight.distance(weights, config.grid, class_token=pooling == "cls")
            assert np.allclose(numbers["distance"], expected, atol=1e-5)
        else:
            assert np.isnan(numbers["distance"]).all()


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"heads": [{"layer": "blocks.7.attn", "head": 0, "pattern": "zero"}]}, "blocks.7.attn.*pool.attn"),
        ({"heads": [{"layer": "pool.attn", "head": 4, "pattern": "zero"}]}, "0 to 3.*4"),
        ({"heads": [{"layer": "pool.attn", "head": 0, "pattern": "one"}]}, "one"),
        ({"hiddenPatches": [6]}, "0 to 5.*6"),
        ({"maskedPatches": [-1]}, "0 to 5.*-1"),
    ],
)
def test_an_edit_that_does_not_fit_the_model_is_an_error(engine, edits, message):
    config = small_config(("patch", "learned", "attention", "pre"))
    with pytest.raises(RuntimeError, match=message):
        engine.ask_model(random_model(config), random_pixels(config), [{"kind": "run", "edits": edits}])


def test_weights_that_do_not_fit_the_config_are_an_error(engine):
    config = small_config(("patch", "learned", "attention", "pre"))
    model = random_model(config)
    model.head = nn.Linear(16, 7)
    with pytest.raises(RuntimeError, match=r"head\.weight.*5, 16.*7, 16"):
        engine.ask_model(model, random_pixels(config), [{"kind": "run"}])
    del model.blocks[1]
    with pytest.raises(RuntimeError, match=r"blocks\.1"):
        engine.ask_model(model, random_pixels(config), [{"kind": "run"}])
