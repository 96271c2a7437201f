"""Preprocessing in JavaScript equals the preprocessing of the package: MNIST's centering, and fitting pictures."""

import numpy as np
import pytest
import torch
from PIL import Image

from clearhead.data.image_datasets import load_images
from clearhead.data.images import resize


def test_centering_by_mass_leaves_mnist_unchanged(engine):
    """MNIST is centered already: a digit that is drawn ten times larger, anywhere on the pad, comes back as it was."""
    digits = load_images("t10k").images[:200, 0]
    enlarged = digits.repeat_interleave(10, 1).repeat_interleave(10, 2)
    moved = torch.stack([image.roll((13 * i % 41 - 20, 7 * i % 41 - 20), (0, 1)) for i, image in enumerate(enlarged)])
    jobs = [{"name": "center", "width": 280, "height": 280, "image": i} for i in range(len(digits))]
    centered = torch.tensor(np.stack(engine.ask({"pixels": moved}, jobs))).view_as(digits)
    same = (centered == digits).flatten(1).all(1)
    assert same.sum() >= 190  # a few digits do not fill MNIST's box of 20 x 20 pixels


@pytest.mark.parametrize("fit", ["pad", "crop", "stretch"])
@pytest.mark.parametrize("size", [(37, 61), (64, 20), (32, 32), (9, 14), (200, 151)])
@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_are_fitted_as_in_prediction(engine, fit, size, channels):
    width, height = size
    small = np.random.default_rng(0).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    picture = Image.fromarray(small).resize(size, Image.Resampling.BILINEAR)
    expected = resize(picture.convert("L") if channels == 1 else picture, 32, fit)[:channels].int()
    pixels = torch.from_numpy(np.array(picture.convert("RGBA")))[None]
    spec = {"channels": channels, "height": 32, "width": 32}
    job = {"name": "fit", "width": width, "height": height, "input": spec, "fit": fit}
    (found,) = engine.ask({"pixels": pixels}, [job])
    difference = (torch.tensor(found).view_as(expected).int() - expected).abs()
    assert difference.max() <= 2  # Pillow rounds after each step
    assert difference.float().mean() < 0.5


def test_downscaling_averages_areas(engine):
    pixels = torch.randint(0, 256, (1, 280, 280), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    job = {"name": "downscale", "width": 280, "height": 280, "outWidth": 28, "outHeight": 28}
    (found,) = engine.ask({"pixels": pixels}, [job])
    expected = torch.nn.functional.avg_pool2d(pixels.float(), 10)[0]
    assert (torch.tensor(found).view(28, 28) - expected).abs().max() <= 1
