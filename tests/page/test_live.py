"""Live models: the numbers of torch, edits that equal those of `clearhead.edit`, and models of several libraries."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clearhead
from clearhead.insight.attribution import occlusion, relevance, rollout
from clearhead.insight.calls import SDPACall
from clearhead.page.describe import find_classes, find_input, find_patch_size
from clearhead.page.live import Edits, LiveModel, weights_at_beta
from clearhead.viewer import InputSpec

SPEC = InputSpec(
    channels=3, height=16, width=16, mean=(0.4,) * 3, std=(0.2,) * 3, background=(102,) * 3, draw=False, patch_size=4
)
CONFIGS = {
    "cls": {"pooling": "cls"},
    "mean": {"pooling": "mean", "norm": "post"},
    "attention": {"pooling": "attention", "pos_embed": "rotary"},
    "registers": {"pooling": "cls", "num_register_tokens": 2},
    "grouped": {"pooling": "cls", "num_kv_heads": 1},
}


def vision(**changes):
    torch.manual_seed(1)
    options = {"image_size": 16, "patch_size": 4, "num_classes": 5, "width": 16, "depth": 2, "num_heads": 2}
    model = clearhead.VisionTransformer(**options | changes).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))  # sharper attention than that of initial weights
    return model


@pytest.fixture(params=CONFIGS)
def live(request):
    return LiveModel(vision(**CONFIGS[request.param]), SPEC)


@pytest.fixture
def image():
    return np.random.default_rng(0).integers(0, 256, (1, 3, 16, 16), dtype=np.uint8)


def finish(steps):
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def torch_input(image):
    return (torch.from_numpy(image).float() / 255 - 0.4) / 0.2


def logits_with(live, image, **edits):
    return torch.from_numpy(finish(live.run(image, Edits(**edits)))["logits"])


def test_the_layout_of_the_tokens(live):
    config = live.model.config
    assert live.grid == (4, 4)
    assert live.num_prefix_tokens == (config.pooling == "cls") + config.num_register_tokens
    assert live.spec.patch_size == 4


def test_a_pass_without_edits_is_an_ordinary_one(live, image):
    with torch.no_grad():
        expected = clearhead.look(live.model, live.normalize(torch.from_numpy(image)))
    answer = finish(live.run(image, Edits()))
    assert np.array_equal(answer["logits"], expected.output[0].numpy())
    assert json.loads(answer["layers"]) == list(expected)
    for i, record in enumerate(expected.values()):
        assert np.array_equal(answer[f"layers.{i}"], record.weights()[0].numpy())
    assert np.allclose(answer["logits"], live.model(torch_input(image))[0].detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("pattern", ["zero", "uniform"])
def test_an_edited_head_equals_edit(live, image, pattern):
    x = live.normalize(torch.from_numpy(image))
    for layer in live.layers:
        with torch.no_grad(), clearhead.edit(live.model, layer.name, head=1, pattern=pattern):
            expected = live.model(x)[0]
        edited = logits_with(live, image, heads=((layer.name, 1, pattern),))
        assert torch.allclose(edited, expected, atol=1e-5)
        assert not torch.allclose(edited, logits_with(live, image), atol=1e-3)


def test_of_two_edits_of_a_head_the_last_one_counts(live, image):
    name = live.layers[0].name
    both = logits_with(live, image, heads=((name, 0, "uniform"), (name, 0, "zero")))
    assert torch.equal(both, logits_with(live, image, heads=((name, 0, "zero"),)))


def test_a_hidden_patch_is_replaced_by_the_background(live, image):
    changed = image.copy()
    changed[:, :, 4:8, 8:12] = 102
    assert torch.equal(logits_with(live, image, hidden_patches=(6,)), logits_with(live, changed))


def test_beta_equals_a_model_with_that_beta(image):
    for beta in (0.0, 0.7, math.inf, -math.inf):
        plain, other = vision(), vision(beta=beta)
        edited = logits_with(LiveModel(plain, SPEC), image, beta=beta)
        assert torch.allclose(edited, logits_with(LiveModel(other, SPEC), image), atol=1e-5), beta


def test_a_masked_patch_gets_no_weight_and_rows_still_sum_to_one(live, image):
    answer = finish(live.run(image, Edits(masked_patches=(0, 5))))
    for i, layer in enumerate(live.layers):
        weights = answer[f"layers.{i}"]
        first = layer.keys - 16
        assert np.all(weights[..., [first, first + 5]] == 0)
        assert np.allclose(weights.sum(-1), 1, atol=1e-5)
    uniform = finish(live.run(image, Edits(masked_patches=(0, 5), heads=((live.layers[0].name, 0, "uniform"),))))
    visible = live.layers[0].keys - 2
    assert np.allclose(np.unique(uniform["layers.0"][0].round(6)), [0, round(1 / visible, 6)])


def test_masked_keys_equal_a_mask_of_the_model():
    """The same numbers as a model that was given the mask."""
    torch.manual_seed(0)
    tokens = torch.randn(1, 4, 8)
    layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()

    class Masked(nn.Module):
        mask = None

        def __init__(self):
            super().__init__()
            self.attn, self.head = layer, nn.Linear(8, 3)

        def forward(self, images):
            x = tokens + images.mean()
            return self.head(self.attn(x, x, x, key_padding_mask=self.mask)[0].mean(1))

    spec = InputSpec(channels=1, height=2, width=2, mean=(0,), std=(1,), background=(0,), draw=False, patch_size=1)
    model = Masked()
    pixels = np.array([[[[0, 50], [100, 150]]]], dtype=np.uint8)
    edited = logits_with(LiveModel(model, spec), pixels, masked_patches=(2,))
    model.mask = torch.tensor([[False, False, True, False]])
    with torch.no_grad():
        assert torch.allclose(edited, model(torch.from_numpy(pixels) / 255)[0], atol=1e-6)


def test_head_effects(live, image):
    effects = finish(live.head_effects(image, Edits(), 2))["effects"]
    assert len(effects) == sum(layer.heads for layer in live.layers)
    before = logits_with(live, image).softmax(-1)[2]
    name = live.layers[1].name
    after = logits_with(live, image, heads=((name, 1, "zero"),)).softmax(-1)[2]
    assert effects[live.layers[0].heads + 1] == pytest.approx((after - before).item(), abs=1e-6)
    long_call = live.head_effects(image, Edits(), 2)
    assert sum(1 for _ in long_call) == 1 + len(effects)  # others may come between two passes


def test_attributions_equal_those_of_insight(live, image):
    x = live.normalize(torch.from_numpy(image))
    trace = clearhead.look(live.model, x)
    is_cls = live.model.config.pooling == "cls"

    def patches(matrix):
        return (matrix[0, 0] if is_cls else matrix[0].mean(0))[-16:].detach().numpy()

    def attributed(method, edits=Edits()):  # noqa: B008
        return finish(live.attribute(image, edits, method, 1))["patches"]

    assert np.allclose(attributed("rollout"), patches(rollout(trace)), atol=1e-6)
    assert np.allclose(attributed("relevance"), patches(relevance(trace, trace.output[:, 1])), atol=1e-5)
    pooled = live.model.config.pooling == "attention"
    layers = [record.weights().detach().mean(1) for record in trace.values()]
    expected = layers[-1] if pooled else torch.stack(layers).mean(0)
    assert np.allclose(attributed("mean"), patches(expected), atol=1e-6)
    hidden = occlusion(live.model, x, (4, 4), 1, fill="gray")[0].flatten().numpy()
    assert np.allclose(attributed("occlusion"), hidden, atol=1e-5)
    edits = Edits(heads=((live.layers[0].name, 0, "zero"), (live.layers[0].name, 1, "zero")), beta=0.5)
    for method in ("mean", "rollout", "relevance", "occlusion"):
        assert np.isfinite(attributed(method, edits)).all()


def test_occlusion_with_edits_hides_one_patch_at_a_time(live, image):
    edits = Edits(heads=((live.layers[0].name, 1, "uniform"),), hidden_patches=(3,))
    drops = finish(live.attribute(image, edits, "occlusion", 0))["patches"]

    def probability(*hidden):
        return logits_with(live, image, heads=edits.heads, hidden_patches=hidden).softmax(-1)[0]

    for patch in (0, 7, 15):
        assert drops[patch] == pytest.approx((probability(3) - probability(3, patch)).item(), abs=1e-6)
    assert drops[3] == pytest.approx(0, abs=1e-6)


def test_the_steps_of_a_head_follow_from_each_other(live, image):
    for beta in (None, 0.3):
        for layer in live.layers:
            steps = finish(live.head_steps(image, Edits(beta=beta), layer.name, 1))
            scale = float(steps.pop("beta"))
            assert scale == pytest.approx(beta or 1 / math.sqrt(8))
            q, k, v = (torch.from_numpy(steps[name]) for name in "qkv")
            scores = q @ k.T
            assert np.allclose(steps["scores"], scores, atol=1e-4)
            weights = (scale * scores).softmax(-1)
            assert np.allclose(steps["weights"], weights, atol=1e-5)
            assert np.allclose(steps["out"], weights @ v, atol=1e-5)
            projection = live.model.get_submodule(layer.name).out_proj.weight[:, 8:].detach()
            assert np.allclose(steps["projected"], weights @ v @ projection.T, atol=1e-5)


def test_a_model_with_its_own_softmax(image):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.qkv = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 24)
            self.head = nn.Linear(8, 5)
            self.beta = 8**-0.5

        def forward(self, images):
            q, k, v = self.qkv(self.embed(images).flatten(2).mT).chunk(3, -1)
            return self.head(((self.beta * q @ k.mT).softmax(-1) @ v).mean(1))

    live = LiveModel(Plain(), SPEC)
    edited = logits_with(live, image, beta=2.0)
    live.model.beta = 2.0
    assert torch.allclose(edited, logits_with(live, image), atol=1e-5)


def test_metadata_are_strings_that_the_viewer_can_read(live, image):
    no_edits = {"heads": [], "hiddenPatches": [], "maskedPatches": [], "beta": "-Infinity"}
    call = {"call": "head_steps", "layer": live.layers[0].name, "head": 0, "edits": no_edits}
    _, metadata = finish(live.answer(call, image.tobytes()))
    assert metadata == {"beta": "-Infinity"}
    _, metadata = finish(live.answer({"call": "run", "edits": no_edits}, image.tobytes()))
    assert json.loads(metadata["layers"]) == [layer.name for layer in live.layers]


def test_large_maps_are_sent_in_half_precision(live, image, monkeypatch):
    monkeypatch.setattr("clearhead.page.live.HALF_PRECISION_BYTES", 100)
    answer = finish(live.run(image, Edits()))
    assert answer["layers.0"].dtype == np.float16
    assert answer["logits"].dtype == np.float32


def test_other_precisions_and_other_outputs(image):
    class Wrapped(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.inner, self.wrap = vision().to(torch.bfloat16), wrap

        def forward(self, images):
            return self.wrap(self.inner(images))

    expected = logits_with(LiveModel(vision().to(torch.bfloat16), SPEC), image)
    for wrap in (
        lambda logits: {"logits": logits},
        lambda logits: (logits, None),
        lambda logits: type("Output", (), {"logits": logits}),
    ):
        assert torch.equal(logits_with(LiveModel(Wrapped(wrap), SPEC), image), expected)
    with pytest.raises(ValueError, match="classifiers"):
        LiveModel(Wrapped(lambda logits: logits[:, None]), SPEC)


# Finding out what a module takes


def test_the_input_of_our_own_model():
    spec = find_input(vision(in_channels=1, image_size=(8, 12)), None)
    assert (spec.channels, spec.height, spec.width, spec.patch_size) == (1, 8, 12, 4)
    assert spec.draw
    assert (spec.mean, spec.std, spec.background) == ((0.0,), (1.0,), (0,))


@pytest.mark.parametrize(
    "attributes",
    [
        {"img_size": 32},
        {"image_size": (32, 32)},
        {"config": type("C", (), {"image_size": [32, 32], "num_channels": 3})},
        {"pretrained_cfg": {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.25,) * 3}},
        {"default_cfg": {"input_size": (3, 32, 32), "mean": (0.5,), "std": (0.25,)}},
    ],
    ids=lambda attributes: next(iter(attributes)),
)
def test_the_input_of_other_models(attributes):
    module = nn.Sequential(nn.Conv2d(3, 8, 4))
    for name, value in attributes.items():
        setattr(module, name, value)
    spec = find_input(module, None)
    assert (spec.channels, spec.height, spec.width) == (3, 32, 32)
    assert spec.mean[0] == (0.5 if "pretrained_cfg" in attributes else 0.0)
    assert find_input(module, (1, 8, 9)).width == 9


def test_an_unknown_input_names_the_option():
    with pytest.raises(ValueError, match="--image"):
        find_input(nn.Linear(3, 3), None)


def test_patch_size_and_classes():
    module = nn.Linear(3, 3)
    assert find_patch_size(module) is None
    assert find_classes(module) == ()
    module.patch_size, module.classes = (16, 16), ["a", "b"]
    assert find_patch_size(module) == 16
    assert find_classes(module) == ("a", "b")
    module.config = type("C", (), {"id2label": {0: "cat", 1: "dog"}})
    assert find_classes(module) == ("cat", "dog")


def test_another_beta_keeps_the_bias_of_the_logits():
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    bias = 3 * torch.randn(1, 2, 4, 4)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    call = SDPACall(q, k, v, bias, 0.0, False, 8**-0.5, out)
    own = call.weights([0, 1], slice(None))
    torch.testing.assert_close(weights_at_beta(call, [0, 1], 8**-0.5), own)
    sharper = (2 * (q @ k.mT * 8**-0.5 + bias)).softmax(-1)
    torch.testing.assert_close(weights_at_beta(call, [0, 1], 2 * 8**-0.5), sharper)
