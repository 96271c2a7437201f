"""Attribution over all layers: attention maps, rollout, gradient-weighted relevance, and occlusion.

- `mean_attention`, `max_attention` and `rollout` use the weights alone and ignore values, MLPs and norms. They show
  where information could have come from, not what caused the output.
- `relevance` weights attention by the gradient of a score: a first-order measure, which needs a pass with gradients.
- `occlusion` hides patches of the input and measures how the output changes, which is causal evidence.
  `deletion_curve` evaluates any map in this way: it hides the patches that the map ranks first. The better the map, the
  faster the probability falls.

A stack of layers is an AttentionTrace, or a list of weights (B,H,L,L) in order of execution. The last layer may have
fewer queries than the others: a pooling query, which is not a token and has no residual connection. A trace with
unresolved attention, or with attention inside windows, is refused unless `incomplete=True`.
Dims: B batch, H heads, L tokens, Q queries or target tokens, K keys or source tokens, P patches, C channels, V classes.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from clearhead.insight.trace import AttentionRecord, AttentionTrace

Update = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(attribution of the queries, weights, attribution of the keys) -> attribution after the layer"""

MAX_BATCH = 256
"""the largest batch of a forward pass in occlusion"""

Fill = Literal["gray", "mean", "black"]
ToLogits = Callable[[Any], Tensor]
"""from the output of the model to logits (B,V)"""


# Attention maps and rollout


def mean_attention(layers: "AttentionTrace | Sequence[Tensor]", *, incomplete: bool = False) -> Tensor:
    """The mean weight over all layers and heads (B,Q,K); rows sum to 1.

    It assumes that all heads matter equally, and that a token stays about its own position in every layer.
    """
    return torch.stack([weights.mean(1) for weights in layers_of_one_shape(layers, incomplete)]).mean(0)


def max_attention(layers: "AttentionTrace | Sequence[Tensor]", *, incomplete: bool = False) -> Tensor:
    """The largest weight in any layer and head (B,Q,K); rows sum to more than 1.

    It assumes that one head is enough, and that a token stays about its own position in every layer.
    """
    return torch.stack([weights.amax(1) for weights in layers_of_one_shape(layers, incomplete)]).amax(0)


def rollout(layers: "AttentionTrace | Sequence[Tensor]", *, incomplete: bool = False) -> Tensor:
    """(A_n + I)/2 ... (A_2 + I)/2 (A_1 + I)/2 with A the mean over a layer's heads: (B,L,L), whose rows sum to 1.

    Abnar & Zuidema (2020). It assumes that half of each token passes through the residual connection and half comes
    from attention, that all heads matter equally, and that values only mix. A fully masked row is left unchanged.
    """
    return propagate([weights.mean(1) for weights in stacked_layers(layers, incomplete)], rollout_update)


