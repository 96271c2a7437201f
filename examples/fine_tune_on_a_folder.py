"""Fine-tune a pretrained vision transformer on a folder of images, one folder per class.

python examples/fine_tune_on_a_folder.py [FOLDER]

The model is pretrained on the digits 0 to 4. Without FOLDER, the example makes a folder with ten training images of
each of the digits 5 to 9. Training from scratch on the same images shows what the pretraining is worth.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image

import clearhead
from clearhead.data import Dataset, Normalize
from clearhead.tasks import Folder, Mnist

CHANGES = {"in_channels": 3, "num_classes": 5, "patch_embed": "conv-stem", "patch_size": 4, "depth": 2}
NORMALIZE = Normalize(mean=(0.1307,) * 3, std=(0.3081,) * 3)  # for both data sets: the model expects it


def make_folder(folder: Path, digits: Dataset) -> None:
    """digits/train/5/0.png, ..., digits/test/9/209.png"""
    images, labels = digits.test.get_batch(torch.arange(len(digits.test)))
    for label in range(5, 10):
        for i, image in enumerate(images[labels == label][:210, 0]):
            path = folder / ("train" if i < 10 else "test") / str(label) / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.numpy()).save(path)


def fine_tune(model: clearhead.VisionTransformer, data: Dataset, run: str) -> None:
    model.reset_classifier(len(data.classes))  # a new head; all other weights stay
    before = accuracy(model, *data.tensors("test"))
    clearhead.fit(model, data.tensors("train"), epochs=20, batch_size=10, lr=5e-4, dir=run, resume=True, quiet=True)
    print(f"{run}: test accuracy {before:.1%} before, {accuracy(model, *data.tensors('test')):.1%} after")


def accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.inference_mode():
        return (model.eval()(images).argmax(1) == labels).double().mean().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    digits, folder = Mnist(validation=0).load(seed=0), Path(*sys.argv[1:] or ["digits"])
    if not sys.argv[1:]:
        make_folder(folder, digits)
    model = clearhead.VisionTransformer.from_preset("vit_mnist", CHANGES)
    images, labels = digits.train.get_batch(torch.arange(len(digits.train)))
    zero_to_four = NORMALIZE(images[labels < 5].expand(-1, 3, -1, -1)), labels[labels < 5]  # gray -> three channels
    clearhead.fit(model, zero_to_four, steps=150, optimizer="muon", dir="runs/pretrained", resume=True, quiet=True)

    data = replace(Folder(folder=str(folder), image_size=28, validation=0).load(seed=0), normalize=NORMALIZE)
    fine_tune(model, data, "runs/fine-tuned")
    fine_tune(clearhead.VisionTransformer.from_preset("vit_mnist", CHANGES), data, "runs/from-scratch")
