"""The viewer's forward pass with trained weights: 1,000 images of MNIST, and 200 through the model of cifar10-fast.

Trained weights have large and small values, and trained models are certain: differences show that random weights hide.
PyTorch computes in float64 here, with the same float32 weights: in float32, its own attention weights are off by 1e-5.
"""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import clearhead
from clearhead import insight
from clearhead.data.image_datasets import MNIST_NORMALIZE, load_images
from clearhead.models.vit import VisionTransformer
from clearhead.recipes import train
from clearhead.recipes.cifar10_fast import cifar10_fast
from clearhead.training.optim import Optimizers

LOGITS, MAPS, ATTRIBUTIONS = 1e-4, 1e-5, 1e-4
"""largest differences from PyTorch"""
MNIST = {"mean": MNIST_NORMALIZE.mean, "std": MNIST_NORMALIZE.std, "background": 0}
RUN = [{"kind": "run", "image": i} for i in range(1000)]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def digits():
    return load_images("t10k").images[:1000]


@pytest.fixture(scope="module")
def trained_model(tmp_path_factory):
    """The recipe `mnist` after 100 steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("mnist"))
        changes = {
            "training.steps": 100,
            "training.batch_size": 64,
            "training.evaluate_every": 0,
            "training.threads": 1,
        }
        train("mnist", "mnist", changes=changes, quiet=True)
        return clearhead.open_run("runs/mnist").model


def test_logits_and_maps_of_mnist_equal_pytorch(engine, trained_model, digits):
    check_model(engine, trained_model, digits, normalize(digits, **MNIST), **MNIST)


def test_logits_and_maps_of_the_shipped_checkpoint_equal_pytorch(engine, digits):
    describe = pytest.importorskip("clearhead.page.describe", reason="this version ships no checkpoint")
    check_model(engine, describe.shipped_model(), digits, normalize(digits, **MNIST), **MNIST)


def test_logits_and_maps_of_cifar10_fast_equal_pytorch(engine, digits):
    """Trained on tinted digits: CIFAR-10 is not part of the package."""
    torch.manual_seed(0)
    config = cifar10_fast()
    model = VisionTransformer.from_config(config.model)
    optimizer = Optimizers(model, config.optimizer)
    images, labels = tinted(load_images("train").images[:1600]), load_images("train").labels[:1600]
    losses = []
    for step, (batch, targets) in enumerate(zip(images.split(32), labels.split(32), strict=True)):
        loss = F.cross_entropy(model(normalize(batch).float()), targets)
        loss.backward()
        optimizer.step(min(1, (step + 1) / 20))
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-10:]) / 10 < 2.0, "the model must have learned something"
    pixels = tinted(digits[:200])
    check_model(engine, model.eval(), pixels, normalize(pixels))


def check_model(engine, model, pixels, inputs, **description):
    results = engine.ask_model(model, pixels, RUN[: len(pixels)], **description)
    with torch.no_grad():
        trace = insight.look(copy.deepcopy(model).double(), inputs)
    for i, result in enumerate(results):
        assert np.abs(result["logits"] - trace.output[i].numpy()).max() < LOGITS
    for index, name in enumerate(trace):
        found = np.stack([result["layers"][index]["weights"] for result in results])
        assert np.abs(found - trace[name].weights().flatten(1).numpy()).max() < MAPS


def test_float16_weights_give_the_same_class(engine, trained_model, digits):
    results = engine.ask_model(trained_model, digits, RUN, dtype=torch.float16, **MNIST)
    with torch.no_grad():
        expected = trained_model(normalize(digits, **MNIST).float()).argmax(-1).numpy()
    same = sum(result["logits"].argmax() == label for result, label in zip(results, expected, strict=True))
    assert same >= 998


def test_attributions_of_a_trained_model_equal_those_of_insight(engine, trained_model, digits):
    model, grid = copy.deepcopy(trained_model).double(), trained_model.config.grid
    for i in range(5):
        inputs = normalize(digits[i : i + 1], **MNIST)
        trace = insight.look(model, inputs)
        target = int(trace.output.argmax())
        maps = {
            "mean": insight.mean_attention([trace["pool.attn"].weights()]),
            "rollout": insight.rollout(trace),
            "relevance": insight.relevance(trace, trace.output[:, target]),
        }
        expected = {name: insight.output_map(matrix, class_token=False) for name, matrix in maps.items()}
        expected["occlusion"] = insight.occlusion(model, inputs, grid, target, fill="black")
        jobs = [{"kind": "attribute", "method": name, "target": target, "image": i} for name in expected]
        for name, result in zip(expected, engine.ask_model(trained_model, digits, jobs, **MNIST), strict=True):
            difference = np.abs(result["patches"] - expected[name].detach().flatten().numpy()).max()
            assert difference < ATTRIBUTIONS * max(1, expected[name].abs().max()), name


def normalize(pixels, mean=(0.4,), std=(0.3,), background=102):
    return (pixels.double() / 255 - mean[0]) / std[0]


def tinted(images):
    """Gray (B,1,28,28) -> (B,3,32,32), each image in its own color."""
    padded = F.pad(images, (2, 2, 2, 2)).float()
    generator = torch.Generator().manual_seed(0)
    colors = torch.rand(len(images), 3, 1, 1, generator=generator)
    return (padded * colors + 255 * (1 - colors) * 0.3).to(torch.uint8)
