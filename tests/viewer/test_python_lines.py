"""The Python lines that the viewer offers run, and reproduce what the viewer's own engine computes."""

import json
import math
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import clearhead
from clearhead.models.config import VisionConfig
from clearhead.models.vit import VisionTransformer

from .conftest import HERE, NO_EDITS, NODE, describe

EDITS = {
    "none": {},
    "hidden": {"hiddenPatches": [1, 4]},
    "masked": {"maskedPatches": [2]},
    "heads": {
        "heads": [
            {"layer": "blocks.0.attn", "head": 1, "pattern": "zero"},
            {"layer": "blocks.0.attn", "head": 0, "pattern": "uniform"},
            {"layer": "blocks.1.attn", "head": 1, "pattern": "uniform"},
        ]
    },
    "sharp": {"beta": 1.5},
    "zero beta": {"beta": 0},
    "infinite beta": {"beta": math.inf},
    "all": {
        "hiddenPatches": [0],
        "maskedPatches": [3, 5],
        "heads": [{"layer": "blocks.1.attn", "head": 0, "pattern": "zero"}],
        "beta": 0.2,
    },
}
POOLING = {"cls": 2, "attention": 0, "mean": 1}
"""pooling of the models, and their register tokens"""


@pytest.fixture(scope="module", params=POOLING)
def shown(request, engine):
    """A model, its description and what the panels of the viewer show."""
    config = VisionConfig(
        image_size=(8, 12),
        patch_size=4,
        num_classes=5,
        width=16,
        depth=2,
        num_heads=2,
        in_channels=3 if request.param == "mean" else 1,
        pooling=request.param,
        num_register_tokens=POOLING[request.param],
    )
    torch.manual_seed(0)
    model = VisionTransformer.from_config(config).eval()
    for block in model.blocks:
        block.attn.q_proj.weight.data *= 3  # weights that differ from uniform ones
    pixels = torch.randint(0, 256, (1, config.in_channels, 8, 12), dtype=torch.uint8)
    trace = clearhead.look(model, torch.randn(1, config.in_channels, 8, 12))
    layers = [
        {"name": name, "heads": record.num_heads, "queries": record.num_queries, "keys": record.num_keys}
        for name, record in trace.items()
    ]
    description = describe(config) | {"source": "given", "classes": list("01234"), "layers": layers}
    return SimpleNamespace(model=model, pixels=pixels, description=description, layers=layers, engine=engine)


