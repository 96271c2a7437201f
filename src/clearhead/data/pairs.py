"""Sequences beside sequences: what an encoder-decoder reads, and what it is to write.

Dims: N examples, B batch, K source tokens, Q target tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from clearhead.data.tokens import IGNORED, PAD


@dataclass(frozen=True, eq=False)
class Pairs:
    """Source ids (N,K), padded with PAD, and target ids (N,Q), the end mark included, padded with IGNORED."""

    sources: Tensor
    targets: Tensor
    lengths: Tensor
    """(N,2): tokens of the source, tokens of the target"""

    @classmethod
    def of(cls, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> "Pairs":
        n_sources, n_targets = (torch.tensor(list(map(len, side)), dtype=torch.int64) for side in (sources, targets))
        lengths = torch.stack([n_sources, n_targets], dim=1)
        return cls(padded(sources, n_sources, PAD), padded(targets, n_targets, IGNORED), lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """(B,K) and (B,Q), as long as the longest of these."""
        longest = self.lengths[indices].amax(0) if len(indices) else torch.ones(2)
        source, target = longest.int().tolist()
        return self.sources[indices, :source].long(), self.targets[indices, :target].long()


def padded(sequences: Sequence[Sequence[int]], lengths: Tensor, value: int) -> Tensor:
    """(N, the longest), int32: small, because all of it stays in memory."""
    rows = torch.full((len(lengths), int(lengths.max()) if len(lengths) else 1), value, dtype=torch.int32)
    rows[torch.arange(rows.shape[1]) < lengths[:, None]] = torch.tensor([*chain(*sequences)], dtype=torch.int32)
    return rows
