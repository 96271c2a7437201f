"""What the attention weights themselves show, where they can be seen: how far they reach, and whether rows sum to 1.

Dims: B batch, H heads, Q queries, K keys.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.insight.doctor.report import Finding, counted
from clearhead.insight.doctor.subject import Inputs, Masks, Subject, undisturbed
from clearhead.insight.look import look
from clearhead.insight.seen import SeenLayer

NAME = "weights"


@dataclass(frozen=True, eq=False)
class Shown:
    """The weights of one attention layer."""

    address: str
    weights: Tensor
    is_torch_nn: bool
    is_finite: bool

    @property
    def reach(self) -> str:
        """causal, one too far, not itself, inverted, open, or other: which keys have any weight, by place."""
        n_queries, n_keys = self.weights.shape[-2:]
        if n_queries != n_keys or n_keys < 3:
            return "other"
        sees = (self.weights > 0).flatten(0, 1).any(0)
        full = torch.ones_like(sees)
        if sees.equal(full.tril()):
            return "causal"
        if sees.equal(full.tril(1)):
            return "one too far"
        if sees[1:].equal(full.tril(-1)[1:]):  # the first row sees nothing, or whatever that is turned into
            return "not itself"
        if sees[:-1].equal(full.triu(1)[:-1]) or sees.equal(full.triu()):
            return "inverted"
        return "open" if sees.all() else "other"

    @property
    def sees_not_itself(self) -> bool:
        """Whether no query has any weight on its own token; the first is left out, which then sees none."""
        n_queries, n_keys = self.weights.shape[-2:]
        return n_queries == n_keys > 2 and not bool(self.weights.diagonal(dim1=-2, dim2=-1)[..., 1:].any())

    @property
    def is_masked_late(self) -> bool:
        """Some keys weigh exactly nothing, and what they would have had is missing from the row's sum."""
        sums = self.weights.sum(-1)
        short = (sums > 0) & (sums < 1 - 1e-4)
        has_holes = (self.weights == 0).any(-1)
        return bool((short & has_holes).any()) and not bool((short & ~has_holes).any())

    @property
    def sums(self) -> tuple[float, float]:
        """The smallest and the largest sum of a row that sees something."""
        sums = self.weights.sum(-1)
        sums = sums[sums != 0]
        return (sums.min().item(), sums.max().item()) if sums.numel() else (1.0, 1.0)


def shown(subject: Subject, masks: Masks | None = None, inputs: Inputs | None = None) -> list[Shown]:
    """All attention that can be seen in one ordinary call; none if it is hidden, or if the call fails."""
    arguments = subject.arguments(subject.draw(0) if inputs is None else inputs, masks or {})
    with torch.no_grad(), undisturbed(subject.dtype, 0):
        try:
            seen = look(subject.model, **arguments)
        except Exception:  # no attention, or a module that does not like to be watched: other checks go on
            return []
        return [shown_of(layer) for layer in seen.layers.values()]


def shown_of(layer: SeenLayer) -> Shown:
    is_finite = bool(layer.out.isfinite().all())
    return Shown(layer.address, layer.weights(), layer.kernel == "nn.MultiheadAttention", is_finite)


def check_rows(subject: Subject) -> Finding:
    """The weights of a query sum to 1, or to 0 where it may see nothing."""
    layers = shown(subject)
    if not layers:
        return Finding(NAME, "not checked", "no attention was seen inside; clearhead.look says what it looks for")
    for layer in layers:
        low, high = layer.sums
        if layer.is_masked_late:
            text = f"at {layer.address} rows of weights sum to {low:.2f}: the mask comes after the softmax"
            return Finding(NAME, "fault", f"{text}; hide scores before it")
        if abs(low - 1) > 1e-4 or abs(high - 1) > 1e-4:
            text = f"at {layer.address} rows of weights sum to {low:.2f} to {high:.2f}, not 1"
            return Finding(NAME, "warning", f"{text}: heads that are mixed, or a softmax over the wrong axis?")
    return Finding(NAME, "fine", f"rows of weights sum to 1 in {counted(len(layers), 'attention layer')}")
