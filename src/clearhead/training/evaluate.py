"""Exact evaluation: each example counts once, however many processes share the work."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from clearhead.data.batches import Batch, evaluation_batches
from clearhead.data.dataset import Examples, Normalise
from clearhead.training.config import Precision
from clearhead.training.distributed import ALONE, Processes
from clearhead.training.metrics import N_COUNTS, counts, summary
from clearhead.training.objective import Objective, to_device
from clearhead.training.precision import autocast

BATCH_SIZE = 512


def evaluate(
    model: nn.Module,
    objective: Objective,
    examples: Examples,
    normalise: Normalise | None,
    processes: Processes = ALONE,
    *,
    precision: Precision = "float32",
    flip_average: bool = False,
) -> dict[str, float]:
    """Loss and accuracy over all examples, known to every process. With `flip_average`, of the mean of the answers
    for an image and its mirror image."""
    sums = torch.zeros(N_COUNTS, dtype=torch.float64, device=processes.device)
    with testing(model), torch.inference_mode():
        for batch in evaluation_batches(examples, normalise, BATCH_SIZE, processes.rank, processes.world):
            batch = to_device(batch, processes.device)
            with autocast(precision, processes.device):
                outputs = answers(model, objective, batch, flip_average)
            sums += counts(objective.loss(outputs, batch), objective.right(outputs, batch), objective.asked(batch))
    return summary(processes.add(sums).tolist())


def answers(model: nn.Module, objective: Objective, batch: Batch, flip_average: bool) -> Tensor:
    """The model's outputs. A process without a share of a batch asks about zeros: split weights must meet in step."""
    n = len(batch.inputs)
    if not n:
        inputs, targets = (side.new_zeros(1, *side.shape[1:]) for side in (batch.inputs, batch.targets))
        batch = replace(batch, inputs=inputs, targets=targets)
    outputs = objective.ask(model, batch)
    if flip_average:
        mirrored = replace(batch, inputs=batch.inputs.flip(-1))
        outputs = (outputs + objective.ask(model, mirrored)) / 2
    return outputs[:n]


@contextmanager
def testing(model: nn.Module) -> Iterator[None]:
    """Without dropout inside this; as before after it."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
