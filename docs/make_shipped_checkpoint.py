"""Writes the checkpoint that comes with the package from a run of the recipe `mnist`.

    clearhead train mnist --name shipped --training.epochs 4
    python docs/make_shipped_checkpoint.py runs/shipped

The weights are float16. Of the test images only indices and logits are stored: the images are in the embedded MNIST.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from clearhead.inference.run import Run
from clearhead.page.describe import NUM_EXAMPLES, choose_examples, describe_run, weights_of
from clearhead.tasks.images import Mnist
from clearhead.viewer import pack_tensors, to_half

FOLDER = Path(__file__).parents[1] / "src/clearhead/page/files"
TITLE = "Handwritten digits"
SOURCE = "clearhead.shipped_model()"


def main(path: str) -> None:
    run = Run(path)
    if not isinstance(run.task, Mnist):
        raise SystemExit(f"{path} was trained on {run.task.name}; train the recipe mnist")
    weights = {name: to_half(array) for name, array in weights_of(run.model).items()}
    with torch.no_grad():
        for name, tensor in run.model.state_dict().items():
            tensor.copy_(torch.from_numpy(weights[f"model.{name}"].astype(np.float32)))
    test = run.task.load(run.config.seed).test
    images, labels = test.get_batch(torch.arange(len(test)))
    logits = run.logits(run.normalize(images))
    chosen = choose_examples(labels, logits, NUM_EXAMPLES)
    examples = {"examples.indices": chosen.int().numpy(), "examples.logits": logits[chosen].numpy()}
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "mnist.safetensors").write_bytes(pack_tensors(weights | examples))
    description = replace(describe_run(run), title=TITLE, source=SOURCE).to_dict()
    (FOLDER / "mnist.json").write_text(json.dumps(description, indent=1) + "\n")
    accuracy = (logits.argmax(-1) == labels).float().mean().item()
    print(f"test accuracy with float16 weights: {accuracy:.2%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
