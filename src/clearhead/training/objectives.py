"""What is asked of a model: the loss that training makes small, and which answers count as right.

Losses are sums over the examples of a batch, not means: who divides by the number of all examples, over all portions
and processes, gets the mean exactly. Dims: B batch, L length, V choices, S elements of a set.
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
from clearhead.training.distributed import ALONE, Ranks


class Objective(Protocol):
    def compute_outputs(self, forward: Callable[..., Tensor], batch: Batch) -> Tensor:
        """What the model answers: its outputs."""
        return forward(batch.inputs)

    def loss_mask(self, batch: Batch) -> Tensor | None:
        """Bool, of the shape of `right`: where an answer was asked for; None for everywhere."""
        return None

    def score(self, result: dict[str, float]) -> list[float]:
        """By what two evaluations are compared: the first number that differs, and the larger is the better."""
        return [result["accuracy"], -result["loss"]]

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """The sum of the examples' losses."""
        ...

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Bool, for each answer that was asked for: (B,), or (B,L) where each token has one."""
        ...


class Classification(Objective):
    """One of V classes for each example: logits (B,V), targets (B,). A blend of two (mixup) is asked for both."""

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        outputs = outputs.float()
        if batch.targets_b is None or batch.lam is None:
            return F.cross_entropy(outputs, batch.targets, reduction="sum", label_smoothing=smoothing)
        first = F.cross_entropy(outputs, batch.targets, reduction="none", label_smoothing=smoothing)
        second = F.cross_entropy(outputs, batch.targets_b, reduction="none", label_smoothing=smoothing)
        return (batch.lam * first + (1 - batch.lam) * second).sum()

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Of a blend, the class with the larger share."""
        targets = batch.targets
        if batch.targets_b is not None and batch.lam is not None:
            targets = torch.where(batch.lam >= 0.5, targets, batch.targets_b)
        return outputs.argmax(dim=-1) == targets


class TokenClassification(Objective):
    """One of V classes for each token: logits (B,L,V), targets (B,L). An example's loss is the mean of its tokens'."""

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        tokens, targets = outputs.float().flatten(0, 1), batch.targets.flatten()
        return F.cross_entropy(tokens, targets, reduction="sum", label_smoothing=smoothing) / batch.targets.shape[1]

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        return outputs.argmax(dim=-1) == batch.targets


class BinaryClassification(Objective):
    """Yes (1) or no (0): one logit (B,1), targets (B,)."""

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        targets = batch.targets.float() * (1 - smoothing) + smoothing / 2
        return F.binary_cross_entropy_with_logits(outputs.float().squeeze(-1), targets, reduction="sum")

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        return (outputs.squeeze(-1) > 0) == (batch.targets > 0.5)


class Regression(Objective):
    """A number (B,1), by its squared distance from the target (B,); right when it rounds to it."""

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        return F.mse_loss(outputs.float().squeeze(-1), batch.targets.float(), reduction="sum")

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        return outputs.squeeze(-1).round() == batch.targets.round()


class SetPointer(Objective):
    """Which element of a set is the odd one: a score for each (B,S,1), softmax over the set, targets (B,)."""

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        scores = outputs.float().squeeze(-1)
        return F.cross_entropy(scores, batch.targets, reduction="sum", label_smoothing=smoothing)

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        return outputs.squeeze(-1).argmax(dim=-1) == batch.targets


class SequenceToSequence(Objective):
    """A sequence written token by token: logits (B,Q,V), targets (B,Q) with IGNORE_INDEX after the end mark.

    An example's loss is -log p(target), the sum of its tokens'. The model is told the right tokens so far (teacher
    forcing), and an answer is right when every token is: just then greedy decoding writes this target.
    """

    def compute_outputs(self, forward: Callable[..., Tensor], batch: Batch) -> Tensor:
        return forward(batch.inputs, shift_right(batch.targets), source_lengths=(batch.inputs != PAD).sum(1))

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        tokens, targets = outputs.float().flatten(0, 1), batch.targets.flatten()
        return F.cross_entropy(tokens, targets, reduction="sum", label_smoothing=smoothing, ignore_index=IGNORE_INDEX)

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        return ((outputs.argmax(dim=-1) == batch.targets) | (batch.targets == IGNORE_INDEX)).all(dim=1)


