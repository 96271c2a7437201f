"""Exact evaluation: each example counts once, however many processes share the work."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from clearhead.data.batches import Batch, evaluation_batches
from clearhead.data.config import Views
from clearhead.data.dataset import Examples, Normalise
from clearhead.data.views import mean_over_views
from clearhead.nn.stage import testing_stage
from clearhead.training.distributed import ALONE, Processes
from clearhead.training.metrics import N_COUNTS, counts, summary
from clearhead.training.objective import Objective, to_device

BATCH_SIZE = 512


def evaluate(
    model: nn.Module,
    objective: Objective,
    examples: Examples,
    normalise: Normalise | None,
    processes: Processes = ALONE,
    *,
    views: Views = "one",
    on_batch: Callable[[Batch, Tensor], None] | None = None,
) -> dict[str, float]:
    """Loss and accuracy over all examples, the same in every process; with several views of each image, the outputs are
    averaged first. In float32 whatever the precision of training, so that a run has one accuracy on every machine.
    `on_batch` is called with each batch of this process and the model's outputs."""
    sums = torch.zeros(N_COUNTS, dtype=torch.float64, device=processes.device)
    with testing_stage(model), torch.inference_mode():
        for batch in evaluation_batches(examples, normalise, BATCH_SIZE, processes.rank, processes.world):
            batch = to_device(batch, processes.device)
            outputs = answers(model, objective, batch, views)
            if on_batch is not None:
                on_batch(batch, outputs)
            sums += counts(objective.loss(outputs, batch), objective.right(outputs, batch), objective.asked(batch))
    return summary(processes.add(sums).tolist())


def answers(model: nn.Module, objective: Objective, batch: Batch, views: Views) -> Tensor:
    """The model's outputs. A process without a share of a batch asks about zeros: split weights must meet in step."""
    n = len(batch.inputs)
    if not n:
        inputs, targets = (side.new_zeros(1, *side.shape[1:]) for side in (batch.inputs, batch.targets))
        batch = replace(batch, inputs=inputs, targets=targets)
    outputs = mean_over_views(lambda view: objective.ask(model, replace(batch, inputs=view)), batch.inputs, views)
    return outputs[:n]