def rollout_encoder_decoder(
    encoder: Sequence[Tensor], decoder: Sequence[Tensor], cross: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The rollout from each target token to the target (B,Q,Q) and to the source (B,Q,K); together a row sums to 1.

    encoder (B,H,K,K), decoder (B,H,Q,Q) and cross (B,H,Q,K) are the weights of each layer.
    """
    layers = ([weights.mean(1) for weights in part] for part in (encoder, decoder, cross))
    return propagate_encoder_decoder(*layers, update=rollout_update)


def rollout_update(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    return (queries + weights @ keys) / (1 + weights.sum(-1, keepdim=True))


def output_map(matrix: Tensor, *, class_token: bool, num_register_tokens: int = 0) -> Tensor:
    """The attribution of the output to patches, (B,Q,K) -> (B,P): the row of the class token, or the mean row.

    Register tokens stand before the patches, after the class token; no output is read from them.
    """
    if class_token:
        return matrix[:, 0, 1 + num_register_tokens :]
    return matrix[:, num_register_tokens:, num_register_tokens:].mean(1)


def propagate(layers: Sequence[Tensor], update: Update) -> Tensor:
    """From the identity at the input through all layers: (B,L,L), or (B,Q,L) after a pooling query."""
    attribution = identity_like(layers[0])
    for weights in layers:
        is_pooling = weights.shape[-2] != weights.shape[-1]
        attribution = weights @ attribution if is_pooling else update(attribution, weights, attribution)
    return attribution


def propagate_encoder_decoder(
    encoder: Sequence[Tensor], decoder: Sequence[Tensor], cross: Sequence[Tensor], *, update: Update
) -> tuple[Tensor, Tensor]:
    """`propagate` for a decoder, whose layers attend to the target tokens first and then to the encoded source."""
    if not encoder or not cross or len(decoder) != len(cross):
        raise ValueError(
            "an encoder-decoder needs encoder layers, and as many decoder layers as cross-attention layers, "
            f"got {len(encoder)}, {len(decoder)} and {len(cross)}"
        )
    source = propagate(encoder, update)
    source = torch.cat([torch.zeros_like(cross[0].mT), source], dim=-1)  # (B,K,Q+K)
    attribution = torch.cat([identity_like(decoder[0]), torch.zeros_like(cross[0])], dim=-1)  # (B,Q,Q+K)
    for self_weights, cross_weights in zip(decoder, cross, strict=True):
        attribution = update(attribution, self_weights, attribution)
        attribution = update(attribution, cross_weights, source)
    target_length = decoder[0].shape[-1]
    return attribution[..., :target_length], attribution[..., target_length:]


def identity_like(square: Tensor) -> Tensor:
    return torch.eye(square.shape[-1], dtype=square.dtype, device=square.device).expand(len(square), -1, -1)


def weights_of(layers: "AttentionTrace | Sequence[Tensor]", incomplete: bool = False) -> list[Tensor]:
    """The weights (B,H,Q,K) of every layer, detached."""
    if not isinstance(layers, Sequence):
        check_complete(layers, incomplete)
    tensors = layers if isinstance(layers, Sequence) else [record.weights() for record in layers.values()]
    if not tensors:
        raise ValueError("at least one layer is needed, got none")
    return [weights.detach() for weights in tensors]


def check_complete(trace: "AttentionTrace", incomplete: bool) -> None:
    """A map of all layers needs all layers, each over the whole input."""
    if incomplete:
        return
    if trace.unresolved:
        listed = "; ".join(map(str, trace.unresolved[:3]))
        raise ValueError(
            f"the trace has {len(trace.unresolved)} unresolved attention calls ({listed}), so a map of all layers "
            "would leave them out; to use the recorded layers alone, pass incomplete=True"
        )
    if windows := {name: record.batch for name, record in trace.items() if not trace.is_batch_size(record.batch)}:
        name, batch = next(iter(windows.items()))
        raise ValueError(
            f"{name} attends {batch} times side by side, which is not the batch size: the input is divided into "
            "windows or merged with the heads, and its tokens are not those of the whole input; to use the weights as "
            "they are, pass incomplete=True"
        )


def stacked_layers(layers: "AttentionTrace | Sequence[Tensor]", incomplete: bool = False) -> list[Tensor]:
    tensors = weights_of(layers, incomplete)
    check_stack([tuple(weights.shape[-2:]) for weights in tensors])
    return tensors


def check_stack(shapes: Sequence[tuple[int, ...]]) -> None:
    length = shapes[0][-1]
    squares = shapes if shapes[-1][0] == length else shapes[:-1]
    if any(shape != (length, length) for shape in squares) or shapes[-1][1] != length:
        received = ", ".join(f"{q} x {k}" for q, k in shapes)
        raise ValueError(
            "the layers of a stack must have as many queries as keys, except for a pooling layer at the end, got "
            f"{received}; choose the layers of one stack, or use rollout_encoder_decoder"
        )


def layers_of_one_shape(layers: "AttentionTrace | Sequence[Tensor]", incomplete: bool = False) -> list[Tensor]:
    tensors = weights_of(layers, incomplete)
    shapes = {tuple(weights.shape[-2:]) for weights in tensors}
    if len(shapes) > 1:
        received = ", ".join(f"{q} x {k}" for q, k in sorted(shapes))
        raise ValueError(f"a mean or maximum needs layers of one shape, got {received}")
    return tensors


# Gradient-weighted relevance


def relevance(
    trace: "AttentionTrace", score: Tensor, names: Sequence[str] | None = None, *, incomplete: bool = False
) -> Tensor:
    """R = (I + C_n) ... (I + C_1) with C the mean over heads of relu(A * dA): (B,L,L), or (B,Q,L) after pooling.

    Chefer et al. (2021). A * dA is the contribution of each weight to the score, where dA = d_out vᵀ follows from
    out = A v. `score` (B,) or a single number is the output to explain, such as
    `trace.output[:, 3]`, of a pass with gradients enabled; the graph is kept, so several scores can be explained.
    `names` are the layers of one stack in order (default: all).
    """
    check_complete(trace, incomplete or names is not None)
    records = [trace[name] for name in (trace if names is None else names)]
    check_stack([(record.num_queries, record.num_keys) for record in records])
    return propagate(contributions(records, score), relevance_update)


def relevance_encoder_decoder(
    trace: "AttentionTrace", score: Tensor, *, encoder: Sequence[str], decoder: Sequence[str], cross: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """The relevance of the target (B,Q,Q) and of the source (B,Q,K) to each target token, by the layers' names."""
    layers = contributions([trace[name] for name in (*encoder, *decoder, *cross)], score)
    first, second = len(encoder), len(encoder) + len(decoder)
    return propagate_encoder_decoder(layers[:first], layers[first:second], layers[second:], update=relevance_update)


def relevance_update(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    return queries + weights @ keys


def contributions(records: "Sequence[AttentionRecord]", score: Tensor) -> list[Tensor]:
    """The mean over heads of relu(A * dA), for each layer: (B,Q,K)."""
    for record in records:
        if not record.call.raw_out.requires_grad:
            raise ValueError(
                f"relevance needs a pass with gradients, got none for {record.name}; call look outside of "
                "torch.no_grad, with parameters or inputs that require gradients"
            )
    if not score.requires_grad:
        raise ValueError("score must be computed from trace.output, got a tensor without a graph")
    outputs = [record.call.raw_out for record in records]
    gradients = torch.autograd.grad(score.sum(), outputs, retain_graph=True, allow_unused=True)
    return [contribution(record, gradient) for record, gradient in zip(records, gradients, strict=True)]


@torch.no_grad()
def contribution(record: "AttentionRecord", d_out: Tensor | None) -> Tensor:
    """Zero if the score does not depend on the layer."""
    weights = record.weights()
    if d_out is None:
        return torch.zeros_like(weights[:, 0])
    return (weights * weight_gradient(record, d_out)).clamp(min=0).mean(1)


def weight_gradient(record: "AttentionRecord", d_out: Tensor) -> Tensor:
    """d_out vᵀ (B,H,Q,K): the partial derivative of the score with respect to each weight."""
    return record.call.arrange_out(d_out) @ record.v.mT


# Occlusion


def occlusion(
    model: nn.Module,
    images: Tensor,
    grid: tuple[int, int],
    classes: Tensor | int | None = None,
    *,
    fill: Fill = "gray",
    logits: ToLogits = lambda output: output,
) -> Tensor:
    """How much the probability of a class drops when a patch is hidden: (B,rows,columns). Negative where it rises.

    images (B,C,height,width) as the model takes them, divided into `grid` = (rows, columns). `classes` is one class for
    all images or one for each (default: the predictions). A hidden patch is itself an unusual input for the model.
    """
    cells = grid_cells(images, grid)
    classes = target_classes(model, images, classes, logits)
    before = probability(model, images, classes, logits)
    replacement = fill_value(images, fill)
    after = [
        probability(
            model, torch.where(cells[:, None], replacement[i], images[i]), classes[i].expand(len(cells)), logits
        )
        for i in range(len(images))
    ]
    return (before[:, None] - torch.stack(after)).unflatten(1, grid)


def deletion_curve(
    model: nn.Module,
    images: Tensor,
    ranking: Tensor,
    classes: Tensor | int | None = None,
    *,
    fill: Fill = "gray",
    logits: ToLogits = lambda output: output,
) -> Tensor:
    """The probability of a class as patches are hidden one by one, the highest in `ranking` first: (B,P+1).

    ranking (B,rows,columns); ties are broken in row-major order.
    """
    if ranking.dim() != 3 or len(ranking) != len(images):
        raise ValueError(
            f"ranking must be (images, rows, columns), got {tuple(ranking.shape)} for {len(images)} images; "
            "for a single image, pass ranking[None]"
        )
    cells = grid_cells(images, (ranking.shape[1], ranking.shape[2]))
    classes = target_classes(model, images, classes, logits)
    replacement = fill_value(images, fill)
    order = ranking.flatten(1).argsort(dim=1, descending=True, stable=True)
    hidden, curve = torch.zeros_like(images[:, 0], dtype=torch.bool), []
    for step in range(len(cells) + 1):
        if step:
            hidden = hidden | cells[order[:, step - 1]]
        curve.append(probability(model, torch.where(hidden[:, None], replacement, images), classes, logits))
    return torch.stack(curve, dim=1)


def deletion_auc(curve: Tensor) -> Tensor:
    """The area under a deletion curve, (B,P+1) -> (B,), from 0 to 1. A smaller area means a better ranking."""
    return torch.trapezoid(curve, dx=1 / (curve.shape[1] - 1), dim=1)


def grid_cells(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """(P,height,width): for each cell of the grid, True inside it."""
    height, width = images.shape[-2:]
    rows, columns = grid
    if images.dim() != 4 or height % rows or width % columns:
        raise ValueError(
            "images must be (B,C,height,width), and the grid must divide their height and width, "
            f"got {tuple(images.shape)} and {rows} x {columns}"
        )
    cells = torch.eye(rows * columns, dtype=torch.bool, device=images.device).view(-1, rows, columns)
    return cells.repeat_interleave(height // rows, 1).repeat_interleave(width // columns, 2)


def fill_value(images: Tensor, fill: Fill) -> Tensor:
    """The color of a hidden patch (B,C,1,1): 0, which is gray in normalized images, or the image's mean or minimum."""
    if fill == "mean":
        return images.mean((2, 3), keepdim=True)
    if fill == "black":
        return images.amin((2, 3), keepdim=True)
    if fill != "gray":
        raise ValueError(f"fill must be one of gray, mean, black, got {fill!r}")
    return images.new_zeros(len(images), images.shape[1], 1, 1)


def target_classes(model: nn.Module, images: Tensor, classes: Tensor | int | None, logits: ToLogits) -> Tensor:
    if classes is None:
        return predict(model, images, logits).argmax(-1)
    return torch.as_tensor(classes, device=images.device).expand(len(images))


def probability(model: nn.Module, images: Tensor, classes: Tensor, logits: ToLogits) -> Tensor:
    """The probability of one class for each image: (B,)"""
    return F.softmax(predict(model, images, logits), dim=-1).gather(1, classes[:, None])[:, 0]


@torch.no_grad()
def predict(model: nn.Module, images: Tensor, logits: ToLogits) -> Tensor:
    return torch.cat([logits(model(part)) for part in images.split(MAX_BATCH)])
