"""From the attention of every layer to one matrix: which input token reached which output token.

All of these look at the weights alone and forget what the values, the feed-forward nets and the norms do: they show
where information could have come from, not what caused the answer. For that, see relevance.py and, as the proof,
occlusion.py.

A stack of layers is a `Seen`, or a list of weights (B,H,L,L) in the order of execution; the last layer may have fewer
queries than the others (a pooling query, which is no token and has no residual path around it).
Dims: B batch, H heads, L tokens, Q queries or target tokens, K keys or source tokens, P patches.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from clearhead.insight.look import AttentionRecord, AttentionTrace

Add = Callable[[Tensor, Tensor, Tensor], Tensor]
"""from what a token was made of, the weights, and what the tokens it looks at are made of: what it is made of now"""


def mean(layers: "AttentionTrace | Sequence[Tensor]") -> Tensor:
    """The mean weight of all layers and heads (B,Q,K); its rows sum to 1.

    Assumes that every head matters alike, and that a token is still about its own place in every layer.
    """
    return torch.stack([weights.mean(1) for weights in equal_layers(layers)]).mean(0)


def maximum(layers: "AttentionTrace | Sequence[Tensor]") -> Tensor:
    """The largest weight in any layer and head (B,Q,K); its rows sum to more than 1.

    Assumes that one head that looks is enough, and that a token is still about its own place in every layer.
    """
    return torch.stack([weights.amax(1) for weights in equal_layers(layers)]).amax(0)


def rollout(layers: "AttentionTrace | Sequence[Tensor]") -> Tensor:
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


def weights_of(layers: "AttentionTrace | Sequence[Tensor]") -> list[Tensor]:
    """The weights (B,H,Q,K) of every layer, without their graph."""
    tensors = layers if isinstance(layers, Sequence) else [layers[name].weights() for name in layers]
    if not tensors:
        raise ValueError("there must be at least one layer, got none; pass the weights of each")
    return [weights.detach() for weights in tensors]


def stack_of(layers: "AttentionTrace | Sequence[Tensor]") -> list[Tensor]:
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


def equal_layers(layers: "AttentionTrace | Sequence[Tensor]") -> list[Tensor]:
    tensors = weights_of(layers)
    shapes = {tuple(weights.shape[-2:]) for weights in tensors}
    if len(shapes) > 1:
        came = ", ".join(f"{q} x {k}" for q, k in sorted(shapes))
        raise ValueError(
            f"a mean or maximum is over layers of one shape, got {came}; pass the weights of those that belong together"
        )
    return tensors


# Gradient-weighted relevance: attention that counts as far as it speaks for a class.
#
# A weight matters as much as the class's score would change with it: A * dA, of which only what speaks *for* the
# class is
# kept. No slow path is needed for dA: out = A v, therefore dA = d_out vᵀ, and both are there after `look` with
# gradients:
#
#     seen = clearhead.look(model, images)               # grad mode on
#     relevance(seen, seen.output[:, 3])                 # for class 3, (B,L,L)
#
# It is first-order: it says what a small change of the weights would do, and it still follows tokens by their place.
# (After Chefer, Gur and Wolf 2021.)
# Dims: B batch, H heads, L tokens, Q queries or target tokens, K keys or source tokens.


def relevance(seen: "AttentionTrace", score: Tensor, names: Sequence[str] | None = None) -> Tensor:
    """R = (I + C_n) ... (I + C_1), C = the heads' mean of relu(A * dA): (B,L,L), row i what token i owes to each input.

    `score` (B,), or one number, is the output to explain, such as `seen.output[:, 3]`; `names` chooses the layers
    of one stack in their order, all unless given. After a pooling query it is (B,Q,L). Answers may be asked one by one:
    the graph stays.
    """
    chosen = list(seen) if names is None else list(names)
    layers = [seen[name] for name in chosen]
    check_stack([(layer.num_queries, layer.num_keys) for layer in layers])
    return follow(contributions(layers, score), add_relevance)


def relevance_across(
    seen: "AttentionTrace", score: Tensor, *, encoder: Sequence[str], decoder: Sequence[str], cross: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """The same for an encoder-decoder, by the names of its layers: of each target token, what it owes to the target
    (B,Q,Q) and to the source (B,Q,K)."""
    names = [*encoder, *decoder, *cross]
    found = contributions([seen[name] for name in names], score)
    first, second = len(encoder), len(encoder) + len(decoder)
    return follow_across(found[:first], found[first:second], found[second:], add_relevance)


def add_relevance(before: Tensor, weights: Tensor, looked_at: Tensor) -> Tensor:
    return before + weights @ looked_at


def contributions(layers: "Sequence[AttentionRecord]", score: Tensor) -> list[Tensor]:
    """relu(A * dA), the mean of the heads, for each layer: (B,Q,K)"""
    for layer in layers:
        if not layer.call.raw_out.requires_grad:
            raise ValueError(
                f"relevance needs a pass with gradients, got none for {layer.name}; look again, outside of "
                "torch.no_grad, with parameters or inputs that require them"
            )
    if not score.requires_grad:
        raise ValueError("the score must come from seen.output, got one without a graph; take seen.output[:, 3]")
    outputs = [layer.call.raw_out for layer in layers]
    gradients = torch.autograd.grad(score.sum(), outputs, retain_graph=True, allow_unused=True)
    return [contribution(layer, gradient) for layer, gradient in zip(layers, gradients, strict=True)]


@torch.no_grad()
def contribution(layer: "AttentionRecord", d_out: Tensor | None) -> Tensor:
    """Zero where the score does not depend on the layer."""
    weights = layer.weights()
    if d_out is None:
        return torch.zeros_like(weights[:, 0])
    return (weights * weight_gradient(layer, d_out)).clamp(min=0).mean(1)


def weight_gradient(layer: "AttentionRecord", d_out: Tensor) -> Tensor:
    """d_out vᵀ: how the score would change with each weight, all others left as they are. (B,H,Q,K)"""
    return layer.call.arranged(d_out) @ layer.v.mT


# Occlusion: hide a patch and see the probability of the class move.
#
# It changes the input and asks the model, so it is evidence of cause where attention is none; and it is the judge of
# the
# other maps: hide the patches that a map ranks first, and the better the map, the sooner the probability falls.
# What is hidden must be replaced by something, and that too is an input that the model has not been trained on.
# Dims: B images, C channels, P patches, V classes.


AT_ONCE = 256
"""images in one pass"""

Fill = Literal["grey", "mean", "black"]
Logits = Callable[[Any], Tensor]
"""from what a model returns to logits (B,V)"""


def occlusion(
    model: nn.Module,
    images: Tensor,
    grid: tuple[int, int],
    classes: Tensor | int | None = None,
    *,
    fill: Fill = "grey",
    logits: Logits = lambda output: output,
) -> Tensor:
    """How much of a class's probability each patch holds up: before minus after hiding it, (B,rows,columns).

    images (B,C,height,width) as the model takes them, cut into `grid` = (rows, columns); classes is one for all or one
    for each, the model's answers unless given. Negative where hiding helps.
    """
    cells = cells_of(images, grid)
    classes = class_of_each(model, images, classes, logits)
    before = probability(model, images, classes, logits)
    hidden = replacement(images, fill)
    after = [
        probability(model, torch.where(cells[:, None], hidden[i], images[i]), classes[i].expand(len(cells)), logits)
        for i in range(len(images))
    ]
    return (before[:, None] - torch.stack(after)).unflatten(1, grid)


def deletion_curve(
    model: nn.Module,
    images: Tensor,
    ranking: Tensor,
    classes: Tensor | int | None = None,
    *,
    fill: Fill = "grey",
    logits: Logits = lambda output: output,
) -> Tensor:
    """The probability of a class as patches are hidden, those with the largest number in `ranking` first: (B,P+1).

    ranking (B,rows,columns); of equal numbers the earlier place goes first.
    """
    if ranking.dim() != 3 or len(ranking) != len(images):
        raise ValueError(
            f"a ranking is (images, rows, columns), got {tuple(ranking.shape)} for {len(images)} images; "
            "of one image, take ranking[None]"
        )
    cells = cells_of(images, (ranking.shape[1], ranking.shape[2]))
    classes = class_of_each(model, images, classes, logits)
    hidden = replacement(images, fill)
    order = ranking.flatten(1).argsort(dim=1, descending=True, stable=True)
    covered, curve = torch.zeros_like(images[:, 0], dtype=torch.bool), []
    for step in range(len(cells) + 1):
        if step:
            covered = covered | cells[order[:, step - 1]]
        curve.append(probability(model, torch.where(covered[:, None], hidden, images), classes, logits))
    return torch.stack(curve, dim=1)


def deletion_area(curve: Tensor) -> Tensor:
    """The area under a deletion curve (B,P+1), of a whole that is 1 wide and 1 high: (B,). Smaller is the better
    ranking."""
    return torch.trapezoid(curve, dx=1 / (curve.shape[1] - 1), dim=1)


def cells_of(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """(P,height,width): True in each cell of the grid."""
    height, width = images.shape[-2:]
    rows, columns = grid
    if images.dim() != 4 or height % rows or width % columns:
        raise ValueError(
            f"images are (B,C,height,width), cut into rows and columns that divide them, got {tuple(images.shape)} and "
            f"{rows} x {columns}; of one image, take image[None]"
        )
    cells = torch.eye(rows * columns, dtype=torch.bool, device=images.device).view(-1, rows, columns)
    return cells.repeat_interleave(height // rows, 1).repeat_interleave(width // columns, 2)


def replacement(images: Tensor, fill: Fill) -> Tensor:
    """What stands in for a hidden patch, (B,C,1,1): the 0 of normalised images, or an image's own mean or darkest."""
    if fill == "mean":
        return images.mean((2, 3), keepdim=True)
    if fill == "black":
        return images.amin((2, 3), keepdim=True)
    if fill != "grey":
        raise ValueError(
            f"fill must be one of grey, mean, black, got {fill!r}; grey is 0, the mean of normalised images"
        )
    return images.new_zeros(len(images), images.shape[1], 1, 1)


def class_of_each(model: nn.Module, images: Tensor, classes: Tensor | int | None, logits: Logits) -> Tensor:
    if classes is None:
        return answers(model, images, logits).argmax(-1)
    return torch.as_tensor(classes, device=images.device).expand(len(images))


def probability(model: nn.Module, images: Tensor, classes: Tensor, logits: Logits) -> Tensor:
    """Of one class for each image: (B,)"""
    return F.softmax(answers(model, images, logits), dim=-1).gather(1, classes[:, None])[:, 0]


@torch.no_grad()
def answers(model: nn.Module, images: Tensor, logits: Logits) -> Tensor:
    return torch.cat([logits(model(part)) for part in images.split(AT_ONCE)])
