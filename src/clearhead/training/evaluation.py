"""Exact evaluation, from sums and counts that add up over batches, microbatches and ranks; and the callbacks of `fit`.

Callbacks are the user's own functions, called after each record of metrics.jsonl.
Dims: B batch, L length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.data import TTA
from clearhead.data.batches import Batch, evaluation_batches, tta_mean
from clearhead.data.dataset import Examples, Normalize, Tree, map_tensors, num_examples
from clearhead.nn.blocks import eval_mode
from clearhead.tasks.objectives import Objective
from clearhead.training.config import EVAL_BATCH_SIZE
from clearhead.training.distributed import SINGLE_PROCESS, Ranks, has_float64, preserved_rng

NUM_SUMS = 5
"""numbers that `metric_sums` returns"""


def to_device(batch: Batch, device: torch.device) -> Batch:
    if isinstance(batch.inputs, Tensor) and batch.inputs.device == device:
        return batch

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=device.type == "cuda")  # MPS may read the memory after it is reused

    inputs, targets, targets_b, lam = (
        map_tensors(move, tree) for tree in (batch.inputs, batch.targets, batch.targets_b, batch.lam)
    )
    return Batch(inputs, targets, targets_b, lam, batch.num_global)


def microbatches(batch: Batch, n: int) -> list[Batch]:
    """Split a batch into n parts whose sizes differ by at most one."""
    if n == 1:
        return [batch]
    inputs, targets, targets_b, lam = (
        split_tree(tree, n) for tree in (batch.inputs, batch.targets, batch.targets_b, batch.lam)
    )
    return [Batch(*part, batch.num_global) for part in zip(inputs, targets, targets_b, lam, strict=True)]


def split_tree(tree: Tree, n: int) -> list[Tree]:
    if isinstance(tree, Tensor):
        return list(tree.tensor_split(n))
    return [map_tensors(lambda t: t.tensor_split(n)[i] if t.dim() else t, tree) for i in range(n)]  # noqa: B023


@torch.no_grad()
def batch_sums(objective: Objective, outputs: Tree, batch: Batch, loss: Tensor) -> Tensor:
    """`metric_sums` of a batch. If the objective does not say what is correct, only the loss is counted."""
    correct: Tensor | None = objective.correct(outputs, batch)
    if correct is None:
        n_examples = num_examples(batch.inputs)
        sums = torch.zeros(NUM_SUMS, dtype=torch.float64 if has_float64(loss.device) else torch.float32)
        sums[1] = n_examples
        sums = sums.to(loss.device)
        sums[0] = loss.detach()
        return sums
    return metric_sums(loss, correct, objective.loss_mask(batch))


def zero_sums(device: torch.device) -> Tensor:
    """Where `metric_sums` are added up: float64 on the device, or on the CPU if the device has no float64."""
    return torch.zeros(NUM_SUMS, dtype=torch.float64, device=device if has_float64(device) else "cpu")


def metric_sums(loss: Tensor, correct: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sums for `compute_metrics`, which add up over batches and ranks. correct (B,) or (B,L) -> (5,)

    The five numbers are: loss, examples, correct predictions, predictions, and examples with only correct predictions.
    Predictions where `mask` is False are not counted. The dtype is float64; on MPS, which lacks it, float32, in which
    the numbers of one batch are exact too.
    """
    n_examples, dtype = correct.shape[0], torch.float64 if has_float64(loss.device) else torch.float32
    correct = correct[:, None] if correct.dim() == 1 else correct.flatten(1)
    if mask is None:
        n_predictions = loss.new_full((), correct.numel(), dtype=dtype)
        exact_match = correct.all(dim=1)
    else:
        n_predictions = mask.sum().to(dtype)
        exact_match, correct = (correct | ~mask.flatten(1)).all(dim=1), correct & mask.flatten(1)
    return torch.stack(
        [
            loss.detach().to(dtype),
            loss.new_full((), n_examples, dtype=dtype),
            correct.sum().to(dtype),
            n_predictions,
            exact_match.sum().to(dtype),
        ]
    )


