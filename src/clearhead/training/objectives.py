"""Objectives: the loss that training minimizes, which predictions are correct, and exact evaluation with both.

A loss is the sum over the examples of a batch, not the mean, and metrics are computed from sums and counts. These add
up over batches, microbatches and ranks; dividing by the number of all examples gives the exact mean.

Dims: B batch, L length, Q target length, V classes or vocabulary, S elements of a set.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.data.augment import tta_mean
from clearhead.data.batches import Batch, evaluation_batches
from clearhead.data.dataset import Examples, Normalize
from clearhead.data.datasets import TTA
from clearhead.data.vocab import BOS, IGNORE_INDEX, PAD
from clearhead.nn.blocks import eval_mode
from clearhead.training.config import EVAL_BATCH_SIZE
from clearhead.training.distributed import SINGLE_PROCESS, Ranks, has_float64

NUM_SUMS = 5
"""numbers that `metric_sums` returns"""


class Objective(Protocol):
    """What a model is trained for. Implementations are stateless; OBJECTIVES maps their names to them."""

    def compute_outputs(self, forward: Callable[..., Tensor], batch: Batch) -> Tensor:
        """The outputs of the model for a batch."""
        return forward(batch.inputs)

    def loss_mask(self, batch: Batch) -> Tensor | None:
        """Which predictions count: bool, of the same shape as `correct`. None means all of them."""
        return None

    def score(self, result: dict[str, float]) -> list[float]:
        """The score of an evaluation. Scores compare lexicographically; larger is better."""
        return [result["accuracy"], -result["loss"]]

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """The sum of the losses of all examples."""
        ...

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Which predictions are correct: bool (B,), or (B,L) with one prediction per token."""
        ...


class Classification(Objective):
    """One of V classes per example: logits (B,V), targets (B,).

    With mixup, the loss is lam * loss(targets) + (1 - lam) * loss(targets_b).
    """

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        outputs = outputs.float()
        if batch.targets_b is None or batch.lam is None:
            return F.cross_entropy(outputs, batch.targets, reduction="sum", label_smoothing=smoothing)
        first = F.cross_entropy(outputs, batch.targets, reduction="none", label_smoothing=smoothing)
        second = F.cross_entropy(outputs, batch.targets_b, reduction="none", label_smoothing=smoothing)
        return (batch.lam * first + (1 - batch.lam) * second).sum()

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        """With mixup, the target with the larger weight counts."""
        targets = batch.targets
        if batch.targets_b is not None and batch.lam is not None:
            targets = torch.where(batch.lam >= 0.5, targets, batch.targets_b)
        return outputs.argmax(dim=-1) == targets


class TokenClassification(Objective):
    """One of V classes per token: logits (B,L,V), targets (B,L). An example's loss is the mean over its tokens."""

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        logits, targets = outputs.float().flatten(0, 1), batch.targets.flatten()
        return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing) / batch.targets.shape[1]

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        return outputs.argmax(dim=-1) == batch.targets


class BinaryClassification(Objective):
    """Two classes, 0 and 1: one logit (B,1), targets (B,)."""

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        targets = batch.targets.float() * (1 - smoothing) + smoothing / 2
        return F.binary_cross_entropy_with_logits(outputs.float().squeeze(-1), targets, reduction="sum")

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        return (outputs.squeeze(-1) > 0) == (batch.targets > 0.5)


class Regression(Objective):
    """A number (B,1), trained with the squared error to the target (B,); correct if both round to the same integer."""

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        return F.mse_loss(outputs.float().squeeze(-1), batch.targets.float(), reduction="sum")

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        return outputs.squeeze(-1).round() == batch.targets.round()


class SetPointer(Objective):
    """The index of one element of a set: scores (B,S,1), softmax over the set, targets (B,)."""

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        scores = outputs.float().squeeze(-1)
        return F.cross_entropy(scores, batch.targets, reduction="sum", label_smoothing=smoothing)

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        return outputs.squeeze(-1).argmax(dim=-1) == batch.targets


