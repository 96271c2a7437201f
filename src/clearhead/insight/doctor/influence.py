"""Who moves whom: one token is changed at a time, and every output is looked at.

Dims: B batch, L tokens, Q outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.insight.doctor.subject import Inputs, Masks, Subject
from clearhead.insight.leaks import movement

ROUGHLY = 100
"""roundings of float32"""


@dataclass(frozen=True, eq=False)
class Influence:
    """amounts (Q,L): how far output i moves, in any example, when token j is changed; 0 where it stays."""

    amounts: Tensor
    is_finite: bool
    """whether every answer was made of finite numbers"""

    @property
    def later(self) -> Tensor:
        """Of a token on an earlier output: what must not be in a causal model."""
        return self.amounts.triu(1)

    @property
    def earlier(self) -> Tensor:
        return self.amounts.tril(-1)

    def worst(self, of: Tensor) -> str:
        """The sentence that names the pair that moves most."""
        output, token = divmod(int(of.argmax()), of.shape[1])
        return f"output {output} moves by {of.max().item():.2g} when token {token} is changed"


def roughly_moved(before: Tensor, after: Tensor) -> Tensor:
    """movement() where sums are added up in another order, by a module that may calculate in float32 inside."""
    return movement(before.float(), after.float(), roundings=ROUGHLY)


def influence(
    subject: Subject,
    inputs: Inputs,
    masks: Masks | None = None,
    name: str | None = None,
    places: Sequence[int] | None = None,
) -> Influence:
    """Of the tokens of one sequence (the main one unless named) on the outputs; one column for each place."""
    name = subject.plan.main if name is None else name
    before = subject.answer(inputs, masks)
    columns, is_finite = [], bool(before.isfinite().all())
    for place in range(subject.plan.lengths[name]) if places is None else places:
        after = subject.answer(subject.changed(inputs, name, (slice(None), place)), masks)
        is_finite &= bool(after.isfinite().all())
        columns.append(movement(before, after).amax(0))
    return Influence(torch.stack(columns, dim=1), is_finite)
