"""Does the model see what it must not? Asked before the first step of every run that writes token by token.

A few training examples are changed where an output must not look, after its place and in the padding. A model that
saw the answer would score well and learn nothing, so a leak ends the run.
"""

import torch.nn.functional as F

from clearhead.data.tokens import PAD
from clearhead.insight.leaks import Leak, future_leak, padding_leak
from clearhead.models.config import LanguageConfig, Seq2SeqConfig
from clearhead.nn.stage import testing_stage
from clearhead.training.objective import before
from clearhead.training.setup import Setup

EXAMPLES, LONGEST, PADDING = 8, 64, 2
"""how many are changed; tokens of each that are looked at; places of padding that a source gets at least"""


def check_masks(setup: Setup) -> bool:
    """Whether there was something to check; a leak is an error. All processes look at the same examples."""
    model = setup.config.model
    if not isinstance(model, Seq2SeqConfig | LanguageConfig):
        return False
    with testing_stage(setup.model):
        leak = leak_of_pairs(setup, model) if isinstance(model, Seq2SeqConfig) else leak_of_text(setup, model)
    if leak is not None:
        raise ValueError(
            f"no output may depend on what comes after it, or on padding, got a model that leaks: {leak}; "
            "correct its masks before it is trained"
        )
    return True


def leak_of_text(setup: Setup, model: LanguageConfig) -> Leak | None:
    ids = setup.batches.at(0).inputs[:EXAMPLES, :LONGEST].to(setup.processes.device)
    return future_leak(setup.model, ids, model.n_tokens)


def leak_of_pairs(setup: Setup, model: Seq2SeqConfig) -> Leak | None:
    batch, device = setup.batches.at(0), setup.processes.device
    source, target = batch.inputs[:EXAMPLES, :LONGEST].to(device), before(batch.targets)[:EXAMPLES, :LONGEST].to(device)
    n_free = model.context - source.shape[1] if model.positions == "learned" else PADDING
    source, lengths = F.pad(source, (0, min(PADDING, n_free)), value=PAD), (source != PAD).sum(1)
    leak = future_leak(lambda ids: setup.model(source, ids, source_lengths=lengths), target, model.n_target)
    if leak is not None:
        return leak
    counted = lengths.new_full(lengths.shape, target.shape[1])
    return padding_leak(
        lambda ids: setup.model(ids, target, source_lengths=lengths),
        source,
        lengths,
        model.n_source,
        output_lengths=counted,
    )
