"""Gradient-weighted relevance: attention that counts as far as it speaks for a class.

A weight matters as much as the class's score would change with it: A * dA, of which only what speaks *for* the class is
kept. No slow path is needed for dA: out = A v, therefore dA = d_out vᵀ, and both are there after `look` with gradients:

    seen = clearhead.look(model, images)               # grad mode on
    relevance(seen, seen.output[:, 3])                 # for class 3, (B,L,L)

It is first-order: it says what a small change of the weights would do, and it still follows tokens by their place.
(After Chefer, Gur and Wolf 2021.)
Dims: B batch, H heads, L tokens, Q queries or target tokens, K keys or source tokens.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead.insight.rollout import check_stack, follow, follow_across

if TYPE_CHECKING:
    from clearhead.insight.seen import Seen, SeenLayer


def relevance(seen: "Seen", score: Tensor, addresses: Sequence[str] | None = None) -> Tensor:
    """R = (I + C_n) ... (I + C_1), C = the heads' mean of relu(A * dA): (B,L,L), row i what token i owes to each input.

    `score` (B,), or one number, is the output to explain, such as `seen.output[:, 3]`; `addresses` chooses the layers
    of one stack in their order, all unless given. After a pooling query it is (B,Q,L). Answers may be asked one by one:
    the graph stays.
    """
    chosen = list(seen) if addresses is None else list(addresses)
    layers = [seen[address] for address in chosen]
    check_stack([(layer.n_queries, layer.n_keys) for layer in layers])
    return follow(contributions(layers, score), add_relevance)


def relevance_across(
    seen: "Seen", score: Tensor, *, encoder: Sequence[str], decoder: Sequence[str], cross: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """The same for an encoder-decoder, by the addresses of its layers: of each target token, what it owes to the target
    (B,Q,Q) and to the source (B,Q,K)."""
    addresses = [*encoder, *decoder, *cross]
    found = contributions([seen[address] for address in addresses], score)
    first, second = len(encoder), len(encoder) + len(decoder)
    return follow_across(found[:first], found[first:second], found[second:], add_relevance)


def add_relevance(before: Tensor, weights: Tensor, looked_at: Tensor) -> Tensor:
    return before + weights @ looked_at


def contributions(layers: "Sequence[SeenLayer]", score: Tensor) -> list[Tensor]:
    """relu(A * dA), the mean of the heads, for each layer: (B,Q,K)"""
    for layer in layers:
        if not layer.call.raw_out.requires_grad:
            raise ValueError(
                f"relevance needs a pass with gradients, got none for {layer.address}; look again, outside of "
                "torch.no_grad, with parameters or inputs that require them"
            )
    if not score.requires_grad:
        raise ValueError("the score must come from seen.output, got one without a graph; take seen.output[:, 3]")
    outputs = [layer.call.raw_out for layer in layers]
    gradients = torch.autograd.grad(score.sum(), outputs, retain_graph=True, allow_unused=True)
    return [contribution(layer, gradient) for layer, gradient in zip(layers, gradients, strict=True)]


@torch.no_grad()
def contribution(layer: "SeenLayer", d_out: Tensor | None) -> Tensor:
    """Zero where the score does not depend on the layer."""
    weights = layer.weights()
    if d_out is None:
        return torch.zeros_like(weights[:, 0])
    return (weights * weight_gradient(layer, d_out)).clamp(min=0).mean(1)


def weight_gradient(layer: "SeenLayer", d_out: Tensor) -> Tensor:
    """d_out vᵀ: how the score would change with each weight, all others left as they are. (B,H,Q,K)"""
    return layer.call.arranged(d_out) @ layer.v.mT
