"""Does a trained run need its attention? Test accuracy with the attention weights of whole layers replaced.

python benchmarks/ablation.py runs/cifar10-fast-0

`uniform` replaces the attention weights by the mean over all tokens, `zero` by zeros, so that no information passes
between tokens. Each is applied to all layers at once, then to each layer alone, without retraining.
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

Pattern = Literal["uniform", "zero"]
PATTERNS: tuple[Pattern, ...] = ("uniform", "zero")


def accuracy(run: Run, data: Dataset, layers: Sequence[str], pattern: Pattern) -> float:
    """The test accuracy with the attention weights of these layers replaced."""
    with ExitStack() as changes:
        for layer in layers:
            changes.enter_context(edit(run.model, layer, pattern=pattern))
        result = evaluate(run.model, run.task.objective, data.test, data.normalize)
    return result["accuracy"]


def is_square(weights: Tensor) -> bool:
    """Whether every token attends to every token; a pooling query has a single row."""
    return weights.shape[-2] == weights.shape[-1]


def limited(data: Dataset, n: int) -> Dataset:
    return replace(data, test=Subset(data.test, torch.arange(n))) if n else data


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("run")
    options.add_argument("--examples", type=int, default=0, help="number of test examples; 0 for all")
    args = options.parse_args()
    run = Run(args.run)
    data = limited(run.config.data.load(run.config.seed), args.examples)
    one = next(iter(evaluation_batches(data.test, data.normalize, batch_size=1)))
    trace = look(run.model, one.inputs)
    layers = list(trace)
    self_attention = [layer for layer in layers if is_square(trace[layer].weights(head=0))]
    print(f"{'as trained':32} {accuracy(run, data, (), 'zero'):7.2%}")
    for pattern in PATTERNS:
        print(f"{'all layers ' + pattern:32} {accuracy(run, data, layers, pattern):7.2%}")
        if len(self_attention) < len(layers):
            print(f"{'all but the pooling ' + pattern:32} {accuracy(run, data, self_attention, pattern):7.2%}")
    for layer in layers:
        for pattern in PATTERNS:
            print(f"{layer + ' ' + pattern:32} {accuracy(run, data, [layer], pattern):7.2%}")


if __name__ == "__main__":
    main()
