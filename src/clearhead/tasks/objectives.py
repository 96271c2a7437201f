"""Objectives: the loss that training minimizes, and which predictions are correct.

A loss is the sum over the examples of a batch, not the mean. Sums add up over batches, microbatches and ranks; dividing
by the number of all examples gives the exact mean.

Dims: B batch, L length, Q target length, V classes or vocabulary, S elements of a set.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.data.batches import Batch
from clearhead.data.dataset import num_examples
from clearhead.data.vocab import BOS, IGNORE_INDEX, PAD


class Objective(Protocol):
    """What a model is trained for. Implementations are stateless."""

    has_classes: bool = False
    """whether a confusion matrix makes sense"""
    is_number: bool = False
    """whether predictions are numbers rather than classes"""

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

    def probabilities(self, outputs: Tensor) -> Tensor:
        """The probability of each class, (B,V)."""
        return outputs.softmax(-1)

    def decode(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The predicted classes and their probabilities."""
        classes = outputs.argmax(-1)  # of logits: different ones may have probabilities that round to the same number
        return classes, outputs.softmax(-1).gather(-1, classes[..., None])[..., 0]


class Classification(Objective):
    """One of V classes per example: logits (B,V), targets (B,).

    With mixup, the loss is lam * loss(targets) + (1 - lam) * loss(targets_b).
    """

    has_classes = True

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

    has_classes = True

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        logits, targets = outputs.float().flatten(0, 1), batch.targets.flatten()
        return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing) / batch.targets.shape[1]

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        return outputs.argmax(dim=-1) == batch.targets


class BinaryClassification(Objective):
    """Two classes, 0 and 1: one logit (B,1), targets (B,)."""

    has_classes = True

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        targets = batch.targets.float() * (1 - smoothing) + smoothing / 2
        return F.binary_cross_entropy_with_logits(outputs.float().squeeze(-1), targets, reduction="sum")

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        return (outputs.squeeze(-1) > 0) == (batch.targets > 0.5)

    def probabilities(self, outputs: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(outputs), outputs], dim=-1).softmax(-1)  # softmax([0, z]) is sigmoid(z)

    def decode(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = outputs.squeeze(-1)
        return (logits > 0).long(), logits.abs().sigmoid()


class Regression(Objective):
    """A number (B,1), trained with the squared error to the target (B,); correct if both round to the same integer."""

    is_number = True

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        return F.mse_loss(outputs.float().squeeze(-1), batch.targets.float(), reduction="sum")

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        return outputs.squeeze(-1).round() == batch.targets.round()

    def decode(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The predicted numbers, and their absolute errors."""
        values = outputs.squeeze(-1)
        return values, (values - targets).abs()


class SetPointer(Objective):
    """The index of one element of a set: scores (B,S,1), softmax over the set, targets (B,)."""

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        scores = outputs.float().squeeze(-1)
        return F.cross_entropy(scores, batch.targets, reduction="sum", label_smoothing=smoothing)

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        return outputs.squeeze(-1).argmax(dim=-1) == batch.targets

    def decode(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return super().decode(outputs.squeeze(-1), targets)


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


def shift_right(targets: Tensor) -> Tensor:
    """The decoder's inputs: BOS, followed by the targets without their last token. (B,Q) -> (B,Q)"""
    bos = torch.full_like(targets[:, :1], BOS)
    return torch.cat([bos, targets[:, :-1].masked_fill(targets[:, :-1] == IGNORE_INDEX, PAD)], dim=1)


class UserObjective(Objective):
    """The functions that `clearhead.fit` was given.

    `loss(outputs, targets)` returns the mean over a batch, as PyTorch's losses do; `correct(outputs, targets)` a bool
    tensor (B,) or (B,L), and `forward(model, inputs)` the outputs.
    """

    def __init__(
        self,
        loss: Callable[[Any, Any], Tensor] | None = None,
        correct: Callable[[Any, Any], Tensor] | None = None,
        forward: Callable[[Callable[..., Any], Any], Any] | None = None,
    ):
        self.mean_loss = loss or cross_entropy
        self.is_correct = correct
        self.call = forward or call_model

    def compute_outputs(self, forward: Callable[..., Any], batch: Batch) -> Any:
        return self.call(forward, batch.inputs)

    def loss(self, outputs: Any, batch: Batch, smoothing: float = 0.0) -> Tensor:
        if isinstance(outputs, Tensor) and outputs.dtype in (torch.bfloat16, torch.float16):  # of autocast
            outputs = outputs.float()
        mean = self.mean_loss(outputs, batch.targets)
        if not isinstance(mean, Tensor) or mean.dim():
            got = f"shape {tuple(mean.shape)}" if isinstance(mean, Tensor) else f"a {type(mean).__name__}"
            raise ValueError(f"loss must return a tensor without dimensions, the mean over the batch, got {got}")
        return mean * num_examples(batch.inputs)

    def correct(self, outputs: Any, batch: Batch) -> Tensor | None:  # type: ignore[override]
        """Without a function of the user: of logits (B,V) or (B,L,V) and integer targets (B,) or (B,L); else None."""
        if self.is_correct is not None:
            return self.is_correct(outputs, batch.targets)
        logits = logits_in(outputs)
        return logits.argmax(-1) == batch.targets if are_classes(logits, batch.targets) else None

    def loss_mask(self, batch: Batch) -> Tensor | None:
        targets = batch.targets
        if self.is_correct is not None or not isinstance(targets, Tensor) or targets.dim() < 2:
            return None
        return targets != IGNORE_INDEX

    def score(self, result: dict[str, float]) -> list[float]:
        return super().score(result) if "accuracy" in result else [-result["loss"]]


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """model(**inputs) for a dict, model(*inputs) for a tuple or a list, model(inputs) for anything else."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def logits_in(outputs: Any) -> Any:
    """The outputs themselves, or their `logits`, as Hugging Face's models return them."""
    return outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)


def are_classes(logits: Any, targets: Any) -> bool:
    """Whether there is one class, given by its index, for each vector of logits."""
    if not isinstance(logits, Tensor) or not isinstance(targets, Tensor):
        return False
    return targets.dtype == torch.int64 and logits.dim() > 1 and targets.shape == logits.shape[:-1]


def cross_entropy(outputs: Any, targets: Any) -> Tensor:
    """The mean cross-entropy of logits (B,V) or (B,L,V) and classes (B,) or (B,L); IGNORE_INDEX is left out."""
    logits = logits_in(outputs)
    if not are_classes(logits, targets):
        shapes = " and ".join(
            f"{type(value).__name__} of {value.dtype} {tuple(value.shape)}"
            if isinstance(value, Tensor)
            else type(value).__name__
            for value in (outputs, targets)
        )
        raise ValueError(
            "the default loss is the cross-entropy of logits (B,V) or (B,L,V) and int64 classes (B,) or (B,L), got "
            f"{shapes}; pass loss="
        )
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX)
