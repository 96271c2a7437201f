"""Several encoder-decoders that write as one: the probability of the next token is the mean of theirs.

Models that were trained apart make different mistakes, and their mean makes fewer.
Dims: B batch, K source tokens, N sequences, V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from clearhead.models.generate import (
    Generated,
    Greedy,
    Strategy,
    Writer,
    check_generation,
    check_room,
    log_probabilities,
)
from clearhead.models.seq2seq import Seq2Seq
from clearhead.nn.stage import testing_stage


class Together(nn.Module):
    """Models of the same vocabularies, of any size each."""

    def __init__(self, models: Sequence[Seq2Seq]):
        super().__init__()
        sizes = sorted({(model.config.n_source, model.config.n_target) for model in models})
        if len(sizes) != 1:
            raise ValueError(
                f"models that write together have the same vocabularies, got sizes {sizes}; train them on the same data"
            )
        self.parts = nn.ModuleList(models)

    @property
    def models(self) -> list[Seq2Seq]:
        return cast(list[Seq2Seq], list(self.parts))

    def generate(
        self,
        source: Tensor,
        how: Strategy = Greedy(),
        *,
        begin: int,
        end: int | None,
        n_tokens: int,
        source_lengths: Tensor | None = None,
        use_cache: bool = True,
    ) -> Generated:
        """As Seq2Seq.generate; scores are log-probabilities under the mean."""
        prompt = torch.full((len(source), 1), begin, device=source.device)
        check_generation(prompt, n_tokens, self.models[0].config.n_target, end)
        for model in self.models:
            check_room(model.config, n_tokens)
        with testing_stage(self), torch.no_grad():
            makers = [model.writers(source, source_lengths, use_cache=use_cache) for model in self.models]
            return how(lambda n_each: WriterTogether([maker(n_each) for maker in makers]), prompt, n_tokens, end)


class WriterTogether:
    """Asks all writers for the next token, and answers their mean."""

    def __init__(self, writers: Sequence[Writer]):
        self.writers = writers

    def next_logits(self, ids: Tensor) -> Tensor:
        each = torch.stack([log_probabilities(writer.next_logits(ids)) for writer in self.writers])  # (writers,N,V)
        return each.logsumexp(0) - math.log(len(self.writers))

    def select(self, rows: Tensor) -> None:
        for writer in self.writers:
            writer.select(rows)