class CausalLM(Objective):
    """The token after each: logits (B,L,V), targets (B,L) with IGNORE_INDEX where none follows.

    An example's loss is the mean of its tokens', in nats, and the smallest loss is the best: which token follows can
    seldom be known, but how likely it is can.
    """

    def loss_mask(self, batch: Batch) -> Tensor:
        return batch.targets != IGNORE_INDEX

    def score(self, result: dict[str, float]) -> list[float]:
        return [-result["loss"]]

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        tokens, asked = outputs.float().transpose(1, 2), self.loss_mask(batch)
        losses = F.cross_entropy(
            tokens, batch.targets, reduction="none", label_smoothing=smoothing, ignore_index=IGNORE_INDEX
        )
        return (losses.sum(1) / asked.sum(1).clamp(min=1)).sum()

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
    """What the decoder is given: the begin mark, and the targets one place later. (B,Q) -> (B,Q)"""
    begin = torch.full_like(targets[:, :1], BOS)
    return torch.cat([begin, targets[:, :-1].masked_fill(targets[:, :-1] == IGNORE_INDEX, PAD)], dim=1)


def to_device(batch: Batch, device: torch.device) -> Batch:
    if batch.inputs.device == device:
        return batch
    other, share = (None if t is None else t.to(device, non_blocking=True) for t in (batch.targets_b, batch.lam))
    inputs, targets = (t.to(device, non_blocking=True) for t in (batch.inputs, batch.targets))
    return Batch(inputs, targets, other, share, batch.num_global)


def microbatches(batch: Batch, n: int) -> list[Batch]:
    """The batch in n parts that differ in size by one at most."""
    if n == 1:
        return [batch]
    others, shares = ([None] * n if t is None else t.tensor_split(n) for t in (batch.targets_b, batch.lam))
    parts = zip(batch.inputs.tensor_split(n), batch.targets.tensor_split(n), others, shares, strict=True)
    return [Batch(*part, batch.num_global) for part in parts]


# Loss and accuracy from counts. Counts add up over batches, portions and processes; means of means would not.


N_COUNTS = 5


def counts(loss: Tensor, right: Tensor, asked: Tensor | None = None) -> Tensor:
    """Sum of losses, examples, right answers, answers, examples with every answer right. right (B,…) -> float64 (5,)

    `asked` is False where no answer was asked for; those count neither as right nor as wrong.
    """
    n_examples = right.shape[0]
    answers = right[:, None] if right.dim() == 1 else right.flatten(1)
    if asked is None:
        n_answers = loss.new_full((), answers.numel(), dtype=torch.float64)
        whole = answers.all(dim=1)
    else:
        n_answers = asked.sum().double()
        whole, answers = (answers | ~asked.flatten(1)).all(dim=1), answers & asked.flatten(1)
    return torch.stack(
        [
            loss.detach().double(),
            loss.new_full((), n_examples, dtype=torch.float64),
            answers.sum().double(),
            n_answers,
            whole.sum().double(),
        ]
    )


def summary(sums: list[float]) -> dict[str, float]:
    """loss and accuracy; where an example asks for several answers, also `whole`: the share with all of them right."""
    loss, n_examples, right, answers, whole = sums
    result = {"loss": loss / n_examples, "accuracy": right / answers}
    return result if answers == n_examples else result | {"exact_match": whole / n_examples}


# Exact evaluation: each example counts once, however many processes share the work.


BATCH_SIZE = 512


def evaluate(
    model: nn.Module,
    objective: Objective,
    examples: Examples,
    normalize: Normalize | None,
    ranks: Ranks = ALONE,
    *,
    tta: TTA = "none",
    on_batch: Callable[[Batch, Tensor], None] | None = None,
) -> dict[str, float]:
    """Loss and accuracy over all examples, the same in every process; with several views of each image, the outputs are
    averaged first. In float32 whatever the precision of training, so that a run has one accuracy on every machine.
    `on_batch` is called with each batch of this process and the model's outputs."""
    sums = torch.zeros(N_COUNTS, dtype=torch.float64, device=ranks.device)
    with eval_mode(model), torch.inference_mode():
        for batch in evaluation_batches(examples, normalize, BATCH_SIZE, ranks.rank, ranks.world_size):
            batch = to_device(batch, ranks.device)
            outputs = answers(model, objective, batch, tta)
            if on_batch is not None:
                on_batch(batch, outputs)
            sums += counts(
                objective.loss(outputs, batch), objective.correct(outputs, batch), objective.loss_mask(batch)
            )
    return summary(ranks.all_reduce_sum(sums).tolist())


def answers(model: nn.Module, objective: Objective, batch: Batch, tta: TTA) -> Tensor:
    """The model's outputs. A process without a share of a batch asks about zeros: split weights must meet in step."""
    n = len(batch.inputs)
    if not n:
        inputs, targets = (side.new_zeros(1, *side.shape[1:]) for side in (batch.inputs, batch.targets))
        batch = replace(batch, inputs=inputs, targets=targets)
    outputs = tta_mean(lambda view: objective.compute_outputs(model, replace(batch, inputs=view)), batch.inputs, tta)
    return outputs[:n]
