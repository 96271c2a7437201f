"""Does a trained run need its attention? Its accuracy on the test set with the weights of all heads changed.

python benchmarks/ablation.py runs/cifar10-fast-0

`uniform`: every token takes the mean of all, so that what a token looks for no longer counts. `zero`: nothing passes
from token to token. Each is done to all layers at once, then to each layer alone; nothing is trained anew.
"""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from clearhead.data.batches import evaluation_batches
from clearhead.data.dataset import Dataset, Subset
from clearhead.inference.run import Run
from clearhead.insight.heads import edit
from clearhead.insight.trace import look
from clearhead.training.evaluation import evaluate

Way = Literal["uniform", "zero"]
WAYS: tuple[Way, ...] = ("uniform", "zero")


def accuracy(session: Run, data: Dataset, layers: Sequence[str], way: Way) -> float:
    """With these layers' weights changed in this way."""
    with ExitStack() as changes:
        for layer in layers:
            changes.enter_context(edit(session.model, layer, pattern=way))
        result = evaluate(session.model, session.task.objective, data.test, data.normalize)
    return result["accuracy"]


def is_square(weights: Tensor) -> bool:
    """From every token to every token; a pooling query has a single row."""
    return weights.shape[-2] == weights.shape[-1]


def limited(data: Dataset, n: int) -> Dataset:
    return replace(data, test=Subset(data.test, torch.arange(n))) if n else data


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("run")
    options.add_argument("--examples", type=int, default=0, help="of the test set; 0 for all")
    args = options.parse_args()
    session = Run(args.run)
    data = limited(session.config.data.load(session.config.seed), args.examples)
    one = next(iter(evaluation_batches(data.test, data.normalize, batch_size=1)))
    seen = look(session.model, one.inputs)
    layers = list(seen)
    inside = [layer for layer in layers if is_square(seen[layer].weights(head=0))]
    print(f"{'as trained':32} {accuracy(session, data, (), 'zero'):7.2%}")
    for way in WAYS:
        print(f"{'all layers ' + way:32} {accuracy(session, data, layers, way):7.2%}")
        if len(inside) < len(layers):
            print(f"{'all but the pooling ' + way:32} {accuracy(session, data, inside, way):7.2%}")
    for layer in layers:
        for way in WAYS:
            print(f"{layer + ' ' + way:32} {accuracy(session, data, [layer], way):7.2%}")


if __name__ == "__main__":
    main()
