"""From the attention of every layer to one matrix: which input token reached which output token.

All of these look at the weights alone and forget what the values, the feed-forward nets and the norms do: they show
where information could have come from, not what caused the answer. For that, see relevance.py and, as the proof,
occlusion.py.

A stack of layers is a `Seen`, or a list of weights (B,H,L,L) in the order of execution; the last layer may have fewer
queries than the others (a pooling query, which is no token and has no residual path around it).
Dims: B batch, H heads, L tokens, Q queries or target tokens, K keys or source tokens, P patches.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from clearhead.insight.seen import Seen

Add = Callable[[Tensor, Tensor, Tensor], Tensor]
"""from what a token was made of, the weights, and what the tokens it looks at are made of: what it is made of now"""


def mean(layers: "Seen | Sequence[Tensor]") -> Tensor:
    """The mean weight of all layers and heads (B,Q,K); its rows sum to 1.

    Assumes that every head matters alike, and that a token is still about its own place in every layer.
    """
    return torch.stack([weights.mean(1) for weights in equal_layers(layers)]).mean(0)


def maximum(layers: "Seen | Sequence[Tensor]") -> Tensor:
    """The largest weight in any layer and head (B,Q,K); its rows sum to more than 1.

    Assumes that one head that looks is enough, and that a token is still about its own place in every layer.
    """
    return torch.stack([weights.amax(1) for weights in equal_layers(layers)]).amax(0)


def rollout(layers: "Seen | Sequence[Tensor]") -> Tensor:
    """(A_n + I)/2 ... (A_2 + I)/2 (A_1 + I)/2 with A the mean of a layer's heads: (B,L,L), whose rows sum to 1.

    Assumes that half of a token passes each layer by the residual path and half is what it looks at, that heads matter
    alike, and that values only mix. A row of A that sees nothing passes on whole. (Abnar and Zuidema 2020.)
    """
    return follow([weights.mean(1) for weights in stack_of(layers)], through_residual)


def rollout_across(
    encoder: Sequence[Tensor], decoder: Sequence[Tensor], cross: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The rollout of an encoder-decoder: what each target token is made of, of the target (B,Q,Q) and source (B,Q,K).

    encoder (B,H,K,K), decoder (B,H,Q,Q) and cross (B,H,Q,K) are the weights of each layer. The rows of both together
    sum to 1. Assumes what `rollout` does, and that cross-attention has a residual path around it as well.
    """
    of_encoder, of_decoder, of_cross = ([weights.mean(1) for weights in part] for part in (encoder, decoder, cross))
    return follow_across(of_encoder, of_decoder, of_cross, through_residual)


def to_answer(matrix: Tensor, *, class_token: bool) -> Tensor:
    """What the answer is made of (B,Q,K) -> (B,P): with a class token, its row without itself; else the mean row."""
    return matrix[:, 0, 1:] if class_token else matrix.mean(1)


def through_residual(before: Tensor, weights: Tensor, looked_at: Tensor) -> Tensor:
    """One half as before and one half what is looked at, or all as before where nothing is."""
    return (before + weights @ looked_at) / (1 + weights.sum(-1, keepdim=True))


def follow(matrices: Sequence[Tensor], add: Add) -> Tensor:
    """Layer by layer from the input, where each token is itself: (B,L,L), or (B,Q,L) after a pooling query."""
    made_of = identity_like(matrices[0])
    for weights in matrices:
        pools = weights.shape[-2] != weights.shape[-1]
        made_of = weights @ made_of if pools else add(made_of, weights, made_of)
    return made_of


def follow_across(
    encoder: Sequence[Tensor], decoder: Sequence[Tensor], cross: Sequence[Tensor], add: Add
) -> tuple[Tensor, Tensor]:
    """The same for target tokens that look at one another and then, in the same layer, at the encoded source."""
    if not encoder or not cross or len(decoder) != len(cross):
        raise ValueError(
            "an encoder-decoder has encoder layers, and as many decoder layers as cross-attentions, got "
            f"{len(encoder)}, {len(decoder)} and {len(cross)}; pass the weights of all"
        )
    source = follow(encoder, add)
    nothing = torch.zeros_like(cross[0])
    of_source = torch.cat([torch.zeros_like(cross[0].mT), source], dim=-1)  # (B,K,Q+K): all of it from the source
    made_of = torch.cat([identity_like(decoder[0]), nothing], dim=-1)  # (B,Q,Q+K)
    for to_target, to_source in zip(decoder, cross, strict=True):
        made_of = add(made_of, to_target, made_of)
        made_of = add(made_of, to_source, of_source)
    n_targets = decoder[0].shape[-1]
    return made_of[..., :n_targets], made_of[..., n_targets:]


def identity_like(square: Tensor) -> Tensor:
    return torch.eye(square.shape[-1], dtype=square.dtype, device=square.device).expand(len(square), -1, -1)


def weights_of(layers: "Seen | Sequence[Tensor]") -> list[Tensor]:
    """The weights (B,H,Q,K) of every layer, without their graph."""
    tensors = layers if isinstance(layers, Sequence) else [layers[address].weights() for address in layers]
    if not tensors:
        raise ValueError("there must be at least one layer, got none; pass the weights of each")
    return [weights.detach() for weights in tensors]


def stack_of(layers: "Seen | Sequence[Tensor]") -> list[Tensor]:
    """Those of a stack in which the tokens of one layer are the tokens of the next."""
    tensors = weights_of(layers)
    check_stack([tuple(weights.shape[-2:]) for weights in tensors])
    return tensors


def check_stack(shapes: Sequence[tuple[int, ...]]) -> None:
    n_tokens = shapes[0][-1]
    squares = shapes if shapes[-1][0] == n_tokens else shapes[:-1]
    if any(shape != (n_tokens, n_tokens) for shape in squares) or shapes[-1][1] != n_tokens:
        came = ", ".join(f"{q} x {k}" for q, k in shapes)
        raise ValueError(
            f"the layers of a stack have as many queries as keys, but for a last one that pools, got {came}; pass the "
            "weights of one stack, or those of an encoder-decoder to rollout_across"
        )


def equal_layers(layers: "Seen | Sequence[Tensor]") -> list[Tensor]:
    tensors = weights_of(layers)
    shapes = {tuple(weights.shape[-2:]) for weights in tensors}
    if len(shapes) > 1:
        came = ", ".join(f"{q} x {k}" for q, k in sorted(shapes))
        raise ValueError(
            f"a mean or maximum is over layers of one shape, got {came}; pass the weights of those that belong together"
        )
    return tensors
