"""The shipped checkpoint, exported files, examples of the test set, and recorded passes as HTML."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import load
from torch import nn

import clearhead
from clearhead.cli import main as cli
from clearhead.data.dataset import Normalize
from clearhead.data.image_datasets import load_images
from clearhead.page.describe import choose_examples, describe_run, export_html, pictures, run_examples, shipped
from clearhead.page.describe import shipped_model as load_shipped
from clearhead.page.models import MAX_BROWSER_WORK, Target, load_module, load_run, runs_in_browser
from clearhead.viewer import InputSpec


def contents(html):
    """The description and the tensors in an HTML document."""
    import base64

    description = re.search(r'id="clearhead-description">(.*?)</script>', html, re.DOTALL)[1]
    tensors = re.search(r'id="clearhead-tensors">(.*?)</script>', html, re.DOTALL)[1]
    return json.loads(description), load(base64.b64decode(tensors))


# The shipped checkpoint


def test_the_shipped_checkpoint_recognizes_digits():
    model = load_shipped()
    assert not model.training
    assert sum(parameter.numel() for parameter in model.parameters()) == 143_650
    description, _ = shipped()
    test = load_images("t10k")
    images, labels = test.get_batch(torch.arange(1000))
    with torch.no_grad():
        predicted = model(Normalize(description.input.mean, description.input.std)(images)).argmax(-1)
    assert (predicted == labels).float().mean() >= 0.985


def test_its_examples_are_test_digits_of_every_class_with_some_mistakes():
    description, packed = shipped()
    tensors = load(packed)
    labels, logits = tensors["examples.labels"], tensors["examples.logits"]
    assert len(labels) == len(logits) == len(tensors["examples.pixels"]) >= 100
    assert set(labels) == set(range(10))
    assert 5 <= (logits.argmax(-1) != labels).sum() <= len(labels) / 3
    images = torch.from_numpy(tensors["examples.pixels"])
    with torch.no_grad():
        expected = load_shipped()(Normalize(description.input.mean, description.input.std)(images)).numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-3)
    test = load_images("t10k")
    known = {image.numpy().tobytes(): int(label) for image, label in zip(test.images, test.labels, strict=True)}
    assert [known[image.tobytes()] for image in tensors["examples.pixels"]] == labels.tolist()
    assert len(packed) < 500_000


# Runs


def test_the_description_of_a_run(trained):
    run = clearhead.open_run(trained / "mnist")
    description = describe_run(run)
    assert description.kind == "model"
    assert description.grid == run.model.config.grid
    assert description.input.draw
    assert description.config == run.model.config.to_dict()
    assert [layer.name for layer in description.layers] == list(clearhead.look(run.model, torch.zeros(1, 1, 28, 28)))
    assert eval(description.source, {"clearhead": clearhead}).state_dict().keys() == run.model.state_dict().keys()


def test_an_exported_run_contains_model_examples_and_license(trained):
    run = clearhead.open_run(trained / "mnist")
    html = export_html(run)
    description, tensors = contents(html)
    assert description["config"] == run.model.config.to_dict()
    for name, weight in run.model.state_dict().items():
        stored = tensors[f"model.{name}"]
        assert stored.dtype == np.float16
        np.testing.assert_allclose(stored, weight.numpy(), rtol=1e-3, atol=1e-6)
    assert "CC" in html or "Creative Commons" in html
    with torch.no_grad():
        expected = run.model(run.normalize(torch.from_numpy(tensors["examples.pixels"]))).numpy()
    np.testing.assert_allclose(tensors["examples.logits"], expected, atol=1e-4)


def test_weights_beyond_float16_stay_float32(trained):
    run = clearhead.open_run(trained / "mnist")
    with torch.no_grad():
        run.model.head.weight[0, 0] = 1e6
    _, tensors = contents(export_html(run))
    assert tensors["model.head.weight"].dtype == np.float32
    assert tensors["model.head.bias"].dtype == np.float16


def test_a_run_without_its_data_is_exported_without_examples(pictures, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    changes = {
        "data.folder": "pictures",
        "data.image_size": 16,
        "model.patch_size": 8,
        "model.width": 8,
        "model.depth": 1,
        "model.num_heads": 2,
        "training.steps": 1,
    }
    clearhead.train("folder", "mine", changes=changes, quiet=True)
    run = clearhead.open_run("mine")
    assert describe_run(run).input.background != (0, 0, 0)
    assert not describe_run(run).input.draw
    shutil.rmtree("pictures")
    warnings = []
    _, tensors = contents(export_html(run, warnings.append))
    assert not any(name.startswith("examples.") for name in tensors)
    assert "mine" in warnings[0]


@pytest.mark.parametrize("name", ["reverse", "words", "pronounce"])
def test_a_run_of_sequences_names_the_command_that_works(name, trained, capsys):
    assert cli.main(["export", str(trained / name), "--to", "html"]) == 2
    assert "clearhead look" in capsys.readouterr().err


def test_the_command_writes_a_file_named_after_the_run(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", str(trained / "mnist"), "--to", "html"]) == 0
    assert (tmp_path / "mnist.html").stat().st_size < 1_000_000
    assert "mnist.html" in capsys.readouterr().out
    assert cli.main(["export", str(trained / "mnist"), "--to", "html", "--out", "a/b.html"]) == 0
    assert (tmp_path / "a/b.html").exists()


def test_examples_include_mistakes_uncertain_ones_and_every_class():
    labels = torch.arange(200) % 4
    logits = 5 * nn.functional.one_hot(labels, 4).float()
    logits[[10, 20]] = logits[[10, 20]].roll(1, -1)  # confident mistakes
    logits[30] = torch.tensor([0.1, 0.0, 0.2, 0.0])  # right and uncertain
    chosen = choose_examples(labels, logits, 20).tolist()
    assert len(chosen) == len(set(chosen)) == 20
    assert {10, 20, 30} <= set(chosen)
    counts = labels[chosen].bincount()
    assert counts.min() >= 3
    assert len(choose_examples(labels[:5], logits[:5], 20)) == 5


def test_large_images_have_fewer_examples(trained, monkeypatch):
    run = clearhead.open_run(trained / "mnist")
    monkeypatch.setattr("clearhead.page.describe.MAX_EXAMPLE_BYTES", 20 * 784)
    assert len(run_examples(run)["examples.pixels"]) == 20
    monkeypatch.setattr("clearhead.page.describe.MAX_EXAMPLE_BYTES", 0)
    assert len(run_examples(run)["examples.pixels"]) == 8


# Which models run in the browser


def small(**changes):
    options = {"image_size": 8, "patch_size": 4, "num_classes": 3, "width": 8, "depth": 1, "num_heads": 2}
    return clearhead.VisionTransformer(**options | changes)


def test_our_own_model_runs_in_the_browser_and_a_subclass_does_not():
    class Mine(clearhead.VisionTransformer):
        pass

    target = Target(module="x.py:y")
    assert load_module(small(), target, "y").description.kind == "model"
    mine = Mine(image_size=8, patch_size=4, num_classes=3, width=8, depth=1, num_heads=2)
    loaded = load_module(mine, target, "y")
    assert loaded.description.kind == "live"
    assert loaded.live is not None
    assert loaded.description.config is None


def test_an_infinite_beta_and_a_large_model_run_on_the_server(monkeypatch):
    target = Target(module="x.py:y")
    assert load_module(small(beta=float("inf")), target, "y").description.kind == "live"
    monkeypatch.setattr("clearhead.page.models.MAX_BROWSER_WORK", 100)
    assert load_module(small(), target, "y").description.kind == "live"
    assert MAX_BROWSER_WORK > 10**7


def test_a_large_run_is_live_with_its_examples(trained, monkeypatch):
    run = clearhead.open_run(trained / "mnist")
    assert runs_in_browser(run.model, describe_run(run))
    monkeypatch.setattr("clearhead.page.models.MAX_BROWSER_WORK", 100)
    loaded = load_run(run)
    assert loaded.description.kind == "live"
    assert loaded.description.classes == run.classes
    assert "examples.labels" in load(loaded.tensors)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 48), (1, 7, 5), (4, 16, 16)])
def test_pictures_to_begin_with(shape):
    channels, height, width = shape
    zeros = (0,) * channels
    spec = InputSpec(
        channels=channels, height=height, width=width, mean=zeros, std=(1,) * channels, background=zeros, draw=False,
        patch_size=1,
    )  # fmt: skip
    pixels = pictures(spec)["examples.pixels"]
    assert pixels.dtype == np.uint8
    assert pixels.shape[1:] == shape
    assert all(image.std() > 10 for image in pixels)


# Recorded passes


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("mnist", ["--sample", "3"]),
        ("reverse", ["--ids", *"3141592653589793"]),
        ("sum", ["--sample", "0"]),
        ("words", ["--text", "abc"]),
        ("pronounce", ["--text", "cab"]),
    ],
)
def test_look_writes_one_html_file_for_every_kind_of_run(name, inputs, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "look.html"
    assert cli.main(["look", str(trained / name), *inputs, "--html", str(path)]) == 0
    assert "look.html" in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.png"))
    description, tensors = contents(path.read_text())
    assert description["kind"] == "trace"
    assert len(description["layers"]) >= 1
    for i, layer in enumerate(description["layers"]):
        assert tensors[f"trace.{i}"].shape == (1, layer["heads"], layer["queries"], layer["keys"])
    if name == "mnist":
        assert description["grid"] == [2, 2]
        assert tensors["trace.pixels"].shape == (1, 1, 28, 28)
        assert tensors["trace.logits"].shape == (1, 10)
        assert description["classes"] == list("0123456789")
    elif name != "pronounce":
        assert len(description["tokens"]) == max(layer["keys"] for layer in description["layers"])


def trace_of(batch=1, length=5):
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    return clearhead.look(model, torch.randn(batch, length, 16))


def test_save_html_refuses_what_it_cannot_show(tmp_path):
    trace = trace_of()
    with pytest.raises(ValueError, match=r"\.html"):
        trace.save_html(tmp_path / "x.png")
    with pytest.raises(ValueError, match="uint8"):
        trace.save_html(tmp_path / "x.html", image=torch.zeros(1, 8, 8))
    with pytest.raises(ValueError, match="batch of 1"):
        trace.save_html(tmp_path / "x.html", image=torch.zeros(2, 1, 8, 8, dtype=torch.uint8))
    assert not list(tmp_path.iterdir())


def test_a_batch_is_saved_with_all_its_examples(tmp_path):
    trace = trace_of(batch=3)
    _, tensors = contents(trace.save_html(tmp_path / "x.html").read_text())
    for i, record in enumerate(trace.values()):
        np.testing.assert_allclose(tensors[f"trace.{i}"], record.weights().detach(), atol=1e-3)


def test_a_notebook_does_not_grow_beyond_its_budget(monkeypatch):
    monkeypatch.setattr("clearhead.insight.trace.MAX_NOTEBOOK_BYTES", 10_000)
    shown = trace_of(length=5)._repr_html_()
    assert "layers.1.self_attn" in shown
    assert "was left out" not in shown
    cut = trace_of(length=40)._repr_html_()
    assert "was left out" in cut
    assert len(cut) < len(shown) + 20_000
    nothing = trace_of(length=100)._repr_html_()
    assert "<iframe" not in nothing
    assert "100 x 100" in nothing


def test_windows_of_one_image_are_heads(tmp_path):
    class Windows(nn.Module):
        def __init__(self):
            super().__init__()
            self.whole, self.local = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

        def forward(self, x):
            x = self.whole(x, x, x)[0]
            windows = x.view(-1, 4, 8)
            return self.local(windows, windows, windows)[0]

    trace = clearhead.look(Windows().eval(), torch.randn(1, 8, 8))
    description, tensors = contents(trace.save_html(tmp_path / "x.html").read_text())
    assert [layer["heads"] for layer in description["layers"]] == [2, 4]
    assert tensors["trace.1"].shape == (1, 4, 4, 4)