def compute_metrics(sums: list[float]) -> dict[str, float]:
    """Mean loss and accuracy; with several predictions per example, also `exact_match`; without any, only the loss.

    `exact_match` is the fraction of examples with only correct predictions.
    """
    loss, n_examples, n_correct, n_predictions, n_exact = sums
    if not n_predictions:
        return {"loss": loss / n_examples}
    metrics = {"loss": loss / n_examples, "accuracy": n_correct / n_predictions}
    return metrics if n_predictions == n_examples else metrics | {"exact_match": n_exact / n_examples}


def evaluate(
    model: nn.Module,
    objective: Objective,
    examples: Examples,
    normalize: Normalize | None,
    ranks: Ranks = SINGLE_PROCESS,
    *,
    batch_size: int = EVAL_BATCH_SIZE,
    tta: TTA = "none",
    on_batch: Callable[[Batch, Tensor], None] | None = None,
) -> dict[str, float]:
    """Metrics over all examples, equal on all ranks; each example counts once, for any number of ranks.

    The model runs in float32, whatever the precision of training, so that a run has the same accuracy on every machine.
    With test-time augmentation, the outputs are averaged over the views. `on_batch` is called with each batch of this
    rank and the model's outputs.
    """
    sums = zero_sums(ranks.device)
    with eval_mode(model), torch.inference_mode():
        for batch in evaluation_batches(examples, normalize, batch_size, ranks.rank, ranks.world_size):
            batch = to_device(batch, ranks.device)
            outputs = tta_outputs(model, objective, batch, tta)
            if on_batch is not None:
                on_batch(batch, outputs)
            if num_examples(batch.inputs):
                sums += batch_sums(objective, outputs, batch, objective.loss(outputs, batch)).to(sums.device)
    return compute_metrics(ranks.all_reduce_sum(sums).tolist())


def tta_outputs(model: nn.Module, objective: Objective, batch: Batch, tta: TTA) -> Tree:
    """The model's outputs, averaged over the views of test-time augmentation.

    A rank whose part of the batch is empty runs the model on zeros, because sharded weights are gathered by all ranks.
    """
    n = num_examples(batch.inputs)
    if not n:
        inputs, targets = (
            map_tensors(lambda t: t.new_zeros(1, *t.shape[1:]) if t.dim() else t, side)
            for side in (batch.inputs, batch.targets)
        )
        batch = replace(batch, inputs=inputs, targets=targets)
    outputs = tta_mean(lambda view: objective.compute_outputs(model, replace(batch, inputs=view)), batch.inputs, tta)
    return outputs if n else map_tensors(lambda t: t[:0] if t.dim() else t, outputs)


@dataclass(frozen=True)
class Progress:
    """What a callback receives."""

    kind: str
    """train, validation or test"""
    step: int
    epoch: float
    metrics: dict[str, Any]
    """the record: loss, accuracy, ..."""
    model: nn.Module
    """in eval mode, with its current weights"""


Callback = Callable[[Progress], object]


def call_callbacks(
    callbacks: Sequence[Callback], records: Sequence[dict[str, Any]], model: nn.Module, ranks: Ranks
) -> Exception | None:
    """Call the callbacks on rank 0, with each record. If one raises an exception, all ranks return one.

    Callbacks do not change the run: the random state and the mode of the model are restored.
    """
    if not records:
        return None
    error: Exception | None = None
    if ranks.is_main:
        try:
            for record in records:
                progress = Progress(record["kind"], record["step"], record["epoch"], dict(record), model)
                for callback in callbacks:
                    with preserved_rng(), eval_mode(model):
                        callback(progress)
        except Exception as failure:  # the user's code may raise anything; the loop saves a checkpoint first
            error = failure
    has_failed = ranks.broadcast_json(error is not None)
    return RuntimeError("a callback has failed on rank 0") if has_failed and error is None else error
