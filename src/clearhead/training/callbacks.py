"""Callbacks of `clearhead.fit`: the user's own functions, called after each record of metrics.jsonl."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from clearhead.nn.blocks import eval_mode
from clearhead.training.distributed import Ranks, preserved_rng


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