def lines_of(shown, part, edits, **choice):
    """The code that a panel offers."""
    edits = NO_EDITS | edits
    edits["beta"] = "inf" if edits["beta"] == math.inf else edits["beta"]
    asked = {"layer": 0, "head": 0, "query": -1, "minus": None, "direction": "to", "target": 2} | choice
    beta = 1 / math.sqrt(8)
    asked |= {"description": shown.description, "layers": shown.layers, "edits": edits, "beta": beta}
    asked |= {"pixels": shown.pixels.flatten().tolist()}
    request = json.dumps([{"part": part, "shown": asked}])
    done = subprocess.run([NODE, HERE / "python_lines.mjs"], input=request, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (code,) = json.loads(done.stdout)
    return code


def run_lines(shown, part, edits, **choice):
    """What the lines print, with `given` as the model."""
    code = lines_of(shown, part, edits, **choice)
    printed = []
    exec(code, {"given": shown.model, "print": lambda *values: printed.append(values)})
    return printed


def engine_run(shown, edits):
    return shown.engine.ask_model(shown.model, shown.pixels, [{"kind": "run", "edits": edits}])[0]


@pytest.mark.parametrize("name", EDITS)
def test_probabilities_with_edits(shown, name):
    ((probabilities,),) = run_lines(shown, "bars", EDITS[name])
    logits = torch.tensor(engine_run(shown, EDITS[name])["logits"])
    torch.testing.assert_close(probabilities, logits.softmax(-1), atol=1e-4, rtol=0)


def test_the_edits_of_these_tests_matter(shown):
    logits = {name: engine_run(shown, edits)["logits"] for name, edits in EDITS.items()}
    for name in set(EDITS) - {"none"}:
        assert np.abs(logits[name] - logits["none"]).max() > 1e-3, name


@pytest.mark.parametrize("direction", ["to", "from"])
@pytest.mark.parametrize("query", [-1, 3])
@pytest.mark.parametrize("layer", [0, 1])
def test_the_map_of_a_query(shown, layer, query, direction):
    ((cells,),) = run_lines(shown, "input", {}, layer=layer, head=1, query=query, direction=direction)
    info = shown.layers[layer]
    weights = engine_run(shown, {})["layers"][layer]["weights"].reshape(info["heads"], info["queries"], info["keys"])[1]
    first = info["keys"] - 6
    if query == -1 and shown.description["config"]["pooling"] != "cls":
        expected = weights[first:, first:].mean(0)
    else:
        token = 0 if query == -1 else first + query
        expected = weights[token, first:] if direction == "to" else weights[first:, token]
    assert cells.shape == (2, 3)
    np.testing.assert_allclose(cells.numpy().ravel(), expected, atol=1e-5)


def test_the_difference_of_two_queries_over_all_heads(shown):
    ((cells,),) = run_lines(shown, "input", {}, head=-1, query=1, minus=4)
    info = shown.layers[0]
    weights = (
        engine_run(shown, {})["layers"][0]["weights"].reshape(info["heads"], info["queries"], info["keys"]).mean(0)
    )
    first = info["keys"] - 6
    np.testing.assert_allclose(cells.numpy().ravel(), (weights[first + 1] - weights[first + 4])[first:], atol=1e-5)


def test_attributions(shown):
    printed = dict(run_lines(shown, "aggregates", {}))
    jobs = [{"kind": "attribute", "method": method, "target": 2} for method in ("mean", "rollout", "relevance")]
    for job, result in zip(jobs, shown.engine.ask_model(shown.model, shown.pixels, jobs), strict=True):
        cells = printed[job["method"]].detach().numpy().ravel()
        np.testing.assert_allclose(cells, result["patches"], atol=1e-4, err_msg=job["method"])
    assert printed["occlusion"].shape == (2, 3)


def test_the_steps_of_a_head(shown):
    layer = len(shown.layers) - 1
    ((projected,),) = run_lines(shown, "head-panel", {}, layer=layer, head=1)
    job = {"kind": "headSteps", "layer": shown.layers[layer]["name"], "head": 1}
    steps = shown.engine.ask_model(shown.model, shown.pixels, [job])[0]
    np.testing.assert_allclose(projected.detach().numpy().ravel(), steps["projected"]["data"], atol=1e-4)


@pytest.mark.parametrize("name", ["heads", "hidden", "all"])
def test_causes(shown, name):
    edits = EDITS[name]
    (change,), (importance,) = run_lines(shown, "cause", edits)
    before, after = (torch.tensor(engine_run(shown, e)["logits"]).softmax(-1) for e in ({}, edits))
    torch.testing.assert_close(change, after - before, atol=1e-4, rtol=0)
    job = {"kind": "headEffects", "target": 2, "edits": edits}
    effects = shown.engine.ask_model(shown.model, shown.pixels, [job])[0]
    np.testing.assert_allclose(importance[~importance.isnan()].numpy(), effects, atol=1e-4)


def test_the_wall_and_the_input(shown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_lines(shown, "wall", {})
    assert (tmp_path / "wall.png").exists()
    ((pixels,),) = run_lines(shown, "pad", {"hiddenPatches": [0]})
    assert pixels.shape[-2:] == (8, 12)
    background = torch.tensor(shown.description["input"]["background"][:1], dtype=torch.uint8)
    assert (pixels[:4, :4] == background).all()
    assert torch.equal(pixels[:, 4:], shown.pixels[0, 0, :, 4:])


@pytest.mark.parametrize("part", ["wall", "input", "aggregates", "head-panel"])
def test_lines_name_the_edits_that_look_does_not_record(shown, part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "before the edit" not in lines_of(shown, part, EDITS["hidden"])
    code = lines_of(shown, part, EDITS["heads"])
    for edit in EDITS["heads"]["heads"]:
        assert f"# look records the weights before the edit of {edit['layer']}, head {edit['head']}\n" in code
    assert "before the edit of every layer" in lines_of(shown, part, EDITS["masked"])
    assert run_lines(shown, part, EDITS["all"])


def test_look_records_the_weights_before_an_edit(shown):
    """What the comments of the lines state."""
    name, info = shown.layers[0]["name"], shown.layers[0]
    edits = {"heads": [{"layer": name, "head": 1, "pattern": "uniform"}]}
    ((recorded,),) = run_lines(shown, "input", edits, head=1, query=3)
    ((unedited,),) = run_lines(shown, "input", {}, head=1, query=3)
    assert torch.equal(recorded, unedited)
    weights = engine_run(shown, edits)["layers"][0]["weights"].reshape(info["heads"], info["queries"], info["keys"])
    first = info["keys"] - 6
    assert np.abs(weights[1, first + 3, first:] - recorded.numpy().ravel()).max() > 1e-3


def test_lines_of_a_trace(shown):
    recorded = SimpleNamespace(**vars(shown))
    recorded.description = shown.description | {"kind": "trace", "source": "trace", "input": None}
    code = lines_of(recorded, "wall", {}, head=1)
    assert "model = " not in code
    trace = clearhead.look(shown.model, torch.randn(1, shown.pixels.shape[1], 8, 12))
    printed = []
    exec(code, {"trace": trace, "print": printed.append})
    assert torch.equal(printed[0], trace[shown.layers[0]["name"]].weights(head=1))