class SequenceToSequence(Objective):
    """A target sequence, generated token by token: logits (B,Q,V), targets (B,Q) with IGNORE_INDEX after EOS.

    An example's loss is -log p(target), the sum over its tokens. The decoder's inputs are the targets, shifted right
    (teacher forcing). A prediction is correct if every token is: exactly then, greedy decoding generates the target.
    """

    def compute_outputs(self, forward: Callable[..., Tensor], batch: Batch) -> Tensor:
        return forward(batch.inputs, shift_right(batch.targets), source_lengths=(batch.inputs != PAD).sum(1))

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        logits, targets = outputs.float().flatten(0, 1), batch.targets.flatten()
        return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing, ignore_index=IGNORE_INDEX)

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        return ((outputs.argmax(dim=-1) == batch.targets) | (batch.targets == IGNORE_INDEX)).all(dim=1)


class CausalLM(Objective):
    """Next-token prediction: logits (B,L,V), targets (B,L) with IGNORE_INDEX where there is no next token.

    An example's loss is the mean over its tokens, in nats. Evaluations are compared by the loss, not by the accuracy:
    the next token is rarely certain, but its distribution can be learned.
    """

    def loss_mask(self, batch: Batch) -> Tensor:
        return batch.targets != IGNORE_INDEX

    def score(self, result: dict[str, float]) -> list[float]:
        return [-result["loss"]]

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        logits, n_targets = outputs.float().transpose(1, 2), self.loss_mask(batch).sum(1)
        losses = F.cross_entropy(
            logits, batch.targets, reduction="none", label_smoothing=smoothing, ignore_index=IGNORE_INDEX
        )
        return (losses.sum(1) / n_targets.clamp(min=1)).sum()

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        return outputs.argmax(dim=-1) == batch.targets


OBJECTIVES: dict[str, Objective] = {
    "classification": Classification(),
    "token-classification": TokenClassification(),
    "binary-classification": BinaryClassification(),
    "regression": Regression(),
    "set-pointer": SetPointer(),
    "seq2seq": SequenceToSequence(),
    "causal-lm": CausalLM(),
}


def shift_right(targets: Tensor) -> Tensor:
    """The decoder's inputs: BOS, followed by the targets without their last token. (B,Q) -> (B,Q)"""
    bos = torch.full_like(targets[:, :1], BOS)
    return torch.cat([bos, targets[:, :-1].masked_fill(targets[:, :-1] == IGNORE_INDEX, PAD)], dim=1)


def to_device(batch: Batch, device: torch.device) -> Batch:
    if batch.inputs.device == device:
        return batch

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=device.type == "cuda")  # MPS may read the memory after it is reused

    targets_b, lam = (None if t is None else move(t) for t in (batch.targets_b, batch.lam))
    return Batch(move(batch.inputs), move(batch.targets), targets_b, lam, batch.num_global)


def microbatches(batch: Batch, n: int) -> list[Batch]:
    """Split a batch into n parts whose sizes differ by at most one."""
    if n == 1:
        return [batch]
    targets_b, lam = ([None] * n if t is None else t.tensor_split(n) for t in (batch.targets_b, batch.lam))
    parts = zip(batch.inputs.tensor_split(n), batch.targets.tensor_split(n), targets_b, lam, strict=True)
    return [Batch(*part, batch.num_global) for part in parts]


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
    """Mean loss and accuracy; with several predictions per example, also `exact_match`.

    `exact_match` is the fraction of examples with only correct predictions.
    """
    loss, n_examples, n_correct, n_predictions, n_exact = sums
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
            loss, correct = objective.loss(outputs, batch), objective.correct(outputs, batch)
            sums += metric_sums(loss, correct, objective.loss_mask(batch)).to(sums.device)
    return compute_metrics(ranks.all_reduce_sum(sums).tolist())


def tta_outputs(model: nn.Module, objective: Objective, batch: Batch, tta: TTA) -> Tensor:
    """The model's outputs, averaged over the views of test-time augmentation.

    A rank whose part of the batch is empty runs the model on zeros, because sharded weights are gathered by all ranks.
    """
    n = len(batch.inputs)
    if not n:
        inputs, targets = (side.new_zeros(1, *side.shape[1:]) for side in (batch.inputs, batch.targets))
        batch = replace(batch, inputs=inputs, targets=targets)
    outputs = tta_mean(lambda view: objective.compute_outputs(model, replace(batch, inputs=view)), batch.inputs, tta)
    return outputs[:n]
